"""Every statistic of every head equals its definition on the pattern, for every kind of model."""

import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.measure import row_sums
from manyheads.lens.measure.statistics import Statistics, statistics
from manyheads.lens.measure.watcher import StatisticsWatcher
from manyheads.models.build import build
from manyheads.models.model_interface import ModelInputs
from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Blocks, Causal, GlobalTokens, Prefix, Window
from manyheads.parts.positions import Alibi, Disentangled, Rotary, Shaw, T5Buckets
from manyheads.ragged import Ragged
from manyheads.taps import Head
from tests.lens.oracle import Expected, by_definition
from tests.lens.planted import PLACES, SHARP, Look, offset_look, text_model
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    EVERY_GATE,
    MODELS,
    SEQ2SEQS,
    TARGETS,
    VISIONS,
    VOCABULARY,
    decoder,
    encoder,
    ids,
    images,
    layer,
    own,
    seq2seq,
    small,
    writes,
)

CLASSES = {"low": range(5), "odd": range(1, VOCABULARY, 2), "none": ()}
OFFSETS = (-3, 2)
LIMIT = 1e-4

CROSS = own(keys_from="memory", gates=EVERY_GATE, kv_heads=2, sink="learned")
MORE: dict[str, ModelConfig] = {
    "alibi both ways": encoder(layer(own(position=Alibi())), layer(own(position=Alibi(), heads=2))),
    "shaw in a window": encoder(*[layer(own(position=Shaw(reach=2), mask=Window(3, 1)))] * 2),
    "t5 of its own": encoder(
        *[layer(own(position=T5Buckets(buckets=8, shared=False), kv_heads=2))] * 2
    ),
    "deberta": encoder(
        *[layer(own(position=Disentangled(buckets=4, reach=9), kv_heads=2, bias="all"))] * 2
    ),
    "prefix": decoder(*[writes(mask=Prefix(3), position=Rotary())] * 2),
    "blocks and globals": encoder(
        layer(own(mask=Blocks(3))), layer(own(mask=Window(1, 1) | GlobalTokens((0, -1))))
    ),
    "sinks in windows": decoder(*[writes(mask=Window(2), sink="learned", kv_heads=1)] * 2),
    "cross with gates and a sink": seq2seq(
        [layer(own(gates=EVERY_GATE))], [layer(own(mask=Causal()), cross=CROSS)] * 2
    ),
    "silu gates shut": decoder(
        *[writes(gates=(Gate(at="output", heads="shared", activation="silu"),))] * 2
    ),
}
EVERY = MODELS | MORE


