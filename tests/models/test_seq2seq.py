"""Encoder-decoder models: one stack reads, the other writes and looks back at it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.cache import DynamicCache, StaticCache
from manyheads.errors import ConfigError, InputError, ShapeError
from manyheads.models.build import build
from manyheads.models.seq2seq import Seq2Seq
from manyheads.parts.masks import Causal, Full
from manyheads.parts.positions import Rotary
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Sublayer, Tap
from tests.models.zoo import SEQ2SEQS, VOCABULARY, WIDTH, ids, layer, own, seq2seq, small

SOURCES = (5, 1, 12, 7)
CROSS = own(keys_from="memory")
SCHEDULE = ((1, 1, 1, 1), (2, 0, 6, 1), (1, 1, 1, 1), (1, 1, 1, 1))


def assert_near(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def chunk(texts: Ragged, starts: list[int], counts: tuple[int, ...]) -> Ragged:
    return Ragged.from_list(
        [
            text[start : start + count]
            for text, start, count in zip(texts.to_list(), starts, counts, strict=True)
        ]
    )


def decoded(model: Seq2Seq, config: DynamicCache | StaticCache, targets: Ragged) -> list[Tensor]:
    """The logits of each target, written a piece at a time; the source is read once."""
    cache, starts = model.new_cache(config), [0] * 4
    written: list[list[Tensor]] = [[] for _ in starts]
    for step, counts in enumerate(SCHEDULE):
        piece = chunk(targets, starts, counts)
        output = model(ids(SOURCES) if step == 0 else None, piece, cache=cache)
        for row, logits in enumerate(output.logits.to_list()):
            written[row].append(logits)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    assert cache.seen == targets.lengths.each
    return [torch.cat(each) for each in written]


@pytest.mark.parametrize(
    "config",
    [
        DynamicCache(initial_size=1),
        StaticCache(size=9),
        DynamicCache(initial_size=2, ring_buffers=False),
    ],
    ids=["growing", "fixed", "without rings"],
)
@pytest.mark.parametrize("name", SEQ2SEQS)
def test_piece_by_piece_is_the_full_forward(name: str, config: DynamicCache | StaticCache) -> None:
    model, targets = small(SEQ2SEQS[name]), ids((5, 3, 9, 4), seed=1)
    with torch.no_grad():
        whole = model(ids(SOURCES), targets).logits
        for result, expected in zip(decoded(model, config, targets), whole.to_list(), strict=True):
            assert_near(result, expected)


def test_the_source_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = small(SEQ2SEQS["2017"]), []
    for each in model.decoder.layers:
        remember = each.cross.remember

        def counted(memory: Ragged, *rest: Any, remember: Any = remember) -> Any:
            read.append(memory.lengths.each)
            return remember(memory, *rest)

        monkeypatch.setattr(each.cross, "remember", counted)
    with torch.no_grad():
        decoded(model, DynamicCache(), ids((5, 3, 9, 4), seed=1))
    assert read == [SOURCES, SOURCES]


@pytest.mark.parametrize("name", ["2017", "window"])
def test_selected_translations_go_on_with_their_own_source(name: str) -> None:
    model, targets, more = small(SEQ2SEQS[name]), ids((2, 3, 1, 4), seed=1), ids((3, 3), seed=2)
    cache, order = model.new_cache(), [2, 0]
    whole = [torch.cat((targets.of(at), more.of(row))) for row, at in enumerate(order)]
    with torch.no_grad():
        model(ids(SOURCES), targets, cache=cache)
        cache.select(order)
        result = [model(None, chunk(more, [at] * 2, (1, 1)), cache=cache) for at in range(3)]
        expected = model(ids(SOURCES).select(order), Ragged.from_list(whole)).logits
    for row in range(2):
        steps = torch.stack([output.logits.values[row] for output in result])
        assert_near(steps, expected.of(row)[-3:])


def test_no_source_needs_a_filled_cache() -> None:
    model = small(SEQ2SEQS["2017"])
    for cache in (None, model.new_cache()):
        with torch.no_grad(), pytest.raises(InputError) as caught:
            model(None, ids((2,)), cache=cache)
        assert caught.value.remedy == "give a source for the first step"


def test_every_target_has_a_source() -> None:
    with torch.no_grad(), pytest.raises(ShapeError) as caught:
        small(SEQ2SEQS["2017"])(ids((3, 2, 4)), ids((1, 1)))
    assert "2 sequences, and the memory 3: give one memory" in str(caught.value)


def test_a_decoder_that_sees_ahead_refuses_a_cache() -> None:
    model = build(seq2seq([layer()], [layer(own(mask=Full()), cross=CROSS)]))
    with pytest.raises(ConfigError, match=r"layer 0, Full\(\), sees later tokens"):
        model.new_cache()


def test_a_decoder_that_never_looks_back_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="no decoder layer attends to the encoder: give one a cross"
    ):
        seq2seq([layer()], [layer(own(mask=Causal()))])


def test_an_empty_source_adds_nothing_and_an_empty_target_gets_nothing() -> None:
    model = small(SEQ2SEQS["2017"])
    site = Site(0, Tap.HEAD_OUTPUT, Sublayer.CROSS, stack="decoder")
    record = Record([site])
    with torch.no_grad():
        output = model(ids((0, 3, 4)), ids((4, 0, 2)), watch=record)
    assert output.logits.lengths.each == (4, 0, 2)
    assert output.logits.values.isfinite().all()
    assert not record[site].of(0).any()
    assert record[site].of(2).any()


def test_every_source_token_reaches_every_target_token() -> None:
    model, target = small(SEQ2SEQS["2017"]), ids((4,), seed=1)
    source = ids((6,))
    with torch.no_grad():
        before = model(source, target).logits.values
        for at in range(6):
            other = source.values.clone()
            other[at] = (other[at] + 1) % VOCABULARY
            after = model(source.with_values(other), target).logits.values
            assert (before - after).abs().amax(1).min() > 1e-4


def test_encode_gives_what_the_decoder_looks_back_at() -> None:
    model, record = small(SEQ2SEQS["2017"]), Record([Site(-1, Tap.FINAL, stack="encoder")])
    with torch.no_grad():
        memory = model.encode(ids(SOURCES))
        model(ids(SOURCES), ids((1, 1, 1, 1)), watch=record)
    seen = record[Site(-1, Tap.FINAL, stack="encoder")]
    assert memory.lengths.each == SOURCES
    assert torch.equal(memory.values, seen.values)


@pytest.mark.parametrize("shared", [True, False])
def test_both_sides_share_one_table_or_have_two(shared: bool) -> None:
    config = seq2seq([layer()], [layer(own(mask=Causal()), cross=CROSS)], shared=shared)
    model = build(config, seed=0)
    tables = [name for name, each in model.named_parameters() if each.shape == (VOCABULARY, WIDTH)]
    own_table = "target_embedding.tokens.weight"
    assert tables == ["embedding.tokens.weight", *([] if shared else [own_table])]
    source, target = torch.tensor([[1, 2]]), torch.tensor([[3]])
    model(source, target).hidden[..., 0].sum().backward()
    touched = model.embedding.tokens.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == ([1, 2, 3] if shared else [1, 2])


def test_an_untied_pair_scores_with_the_targets_table() -> None:
    config = seq2seq([layer()], [layer(own(mask=Causal()), cross=CROSS)], shared=False)
    model = build(config, seed=0)
    with torch.no_grad():
        output = model(ids((3,)), ids((2,)))
    expected = output.hidden.values @ model.target_embedding.tokens.weight.T
    torch.testing.assert_close(output.logits.values, expected)


def test_gradients_flow_back_through_the_memory() -> None:
    model = build(SEQ2SEQS["one layer looks back"], seed=0)
    model(ids(SOURCES), ids((2, 3, 1, 4))).logits.values.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.encoder.layers[0].attention.project.weight.grad.abs().max() > 0


@pytest.mark.parametrize("sublayer", [Sublayer.ATTENTION, Sublayer.CROSS])
def test_the_pattern_of_a_step_is_the_last_row_of_the_whole(sublayer: Sublayer) -> None:
    writes = layer(own(mask=Causal(), position=Rotary()), cross=CROSS)
    model, targets = small(seq2seq([layer()], [writes, writes])), ids((5, 3), seed=1)
    sources, site = ids((4, 6)), Site(1, Tap.PATTERN, sublayer, stack="decoder")
    whole, step = Record([site]), Record([site])
    cache = model.new_cache()
    with torch.no_grad():
        model(sources, targets, watch=whole)
        model(sources, Ragged.from_list([text[:-1] for text in targets.to_list()]), cache=cache)
        last = Ragged.from_list([text[-1:] for text in targets.to_list()])
        model(None, last, cache=cache, watch=step)
    for sequence in range(2):
        assert_near(step[site].of(sequence), whole[site].of(sequence)[:, -1:])
