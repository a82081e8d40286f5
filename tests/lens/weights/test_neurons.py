"""The texts that move a neuron are those with its largest coefficients, and it writes its words."""

from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.weights.neurons import neurons
from manyheads.models.build import build
from manyheads.models.recipes import ModelConfig
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Sublayer, Tap
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, VISIONS, decoder, images, small, writes

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3], [9, 9, 8, 9, 9, 8]]


def planted() -> Any:
    """Neuron 5 of layer 0 listens to token 7 and writes token 11."""
    model = build(decoder(writes()), seed=0)
    with torch.no_grad():
        table = model.embedding.tokens.weight
        feeds = model.stack.layers[0].feedforward
        model.stack.layers[0].attention.output.weight.mul_(1e-3)
        feeds.expand.weight[5] = 10 * (table[7] - table[7].mean())
        feeds.contract.weight[:, 5] = table[11] - table[11].mean()
    return model


def test_a_planted_memory_is_read_out() -> None:
    memory = neurons(planted(), TEXTS, ["L0N5"], top_k=2, top_tokens=3, progress=False).of("L0N5")
    best = memory.top_activations[0]
    assert (best.number, best.position, best.token) == (1, 1, 7)
    assert best.before == (2,)
    assert best.after == (1, 8, 2, 8)
    assert memory.raised[0].token == 11
    assert memory.reads[0].token == 7
    assert memory.lowered[0].score < 0 < memory.raised[0].score


@pytest.mark.parametrize("by", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("config", [DECODERS["gpt2"], ENCODERS["modernbert"]])
def test_moments_are_the_extremes_of_the_hidden_layer(config: ModelConfig, by: Any) -> None:
    model = small(config)
    site = Site(1, Tap.INSIDE, Sublayer.FEEDFORWARD)
    record = Record([site])
    with torch.no_grad():
        model(Ragged.from_list([torch.tensor(text) for text in TEXTS]), watch=record)
    inside = record[site]
    assert isinstance(inside, Ragged)
    flat = [
        (float(row[7]), text, position)
        for text, rows in enumerate(inside.to_list())
        for position, row in enumerate(rows)
    ]
    rank = {"largest": lambda v: -v, "smallest": lambda v: v, "absolute": lambda v: -abs(v)}[by]
    expected = sorted(flat, key=lambda each: rank(each[0]))[:6]
    result = neurons(model, TEXTS, [(1, 7)], top_k=6, by=by, batch_tokens=7, progress=False)
    top_activations = result.of("L1N7").top_activations
    for moment, (value, text, position) in zip(top_activations, expected, strict=True):
        assert moment.value == pytest.approx(value, abs=1e-5)
        assert (moment.number, moment.position) == (text, position)
        assert moment.token == TEXTS[text][position]
    values = torch.tensor([value for value, _, _ in flat])
    memory = result.of("L1N7")
    assert memory.mean == pytest.approx(float(values.mean()), abs=1e-5)
    assert memory.deviation == pytest.approx(float(values.std(correction=0)), abs=1e-5)
    assert memory.active == pytest.approx(float((values > 0).float().mean()))


def test_experts_are_moved_only_by_tokens_that_visit_them() -> None:
    model = small(DECODERS["experts"])
    result = neurons(model, TEXTS, ["L0E1N3", "L0E2N3"], top_k=25, by="absolute", progress=False)
    for memory in result.each:
        values = [moment.value for moment in memory.top_activations]
        assert 0 in values
        assert values != [0.0] * len(values)


def test_every_kind_of_model() -> None:
    pairs = [([1, 2, 3], [4, 5, 6]), ([7, 8], [9, 1])]
    both = small(SEQ2SEQS["window"])
    reads = neurons(both, pairs, ["L0N1"], stack="encoder", progress=False)
    assert reads.metadata["through"] == "embedding"
    assert {moment.token for moment in reads.each[0].top_activations} == {1, 2, 3, 7, 8}
    writing = neurons(both, pairs, ["L0N1"], progress=False)
    assert writing.metadata["through"] == "unembedding"
    assert {moment.token for moment in writing.each[0].top_activations} == {4, 5, 6, 9, 1}
    seen = neurons(small(VISIONS["vit"]), images(), ["L0N1"], progress=False)
    assert seen.each[0].raised == ()
    assert seen.each[0].top_activations[0].token is None
    assert "of text" in str(seen)
    classes = neurons(small(ENCODERS["classes"]), TEXTS, ["L0N1"], progress=False)
    assert classes.metadata["through"] == "embedding"


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(97 + token) for token in ids)


def test_it_reads_well_and_can_be_saved(tmp_path: Path) -> None:
    model = planted()
    model.tokenizer = Letters()
    inputs = [torch.tensor(text) for text in TEXTS]
    result = neurons(model, Ragged.from_list(inputs), ["L0N5", "L0N6"], top_k=3, progress=False)
    message = str(result)
    assert "L0N5: coefficient" in message
    assert "raises: 'l'" in message
    assert "at 1 of text 1: c[h]bici" in message
    assert result.table().row_count == len(result.frame()) == 2
    assert result.rows()[0]["neuron"] == "L0N5"
    for ending in ("json", "safetensors"):
        result.save(tmp_path / f"found.{ending}")
        again = lens.load(tmp_path / f"found.{ending}")
        assert again.each == result.each
        assert again.metadata == result.metadata
    with refuses(InputError, "L0N7 is not in this result: name it in neurons(...)."):
        result.of("L0N7")


def test_agreement_counts_next_words_that_were_written() -> None:
    model = planted()
    texts = [[7, 11], [3, 7, 11, 2], [4, 7]]
    memory = neurons(model, texts, ["L0N5"], top_k=3, top_tokens=1, progress=False).each[0]
    assert {moment.token for moment in memory.top_activations} == {7}
    assert memory.agreement == 1.0
    assert neurons(model, [[7, 3]], ["L0N5"], top_k=1, top_tokens=1).each[0].agreement == 0.0
    assert neurons(model, [[3, 7]], ["L0N5"], top_k=1, top_tokens=1).each[0].agreement is None


def test_what_keeps_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"top_k.*0.*1 or more"):
        neurons(small(DECODERS["gpt2"]), TEXTS, ["L0N5"], top_k=0)
    with refuses(InputError, "context", "got -1", "0 or more"):
        neurons(small(DECODERS["gpt2"]), TEXTS, ["L0N5"], context=-1)
