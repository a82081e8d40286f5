"""Patterns on request are those of the reference kernel, in any part and any number."""

import sys
from pathlib import Path

import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.attention_maps.patterns import patterns, top_keys
from manyheads.lens.results.addresses import Address, blocks_of
from manyheads.models.recipes import ModelConfig
from manyheads.taps import Head, Patterns, Record, Site, Sublayer, Tap
from tests.lens.measure.test_statistics import MORE, fresh, texts_for
from tests.messages import refuses
from tests.models.zoo import DECODERS, MODELS, SEQ2SEQS, answer, small

EVERY: dict[str, ModelConfig] = MODELS | MORE


@pytest.mark.parametrize("name", EVERY)
def test_every_pattern_is_the_reference_kernels(name: str) -> None:
    model = fresh(EVERY[name])
    inputs = texts_for(model)
    result = patterns(model, inputs)
    record = Record(
        Site(block.layer, Tap.PATTERN, block.sublayer, block.stack) for block in blocks_of(model)
    )
    with torch.no_grad():
        if inputs.source is not None:
            model(inputs.source, inputs.ids, watch=record)
        else:
            model(list(inputs.images) if inputs.ids is None else inputs.ids, watch=record)
    for block in blocks_of(model):
        expected = record[Site(block.layer, Tap.PATTERN, block.sublayer, block.stack)]
        assert isinstance(expected, Patterns)
        for address in block.addresses:
            for text, whole in enumerate(expected.each):
                one = result.of(address, text)
                torch.testing.assert_close(one.weights, whole[address.head.head], atol=1e-5, rtol=0)
                assert not one.weights[~one.visible].any()


@pytest.mark.parametrize("name", ["alibi", "window", "shaw", "t5", "sinks", "llama"])
def test_some_rows_of_some_heads(name: str) -> None:
    model = fresh(DECODERS[name])
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    whole = patterns(model, [text])
    head = Head(1, 3)
    part = patterns(model, [text], [head], rows=range(4, 7))
    assert len(part.each) == 1
    torch.testing.assert_close(part.of(head).weights, whole.of(head).weights[4:7])
    assert part.of(head).rows == range(4, 7)


def test_the_largest_weights_of_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    # By the module: in the package the name means the function.
    monkeypatch.setattr(sys.modules["manyheads.lens.attention_maps.patterns"], "CHUNK_WEIGHTS", 20)
    model = small(DECODERS["llama"])
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    whole = patterns(model, [text]).of(Head(0, 2)).weights
    (one,) = top_keys(model, [text], [Head(0, 2)], top_k=3)
    expected = whole.topk(3, dim=-1)
    torch.testing.assert_close(one.weights, expected.values)
    torch.testing.assert_close(whole.gather(1, one.keys), one.weights)
    torch.testing.assert_close(one.missing, 1 - expected.values.sum(-1))
    (few,) = top_keys(model, [text], [Head(0, 2)], top_k=99, rows=range(2, 4))
    assert few.weights.shape == (2, 9)


def test_cross_attention_has_addresses_of_its_own() -> None:
    model = small(SEQ2SEQS["2017"])
    head = Address(Head(1, 0), "decoder", Sublayer.CROSS)
    result = patterns(model, [([1, 2, 3, 4], [5, 6])], [head])
    assert result.of(head).weights.shape == (2, 4)
    assert str(result).startswith("decoder L1H0 cross on text 0: ")


def test_they_print_in_one_line() -> None:
    model = small(DECODERS["gpt2"])
    (pattern,) = patterns(model, [[5, 6, 7]], "L0H1").each
    assert repr(pattern) == "pattern of L0H1 on text 0: 3 queries x 3 keys"
    (keys,) = top_keys(model, [[5, 6, 7]], "L0H1", top_k=2)
    assert repr(keys) == "top keys of L0H1 on text 0: 3 queries x 2 keys"


def test_they_can_be_saved_and_loaded(tmp_path: Path) -> None:
    result = patterns(small(DECODERS["window"]), [[1, 2, 3, 4], [5, 6]], [Head(0, 1)])
    for ending in ("json", "safetensors"):
        result.save(tmp_path / f"patterns.{ending}")
        loaded = lens.load(tmp_path / f"patterns.{ending}")
        for text in (0, 1):
            one, other = result.of(Head(0, 1), text), loaded.of(Head(0, 1), text)
            assert torch.equal(one.weights, other.weights)
            assert torch.equal(one.visible, other.visible)
            assert one.rows == other.rows
    assert result.table().row_count == len(result.rows()) == 2


def test_the_model_answers_on_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(DECODERS["gpt2"])
    assert answer(model)
    monkeypatch.delattr("manyheads.kernels.reference.patterns")
    assert patterns(model, [[1, 2, 3]])


def test_refusals() -> None:
    model = small(DECODERS["gpt2"])
    with refuses(InputError, "there is no head L7H0: use L0H0 to L1H3."):
        patterns(model, [[1, 2]], [Head(7, 0)])
    with refuses(
        InputError,
        "rows=range(1, 5)",
        "2 tokens of text 0",
        "range(2)",
    ):
        patterns(model, [[1, 2]], rows=range(1, 5))
    with refuses(InputError, "rows=range(3, 3)", "use range(start, stop)"):
        patterns(model, [[1, 2]], rows=range(3, 3))
    with pytest.raises(InputError, match=r"top_k.*0.*1 or more"):
        top_keys(model, [[1, 2]], top_k=0)
    with refuses(InputError, "L0H0 on text 3", "patterns(...)"):
        patterns(model, [[1, 2]]).of(Head(0, 0), 3)