def fresh(config: ModelConfig) -> Any:
    """A model whose sinks and scales are not what they start as."""
    model = build(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        for name in ("sink", "head_scale"):
            learned = getattr(module, name, None)
            if isinstance(learned, nn.Parameter):
                learned.data.normal_(generator=generator)
    return model


def texts_for(model: nn.Module) -> ModelInputs:
    if isinstance(model, Vision):
        return ModelInputs(images=tuple(images()))
    if isinstance(model, Seq2Seq):
        return ModelInputs(ids=ids(TARGETS, seed=1), source=ids())
    # Few words, so that many repeat.
    few = ids().map(lambda tokens: tokens % 7)
    return ModelInputs(ids=few)


@cache
def expected_of(name: str) -> tuple[Any, Expected]:
    model = fresh(EVERY[name])
    return model, by_definition(model, texts_for(model), CLASSES, OFFSETS)


def measured(model: Any, inputs: ModelInputs, **more: Any) -> Statistics:
    classes = None if isinstance(model, Vision) else CLASSES
    return statistics(model, inputs, classes=classes, offsets=OFFSETS, progress=False, **more)


def same(result: Statistics, other: Statistics, limit: float) -> None:
    assert result.names == other.names
    for name in result.names:
        np.testing.assert_allclose(result.means[name], other.means[name], atol=limit, rtol=limit)
        # Sixth digits of values appear as third digits of what is left of their differences.
        np.testing.assert_allclose(result.errors[name], other.errors[name], atol=1e3 * limit)


@pytest.mark.parametrize("name", EVERY)
def test_every_statistic_is_its_definition_on_the_pattern(name: str) -> None:
    model, expected = expected_of(name)
    result = measured(model, texts_for(model))
    assert {measure for _, measure in expected.values} == set(result.names)
    for measure in result.names:
        start = 0
        for block in result.blocks:
            part = slice(start, start + block.heads)
            start += block.heads
            mean, error = expected.mean(block, measure), expected.error(block, measure)
            where = f"{measure} of {block}"
            np.testing.assert_allclose(
                result.means[measure][part], mean, atol=LIMIT, rtol=LIMIT, err_msg=where
            )
            np.testing.assert_allclose(
                result.errors[measure][part], error, atol=LIMIT, rtol=LIMIT, err_msg=where
            )


@pytest.fixture
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows and one head of keys at a time."""
    monkeypatch.setattr(row_sums, "ROWS", {"cpu": 3})
    monkeypatch.setattr(row_sums, "CHUNK_WEIGHTS", {"cpu": 1})


# How rows are cut hardly depends on the model, so every third of the zoo is cut, and all of these.
@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("name", [*list(MODELS)[::3], *MORE])
def test_pieces_of_rows_and_heads_add_up(name: str) -> None:
    test_every_statistic_is_its_definition_on_the_pattern(name)


@pytest.mark.parametrize("config", [DECODERS["gates"], DECODERS["uneven"], SEQ2SEQS["t5"]])
def test_batches_of_any_size_give_the_same(config: ModelConfig) -> None:
    model = small(config)
    inputs = texts_for(model)
    at_once = measured(model, inputs)
    for most in (1, 13):
        same(measured(model, inputs, batch_tokens=most), at_once, 1e-6)


def test_texts_may_come_one_by_one() -> None:
    model = small(DECODERS["llama"])
    listed = [each.tolist() for each in ids().to_list() if len(each)]
    at_once = statistics(model, listed, progress=False)
    same(statistics(model, iter(listed), progress=False), at_once, 1e-6)
    same(statistics(model, Ragged.from_list(list(map(torch.tensor, listed)))), at_once, 1e-6)
    assert at_once.metadata["texts"] == 4
    assert at_once.metadata["tokens"] == sum(map(len, listed))


def test_one_text_has_errors_over_its_queries() -> None:
    model = small(DECODERS["gpt2"])
    one = statistics(model, [[3, 1, 4, 1, 5, 9]], progress=False)
    assert one.metadata["errors_over"] == "queries"
    assert "over 1 text, 6 tokens, errors over queries" in str(one)
    inputs = ModelInputs(ids=Ragged.from_list([torch.tensor([3, 1, 4, 1, 5, 9])]))
    expected = by_definition(model, inputs, {}, ())
    block = one.blocks[0]
    values = np.stack([value for _, value in expected.values[block, "entropy"]])
    error = values.std(0, ddof=1) / np.sqrt(len(values))
    np.testing.assert_allclose(one.errors["entropy"][: block.heads], error, atol=1e-5)
    assert np.isnan(one.errors["sink"]).all()


def test_a_break_keeps_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(DECODERS["gpt2"])
    listed = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 9]]
    made = []

    class Impatient(StatisticsWatcher):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

        def see(self, site: Any, value: Any) -> None:
            if len(made) == 3 and site.layer == 1:
                raise KeyboardInterrupt
            super().see(site, value)

    # By the module: in the package the name means the function.
    monkeypatch.setattr(
        sys.modules["manyheads.lens.measure.statistics"], "StatisticsWatcher", Impatient
    )
    broken = statistics(model, listed, batch_tokens=1, progress=False)
    monkeypatch.undo()
    assert not broken.complete
    assert "interrupted" in str(broken)
    same(broken, statistics(model, listed[:2], batch_tokens=1, progress=False), 1e-6)


def test_a_break_before_anything_was_measured_is_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    def see(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StatisticsWatcher, "see", see)
    with pytest.raises(KeyboardInterrupt):
        statistics(small(DECODERS["gpt2"]), [[1, 2]], progress=False)


def test_the_largest_activation_has_its_position() -> None:
    model = build(DECODERS["uneven"], seed=0)
    with torch.no_grad():
        model.embedding.tokens.weight[17, 5] = -5000.0
    listed = [[1, 2, 3], [4, 5, 17, 6], [7]]
    result = statistics(model, listed, batch_tokens=3, progress=False)
    assert [each.layer for each in result.activations] == [0, 1, 2, 3]
    for each in result.activations:
        assert (each.text, each.position, each.channel, each.token) == (1, 2, 5, 17)
        assert each.massive
        assert 4000 < each.largest < 6000
    assert "massive activation after layer 3" in str(result)
    largest = [activation.largest for activation in result.activations]
    assert result.largest_activation == max(largest)
    assert result.mean_activation == pytest.approx(np.mean(largest))
    assert result.mean_activation < result.largest_activation


@pytest.mark.parametrize("batch_tokens", [1, None])
def test_the_largest_logit_is_that_of_all_batches(batch_tokens: int | None) -> None:
    model = small(DECODERS["llama"])
    texts = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12]]
    result = statistics(model, texts, batch_tokens=batch_tokens, progress=False)
    alone = [statistics(model, [text], progress=False)["largest_logit"].means for text in texts]
    np.testing.assert_allclose(result["largest_logit"].means, np.max(alone, axis=0), rtol=1e-5)
    assert np.isnan(result["largest_logit"].errors).all()


def test_the_sink_share_counts_heads_and_texts() -> None:
    first = torch.zeros(PLACES, PLACES)
    first[:, 0] = SHARP
    model = text_model([Look(places=first), offset_look(-1), offset_look(0), offset_look(-1)])
    # In a text of two or three tokens the heads that look one back look at the first as well.
    long, short = list(range(20)), list(range(3))
    assert statistics(model, [long], progress=False).sink_share == 1 / 4
    assert statistics(model, [long, short], progress=False).sink_share == (1 / 4 + 4 / 4) / 2
    assert statistics(model, [long], sink_above=1.1, progress=False).sink_share == 0
    assert "25% of heads" in str(statistics(model, [long], progress=False))


def test_max_length_reads_the_first_tokens_of_each_text() -> None:
    model = small(DECODERS["gpt2"])
    texts = [[1, 2, 3, 4, 5], [6, 7]]
    result = statistics(model, texts, max_length=3, progress=False)
    same(result, statistics(model, [[1, 2, 3], [6, 7]], progress=False), 1e-6)
    batch = ModelInputs(ids=Ragged.from_list([torch.tensor(text) for text in texts]))
    same(statistics(model, batch, max_length=3, progress=False), result, 1e-6)
    with refuses(InputError, "max_length", "0"):
        statistics(model, batch, max_length=0, progress=False)
    vision = small(VISIONS["vit"])
    with refuses(InputError, "max_length", "leave"):
        statistics(vision, images(), max_length=3, progress=False)


def test_a_model_in_training_is_measured_at_rest_and_goes_on_training() -> None:
    model = build(decoder(*[writes(dropout=0.5, drop_heads=0.5)] * 2), seed=0)
    at_rest = statistics(model, [[1, 2, 3, 4]], progress=False)
    model.train()
    same(statistics(model, [[1, 2, 3, 4]], progress=False), at_rest, 1e-7)
    assert model.training


def test_the_model_computes_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a pattern was formed")

    monkeypatch.setattr("manyheads.kernels.reference.patterns", refuse)
    monkeypatch.setattr("manyheads.kernels.reference.scores", refuse)
    assert statistics(small(DECODERS["gpt2"]), [[1, 2, 3]], progress=False)


def test_it_can_be_saved_and_loaded(tmp_path: Any) -> None:
    result = measured(small(DECODERS["gates"]), texts_for(small(DECODERS["gates"])))
    for ending in ("json", "safetensors"):
        result.save(tmp_path / f"found.{ending}")
        loaded = lens.load(tmp_path / f"found.{ending}")
        same(loaded, result, 1e-12)
        assert loaded.activations == result.activations
        assert str(loaded) == str(result)
    assert result["gate_output"].of(Head(1, 2)) == result.of(Head(1, 2))["gate_output"]


def test_half_precision_is_measured_in_full() -> None:
    model = build(DECODERS["llama"], seed=0)
    inputs = texts_for(model)
    full = measured(model, inputs)
    half = measured(build(DECODERS["llama"], seed=0).to(torch.bfloat16), inputs)
    for name in ("entropy", "max_weight", "previous_token", "on_odd"):
        np.testing.assert_allclose(half.means[name], full.means[name], atol=0.05)


def test_refusals() -> None:
    model = small(DECODERS["gpt2"])
    with refuses(InputError, "no texts", "pass at least one"):
        statistics(model, [], progress=False)
    with pytest.raises(InputError, match=r"batch_tokens.*-1.*1 or more"):
        statistics(model, [[1]], batch_tokens=-1, progress=False)
    with refuses(
        InputError,
        "need a tokenizer",
        "set model.tokenizer",
        "{'mine': [7, 8]}",
    ):
        statistics(model, [[1]], classes=("digits",), progress=False)
