"""Every tap of the layer shows what the next step uses, and what is handed back is used instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal, Window
from manyheads.parts.positions import Alibi, Rotary, Shaw
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Tap, WatchContext

WIDTH, HEADS, KV_HEADS, SIZE = 10, 4, 2, 6
EACH = (5, 0, 1, 3)


def made(**choices: Any) -> Attention:
    shape = {"width": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE}
    layer = Attention(AttentionConfig(**shape | choices))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return layer.eval()


def drawn(*each: int) -> Ragged:
    return Ragged.from_list([torch.randn(length, WIDTH) for length in each])


class Change:
    """Changes what it sees at one tap."""

    def __init__(self, tap: Tap, change: Callable[[Tensor], Tensor]) -> None:
        self.tap = tap
        self.change = change

    def wants(self, site: Site) -> bool:
        return site.tap is self.tap

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns:  # noqa: ARG002
        if isinstance(value, Patterns):
            return Patterns(tuple(map(self.change, value.each)))
        return value.map(self.change)


def recorded(layer: Attention, batch: Ragged, *taps: Tap, **more: Any) -> dict[Tap, Any]:
    record = Record([Site(3, tap) for tap in taps])
    layer(batch, context=WatchContext(record, layer=3), **more)
    return {tap: record[Site(3, tap)] for tap in taps}


def changed(
    layer: Attention, batch: Ragged, tap: Tap, change: Callable[[Tensor], Tensor]
) -> Tensor:
    return layer(batch, context=WatchContext(Change(tap, change), layer=3)).values


def test_every_tap_has_its_shape() -> None:
    gates = (Gate(at="output"), Gate(at="value", per="channel", heads="shared"))
    layer = made(gates=gates, mask=Causal())
    batch = drawn(*EACH)
    taps = (Tap.QUERY, Tap.KEY, Tap.VALUE, Tap.HEAD_OUTPUT, Tap.GATE_OUTPUT, Tap.GATE_VALUE)
    seen = recorded(layer, batch, *taps)
    assert {tap: tuple(value.values.shape) for tap, value in seen.items()} == {
        Tap.QUERY: (9, HEADS, SIZE),
        Tap.KEY: (9, KV_HEADS, SIZE),
        Tap.VALUE: (9, KV_HEADS, SIZE),
        Tap.HEAD_OUTPUT: (9, HEADS, SIZE),
        Tap.GATE_OUTPUT: (9, HEADS, 1),
        Tap.GATE_VALUE: (9, 1, SIZE),
    }
    assert {value.lengths.each for value in seen.values()} == {EACH}
    for tap in (Tap.SCORES, Tap.PATTERN):
        patterns = recorded(layer, batch, tap)[tap]
        assert [tuple(each.shape) for each in patterns.each] == [(HEADS, n, n) for n in EACH]


@pytest.mark.parametrize(
    "choices",
    [
        {"mask": Causal(), "position": Rotary()},
        {"mask": Window(2, 1), "position": Alibi()},
        {"position": Shaw(reach=2, values=True)},
        {"mask": Causal(), "sink": "learned"},
    ],
    ids=str,
)
def test_scores_and_patterns_follow_from_queries_and_keys(choices: dict[str, Any]) -> None:
    layer = made(**choices)
    batch = drawn(*EACH)
    seen = recorded(layer, batch, Tap.QUERY, Tap.KEY, Tap.VALUE, Tap.SCORES, Tap.PATTERN)
    for index, length in enumerate(EACH):
        query = seen[Tap.QUERY].of(index)
        key = seen[Tap.KEY].of(index).repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("thd,shd->hts", query, key)
        place = torch.arange(length)
        distance = place[None, :] - place[:, None]
        if isinstance(layer.config.position, Shaw):
            vectors = layer.table.keys[distance.clamp(-2, 2) + 2]
            scores = scores + torch.einsum("thd,tsd->hts", query, vectors)
        scores = scores * SIZE**-0.5
        if isinstance(layer.config.position, Alibi):
            slopes = torch.tensor(Alibi().slopes(HEADS))
            scores = scores - slopes[:, None, None] * distance.abs()
        allowed = layer.config.mask.allows(
            place[:, None], place[None, :], torch.full((1, 1), length)
        )
        scores = scores.masked_fill(~allowed, -torch.inf)
        torch.testing.assert_close(seen[Tap.SCORES].of(index), scores)
        if layer.sink is not None:
            scores = torch.cat((scores, layer.sink[:, None, None].expand(-1, length, 1)), -1)
        pattern = scores.softmax(-1)[..., :length]
        torch.testing.assert_close(seen[Tap.PATTERN].of(index), pattern)


def test_the_head_output_is_the_pattern_times_the_values() -> None:
    layer = made(mask=Causal())
    batch = drawn(*EACH)
    seen = recorded(layer, batch, Tap.VALUE, Tap.PATTERN, Tap.HEAD_OUTPUT)
    for index in range(len(EACH)):
        value = seen[Tap.VALUE].of(index).repeat_interleave(HEADS // KV_HEADS, 1)
        read = torch.einsum("hts,shd->thd", seen[Tap.PATTERN].of(index), value)
        torch.testing.assert_close(seen[Tap.HEAD_OUTPUT].of(index), read)
    written = layer.output(seen[Tap.HEAD_OUTPUT].values.flatten(1))
    torch.testing.assert_close(written, layer(batch).values)


@pytest.mark.parametrize("tap", [Tap.QUERY, Tap.KEY, Tap.VALUE, Tap.HEAD_OUTPUT, Tap.GATE_OUTPUT])
def test_watching_changes_not_one_bit(tap: Tap) -> None:
    layer = made(mask=Causal(), position=Rotary(), gates=(Gate(at="output"),))
    batch = drawn(*EACH)
    watched = layer(batch, context=WatchContext(Record([Site(3, tap)]), layer=3))
    assert torch.equal(watched.values, layer(batch).values)


@pytest.mark.parametrize("tap", [Tap.SCORES, Tap.PATTERN])
@pytest.mark.parametrize(
    "choices",
    [
        {"mask": Causal(), "position": Rotary()},
        {"mask": Window(2, 2), "position": Alibi(), "sink": "learned"},
        {"position": Shaw(reach=2, values=True)},
    ],
    ids=str,
)
def test_watching_the_pattern_gives_the_same_answer(tap: Tap, choices: dict[str, Any]) -> None:
    layer = made(**choices)
    batch = drawn(*EACH)
    watched = layer(batch, context=WatchContext(Record([Site(3, tap)]), layer=3))
    torch.testing.assert_close(watched.values, layer(batch).values)


def test_a_layer_nobody_watches_runs_as_if_nobody_did() -> None:
    layer = made(mask=Causal())
    batch = drawn(*EACH)
    elsewhere = WatchContext(Record([Site(7, Tap.PATTERN)]), layer=3)
    assert torch.equal(layer(batch, context=elsewhere).values, layer(batch).values)


@pytest.mark.parametrize("head", range(HEADS))
def test_a_head_silenced_is_a_head_without_output_columns(head: int) -> None:
    layer = made(mask=Causal())
    batch = drawn(*EACH)

    def silence(read: Tensor) -> Tensor:
        return read.index_fill(1, torch.tensor([head]), 0.0)

    silenced = changed(layer, batch, Tap.HEAD_OUTPUT, silence)
    with torch.no_grad():
        layer.output.weight[:, head * SIZE : (head + 1) * SIZE] = 0
    torch.testing.assert_close(silenced, layer(batch).values)


def test_a_uniform_pattern_reads_the_mean_value() -> None:
    layer = made(mask=Causal())
    batch = drawn(4, 2)
    values = recorded(layer, batch, Tap.VALUE)[Tap.VALUE]

    def even(pattern: Tensor) -> Tensor:
        return torch.full_like(pattern, 1 / max(pattern.shape[-1], 1))

    result = changed(layer, batch, Tap.PATTERN, even)
    means = [each.mean(0, keepdim=True).expand_as(each) for each in values.to_list()]
    read = torch.cat(means).repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close(result, layer.output(read.flatten(1)))


def test_changed_scores_are_softmaxed_anew() -> None:
    layer = made(mask=Causal())
    batch = drawn(4, 2)
    by_scores = changed(layer, batch, Tap.SCORES, lambda scores: scores * 3)
    by_scale = made(mask=Causal(), scale=3 * SIZE**-0.5)
    by_scale.load_state_dict(layer.state_dict())
    torch.testing.assert_close(by_scores, by_scale(batch).values)


@pytest.mark.parametrize(("tap", "row"), [(Tap.QUERY, 0), (Tap.KEY, 1), (Tap.VALUE, 2)])
def test_changed_projections_are_used(tap: Tap, row: int) -> None:
    layer = made(mask=Causal())
    batch = drawn(*EACH)
    result = changed(layer, batch, tap, lambda values: -2 * values)
    with torch.no_grad():
        sizes = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
        layer.project.weight.split(sizes)[row].mul_(-2)
    torch.testing.assert_close(result, layer(batch).values)


def test_gradients_pass_through_a_watched_pattern() -> None:
    layer = made(mask=Causal())
    batch = drawn(4, 2)
    gradients = []
    for context in (None, WatchContext(Record([Site(3, Tap.PATTERN)]), layer=3)):
        loss = layer(batch, context=context).values.square().sum()
        gradients.append(torch.autograd.grad(loss, list(layer.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_cross_attention_shows_the_memorys_keys() -> None:
    layer = made(keys_from="memory")
    seen = recorded(layer, drawn(2, 3), Tap.QUERY, Tap.KEY, Tap.PATTERN, memory=drawn(4, 1))
    assert seen[Tap.QUERY].lengths.each == (2, 3)
    assert seen[Tap.KEY].lengths.each == (4, 1)
    assert [tuple(each.shape) for each in seen[Tap.PATTERN].each] == [(4, 2, 4), (4, 3, 1)]
