"""Looking inside: every tap at every site, patterns, ablation and patching."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import manyheads.attention
from manyheads.attention import AttentionConfig
from manyheads.errors import InputError
from manyheads.kernels import reference
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.models.build import build
from manyheads.models.stack import StackConfig
from manyheads.models.vision import VisionConfig
from manyheads.parts.experts import Experts
from manyheads.parts.masks import Causal
from manyheads.parts.norms import PostNorm, PreNorm, SandwichNorm
from manyheads.ragged import Ragged
from manyheads.taps import Head, Patterns, Record, Site, Sublayer, Tap
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    EVERY_GATE,
    LENGTHS,
    MODELS,
    SEQ2SEQS,
    TARGETS,
    WIDTH,
    answer,
    decoder,
    encoder,
    ids,
    images,
    layer,
    own,
    seq2seq,
    small,
    values,
    vision,
)

Shapes = dict[Site, tuple[tuple[int, ...], tuple[int, ...]]]
CROSS = own(keys_from="memory", gates=EVERY_GATE, kv_heads=2)
WATCHED = MODELS | {
    "encoder gates": encoder(layer(own(gates=EVERY_GATE, kv_heads=2)), layer(own(heads=8))),
    "seq2seq gates": seq2seq([layer()], [layer(own(mask=Causal(), gates=EVERY_GATE), cross=CROSS)]),
    "vision gates": vision(layer(own(gates=EVERY_GATE, head_size=6)), layer(None), layer()),
}


def attention_sites(
    attention: AttentionConfig, at: dict[str, Any], queries: Any, keys: Any
) -> Shapes:
    """Every tap of one attention, with the lengths of its sequences and its shape a token."""
    heads, kv_heads, size = attention.heads, attention.key_heads, attention.size
    result = {
        Tap.BEFORE: (queries, (WIDTH,)),
        Tap.READ: (queries, (WIDTH,)),
        Tap.QUERY: (queries, (heads, size)),
        Tap.KEY: (keys, (kv_heads, size)),
        Tap.VALUE: (keys, (kv_heads, size)),
        Tap.MIXED: (queries, (heads, size)),
        Tap.HEAD_OUTPUT: (queries, (heads, size)),
        Tap.OUTPUT: (queries, (WIDTH,)),
        Tap.AFTER: (queries, (WIDTH,)),
    }
    for gate in attention.gates:
        count, channels = attention.gate_shape(gate.at)
        shape = (
            count if gate.heads == "own" else 1,
            channels if gate.per == "channel" else 1,
        )
        keys_side = gate.at in ("key", "value")
        result[Tap[f"GATE_{gate.at.upper()}"]] = (keys if keys_side else queries, shape)
    return {Site(tap=tap, **at): shape for tap, shape in result.items()}


def sites(stack: StackConfig, name: str, queries: Any, memory: Any = ()) -> Shapes:
    """Every site of a stack but its patterns."""
    result: Shapes = {
        Site(-1, tap, stack=name): (queries, (WIDTH,)) for tap in (Tap.EMBEDDINGS, Tap.FINAL)
    }
    for index, config in enumerate(stack.layers):
        at: dict[str, Any] = {"layer": index, "stack": name}
        if config.attention is not None:
            result |= attention_sites(config.attention.inner, at, queries, queries)
        if config.cross is not None:
            crossing = at | {"sublayer": Sublayer.CROSS}
            result |= attention_sites(config.cross.inner, crossing, queries, memory)
        if config.feedforward is not None:
            at |= {"sublayer": Sublayer.FEEDFORWARD}
            for tap in (Tap.BEFORE, Tap.READ, Tap.OUTPUT, Tap.AFTER):
                result[Site(tap=tap, **at)] = (queries, (WIDTH,))
            if not isinstance(config.feedforward.inner, Experts):
                inside = (queries, (config.feedforward.inner.hidden,))
                result[Site(tap=Tap.INSIDE, **at)] = inside
    return result


def every_site(config: Any) -> Shapes:
    if isinstance(config, VisionConfig):
        patches = [1 + image.shape[1] * image.shape[2] // 16 for image in images()]
        return sites(config.stack, "main", tuple(patches))
    if hasattr(config, "encoder"):
        result = sites(config.encoder, "encoder", LENGTHS)
        return result | sites(config.decoder, "decoder", TARGETS, LENGTHS)
    return sites(config.stack, "main", LENGTHS)


def pattern_sites(shapes: Shapes) -> dict[Site, tuple[Any, Any, int]]:
    """Where scores and patterns stand, with the lengths of queries and keys and the heads."""
    return {
        replace(site, tap=tap): (
            shapes[site][0],
            shapes[replace(site, tap=Tap.KEY)][0],
            shapes[site][1][0],
        )
        for site in shapes
        if site.tap is Tap.QUERY
        for tap in (Tap.SCORES, Tap.PATTERN)
    }


class Everything:
    """A watcher that looks at all there is, and notes what it was shown."""

    def __init__(self) -> None:
        self.seen: Counter[Site] = Counter()

    def wants(self, site: Site) -> bool:
        del site
        return True

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        del value
        self.seen[site] += 1


@pytest.mark.parametrize("name", WATCHED)
def test_every_tap_is_seen_with_its_shape_and_nothing_changes(name: str) -> None:
    model, shapes = small(WATCHED[name]), every_site(WATCHED[name])
    record = Record(shapes)
    with torch.no_grad():
        expected, output = answer(model), answer(model, watch=record)
    for site, (lengths, shape) in shapes.items():
        seen = record[site]
        assert isinstance(seen, Ragged)
        assert seen.lengths.each == lengths, site
        assert tuple(seen.values.shape[1:]) == shape, site
    assert torch.equal(values(output.hidden), values(expected.hidden))
    assert torch.equal(values(output.logits), values(expected.logits))


@pytest.mark.parametrize("name", WATCHED)
def test_every_site_is_shown_once_and_no_other_exists(name: str) -> None:
    shapes, everything = every_site(WATCHED[name]), Everything()
    with torch.no_grad():
        answer(small(WATCHED[name]), watch=everything)
    assert set(everything.seen) == {*shapes, *pattern_sites(shapes)}
    assert set(everything.seen.values()) == {1}


@pytest.mark.parametrize("name", WATCHED)
def test_patterns_are_softmaxes_of_scores_and_give_the_same_answer(name: str) -> None:
    model, sites = small(WATCHED[name]), pattern_sites(every_site(WATCHED[name]))
    record = Record(sites)
    with torch.no_grad():
        expected, output = answer(model), answer(model, watch=record)
    torch.testing.assert_close(values(output.hidden), values(expected.hidden), rtol=1e-4, atol=1e-4)
    for site, (queries, keys, heads) in sites.items():
        seen = record[site]
        assert isinstance(seen, Patterns)
        shapes = [(heads, rows, columns) for rows, columns in zip(queries, keys, strict=True)]
        assert [tuple(each.shape) for each in seen.each] == shapes
    sinks = name == "decoder sinks"
    for site in sites:
        if site.tap is Tap.PATTERN:
            for index, pattern in enumerate(record[site].each):
                scores = record[replace(site, tap=Tap.SCORES)].of(index)
                assert not pattern[scores == -torch.inf].any()
                rows = pattern.sum(-1)
                if not sinks and scores.shape[-1]:
                    torch.testing.assert_close(pattern, scores.softmax(-1))
                    torch.testing.assert_close(rows, torch.ones_like(rows))
                if sinks:
                    assert ((rows > 0) & (rows < 1)).all()


def test_a_head_reads_its_values_by_its_pattern() -> None:
    taps = {tap: Site(1, tap) for tap in (Tap.PATTERN, Tap.VALUE, Tap.HEAD_OUTPUT)}
    record = Record(taps.values())
    with torch.no_grad():
        small(DECODERS["llama"])(ids(), watch=record)
    for sequence in range(len(LENGTHS)):
        pattern = record[taps[Tap.PATTERN]].of(sequence)
        value = record[taps[Tap.VALUE]].of(sequence).repeat_interleave(2, dim=1)
        read = torch.einsum("hts,shd->thd", pattern, value)
        torch.testing.assert_close(record[taps[Tap.HEAD_OUTPUT]].of(sequence), read)


@pytest.mark.parametrize("layers", [{1}, {0, 2}, set(), {0, 1, 2}])
def test_a_pattern_switches_only_the_layers_of_its_sites(
    layers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(ENCODERS["modernbert"])
    attend, mix = manyheads.attention.attend, reference.mix
    calls: Counter[str] = Counter()

    def counted_attend(*arguments: Any) -> Any:
        calls["attend"] += 1
        return attend(*arguments)

    def counted_mix(*arguments: Any) -> Any:
        calls["mix"] += 1
        return mix(*arguments)

    monkeypatch.setattr(manyheads.attention, "attend", counted_attend)
    monkeypatch.setattr(reference, "mix", counted_mix)
    record = Record([Site(index, Tap.PATTERN) for index in layers] + [Site(1, Tap.HEAD_OUTPUT)])
    with torch.no_grad():
        model(ids(), watch=record)
    assert calls == Counter(attend=3 - len(layers), mix=len(layers))


def test_what_a_sublayer_reads_can_change_without_the_stream() -> None:
    model = small(decoder(*[layer(own(mask=Causal()))] * 2))
    part = {"sublayer": Sublayer.FEEDFORWARD}
    read, before, output, after = (
        Site(0, tap, **part) for tap in (Tap.READ, Tap.BEFORE, Tap.OUTPUT, Tap.AFTER)
    )
    plain = Record([before, output])
    changed = ActivationEditor({read: torch.zeros_like}, [before, output, after])
    with torch.no_grad():
        model(ids(), watch=plain)
        model(ids(), watch=changed)
    assert torch.equal(values(changed[before]), values(plain[before]))
    assert not torch.equal(values(changed[output]), values(plain[output]))
    assert torch.equal(values(changed[before]) + values(changed[output]), values(changed[after]))


@pytest.mark.parametrize("norm", [PreNorm(), SandwichNorm()])
def test_the_residual_stream_is_a_sum(norm: PreNorm | SandwichNorm) -> None:
    model = small(decoder(*[layer(own(mask=Causal()), norm=norm)] * 3))
    record = Record(every_site(model.config))
    with torch.no_grad():
        output = model(ids(), watch=record)
    stream = record[Site(-1, Tap.EMBEDDINGS)].values
    for index in range(3):
        for sublayer in (Sublayer.ATTENTION, Sublayer.FEEDFORWARD):
            before, written, after = (
                record[Site(index, tap, sublayer)].values
                for tap in (Tap.BEFORE, Tap.OUTPUT, Tap.AFTER)
            )
            assert torch.equal(before, stream)
            assert torch.equal(before + written, after)
            stream = after
    final = record[Site(-1, Tap.FINAL)].values
    assert torch.equal(final, model.stack.final_norm(stream))
    assert torch.equal(final, values(output.hidden))


def test_after_a_post_norm_the_stream_is_the_normed_sum() -> None:
    model = small(encoder(layer(norm=PostNorm())))
    taps = [Site(0, tap) for tap in (Tap.BEFORE, Tap.OUTPUT, Tap.AFTER)]
    record = Record(taps)
    with torch.no_grad():
        model(ids(), watch=record)
    before, written, after = (record[site].values for site in taps)
    norm = model.stack.layers[0].attention_residual.norm
    torch.testing.assert_close(after, norm(before + written))


class Change:
    """A watcher that hands back what a function makes of one value."""

    def __init__(self, site: Site, function: Any) -> None:
        self.site, self.function = site, function

    def wants(self, site: Site) -> bool:
        return site == self.site

    def see(self, site: Site, value: Any) -> Any:
        del site
        return self.function(value)


def without(head: int) -> Any:
    def ablated(read: Ragged) -> Ragged:
        kept = torch.arange(read.values.shape[1]) != head
        return read.map(lambda tensor: tensor * kept[:, None])

    return ablated


@pytest.mark.parametrize("head", [Head(0, 0), Head(0, 3), Head(1, 2)], ids=str)
@pytest.mark.parametrize("name", ["decoder llama", "encoder bert", "decoder normed heads"])
def test_ablating_a_head_is_zeroing_its_columns(name: str, head: Head) -> None:
    model = build(MODELS[name], seed=0).requires_grad_(False)
    ablated = answer(model, watch=Change(Site(head.layer, Tap.HEAD_OUTPUT), without(head.head)))
    whole = answer(model)
    attention = model.stack.layers[head.layer].attention
    size = attention.config.size
    attention.output.weight[:, head.head * size : (head.head + 1) * size] = 0
    torch.testing.assert_close(values(ablated.logits), values(answer(model).logits))
    assert not torch.allclose(values(ablated.logits), values(whole.logits), atol=1e-3)


def test_ablating_a_head_of_cross_attention_leaves_the_encoder_alone() -> None:
    model = build(SEQ2SEQS["2017"], seed=0).requires_grad_(False)
    site = Site(1, Tap.HEAD_OUTPUT, Sublayer.CROSS, stack="decoder")
    ablated = answer(model, watch=Change(site, without(2)))
    model.decoder.layers[1].cross.output.weight[:, 16:24] = 0
    torch.testing.assert_close(values(ablated.logits), values(answer(model).logits))


@pytest.mark.parametrize(
    "site",
    [
        Site(0, Tap.BEFORE),
        Site(0, Tap.QUERY),
        Site(0, Tap.KEY),
        Site(0, Tap.VALUE),
        Site(0, Tap.SCORES),
        Site(0, Tap.PATTERN),
        Site(0, Tap.GATE_QUERY),
        Site(0, Tap.GATE_KEY),
        Site(0, Tap.GATE_VALUE),
        Site(0, Tap.GATE_OUTPUT),
        Site(0, Tap.GATE_FINAL),
        Site(0, Tap.OUTPUT),
        Site(0, Tap.AFTER),
        Site(0, Tap.INSIDE, Sublayer.FEEDFORWARD),
        Site(0, Tap.OUTPUT, Sublayer.FEEDFORWARD),
        Site(-1, Tap.EMBEDDINGS),
        Site(-1, Tap.FINAL),
    ],
    ids=str,
)
def test_the_model_goes_on_with_what_a_watcher_hands_back(site: Site) -> None:
    def bent(value: Ragged | Patterns) -> Ragged | Patterns:
        if isinstance(value, Patterns):
            return Patterns(tuple(each * 0.5 for each in value.each))
        # Uneven, so that no norm behind it can make it undone.
        return value.map(
            lambda tensor: tensor * torch.linspace(0.5, 2, tensor.numel()).view_as(tensor)
        )

    model = small(DECODERS["gates"])
    with torch.no_grad():
        plain, changed = model(ids()), model(ids(), watch=Change(site, bent))
        same = model(ids(), watch=Change(site, lambda value: value))
    assert not torch.allclose(values(changed.logits), values(plain.logits), atol=1e-3)
    torch.testing.assert_close(values(same.logits), values(plain.logits), rtol=1e-4, atol=1e-4)


def test_patching_one_sequence_leaves_the_others() -> None:
    def patched(read: Ragged) -> Ragged:
        each = read.to_list()
        return Ragged.from_list([torch.zeros_like(each[0]), *each[1:]])

    model = small(DECODERS["llama"])
    with torch.no_grad():
        plain = model(ids()).logits
        result = model(ids(), watch=Change(Site(0, Tap.HEAD_OUTPUT), patched)).logits
    assert not torch.allclose(result.of(0), plain.of(0), atol=1e-3)
    for sequence in range(1, len(LENGTHS)):
        assert torch.equal(result.of(sequence), plain.of(sequence))


def test_a_watcher_that_hands_back_another_kind_is_refused() -> None:
    model = small(DECODERS["llama"])
    with pytest.raises(InputError, match=r"Patterns at Site\(0, QUERY\): return a Rag"):
        model(ids(), watch=Change(Site(0, Tap.QUERY), lambda value: Patterns(())))  # noqa: ARG005


def test_watching_does_not_cut_the_gradient() -> None:
    model = build(DECODERS["gates"], seed=0)
    gradients = []
    for watch in (None, Record(every_site(model.config)), Everything()):
        model.zero_grad()
        model(ids(), watch=watch).logits.values.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    plain, *watched = gradients
    for result in watched:
        for one, other in zip(result, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_watching_a_batch_of_no_sequences_shows_nothing() -> None:
    record = Record([Site(0, Tap.PATTERN), Site(1, Tap.HEAD_OUTPUT)])
    with torch.no_grad():
        output = small(ENCODERS["bert"])(ids().select([]), watch=record)
    assert output.hidden.values.shape == (0, WIDTH)
    assert record[Site(0, Tap.PATTERN)].each == ()
