"""Probes: labels known to be in a head are found there, and chance is told from finding."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyheads import lens
from manyheads.errors import InputError, MissingPackageError
from manyheads.lens.inputs.cached_run import head_scope
from manyheads.lens.probing.linear import OFFSETS, find_items, gather_features, probe, split_words
from manyheads.lens.probing.syntax import probe_syntax
from manyheads.lens.results.tables import ByHead, ByLayer
from manyheads.models.build import build
from manyheads.ragged import Ragged
from manyheads.taps import Head, Record, Site, Sublayer, Tap
from tests.data import tiny
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, VISIONS, ids, images, small

LENGTHS = (12, 9, 14, 7, 12, 10, 8, 13)
WORDS = ("the", "cat", "sat", "on", "mat", "document", "mat,")


@pytest.fixture(scope="module")
def reader() -> Any:
    config = ENCODERS["modernbert"]
    model = build(replace(config, embedding=replace(config.embedding, vocabulary=300)), seed=0)
    model.tokenizer = tiny.tokenizer()
    return model


def observe(model: Any, batch: Ragged, site: Site) -> Any:
    record = Record([site])
    with torch.no_grad():
        model(batch, watch=record)
    return record[site]


def by_text(values: Tensor, batch: Ragged) -> list[list[int]]:
    return [each.tolist() for each in batch.with_values(values.long()).to_list()]


def sentences(count: int) -> list[list[str]]:
    generator = np.random.default_rng(0)
    return [list(generator.choice(WORDS, size=generator.integers(4, 9))) for _ in range(count)]


def test_a_probe_finds_a_label_in_the_head_that_writes_it() -> None:
    model, batch = small(DECODERS["llama"]), ids(LENGTHS * 2)
    spoken = observe(model, batch, Site(1, Tap.HEAD_OUTPUT)).values[:, 2]
    direction = torch.randn(spoken.shape[1], generator=torch.Generator().manual_seed(0))
    along = (spoken - spoken.mean(0)) @ direction
    result = probe(model, batch, by_text(along > 0, batch), strength=10.0, progress=False)
    assert isinstance(result, ByHead)
    accuracy = result["accuracy"]
    assert accuracy.ranked()[0][0].head == Head(1, 2)
    assert accuracy.of(Head(1, 2)) > 0.9
    assert 0.3 < result["majority"].of(Head(1, 2)) < 0.8
    assert 0 < accuracy.error_of(Head(1, 2)) < 0.1
    for head in (Head(0, 0), Head(1, 2)):
        one = result.of(head)
        assert one["selectivity"] == pytest.approx(one["accuracy"] - one["control"])
    assert result.metadata["level"] == "token"
    assert result.metadata["classes"] == ["0", "1"]


def test_types_learned_by_heart_are_not_selective() -> None:
    model, batch = small(DECODERS["alibi"]), ids(LENGTHS * 2)
    result = probe(model, batch, by_text(batch.values % 2, batch), "residuals", progress=False)
    assert isinstance(result, ByLayer)
    assert result.layers == (-1, 0, 1)
    first = result.of(-1)
    assert first["accuracy"] > 0.95
    assert first["control"] > 0.9
    assert abs(first["selectivity"]) < 0.1


def test_a_probe_finds_a_label_in_the_pattern_that_shows_it() -> None:
    model, batch = small(DECODERS["alibi"]), ids(LENGTHS * 3)
    patterns = observe(model, batch, Site(0, Tap.PATTERN))
    before = torch.cat([each[1].diagonal(-1) for each in patterns.each])
    middle = float(before.median())
    labels = [[None, *(each[1].diagonal(-1) > middle).long().tolist()] for each in patterns.each]
    result = probe(model, batch, labels, "patterns", strength=100.0, progress=False)
    assert isinstance(result, ByHead)
    assert result["accuracy"].of(Head(0, 1)) > 0.95
    assert result.metadata["items"] == len(before)


def test_features_of_patterns_are_those_of_the_pattern() -> None:
    model, batch = small(DECODERS["sinks"]), ids((12, 5))
    part = head_scope(model)
    items = find_items(part, batch, [[1] * 12, [0] * 5])
    features = gather_features(part, items, "patterns", "mean", progress=False)
    pattern = observe(model, batch, Site(1, Tap.PATTERN)).of(0)
    result = features[1][:12]
    for column, offset in enumerate(OFFSETS):
        if abs(offset) < 12:
            row = torch.zeros(pattern.shape[:2])
            for query in range(max(0, -offset), min(12, 12 - offset)):
                row[:, query] = pattern[:, query, query + offset]
            torch.testing.assert_close(result[:, :, column], row.T, atol=1e-5, rtol=0)
    torch.testing.assert_close(result[:, :, -2], pattern[:, :, 0].T, atol=1e-5, rtol=0)
    entropy = torch.special.entr(pattern).sum(-1).T
    assert result.shape[-1] == len(OFFSETS) + 2
    assert (result[:, :, -1] - entropy > -1e-5).all()


def test_words_are_pooled_from_their_tokens(reader: Any) -> None:
    texts = [["cat", "document", "xylophone"], ["the", "mat,", "sat"]]
    inputs, places = split_words(reader, texts)
    assert [len(each) for each in places] == [3, 3]
    assert len(places[0][2]) > 1
    part = head_scope(reader)
    items = find_items(part, texts, [["a", None, "b"], ["a", "b", "a"]])
    assert items.level == "word"
    assert [item.type for item in items.each] == ["cat", "xylophone", "the", "mat,", "sat"]
    spoken = observe(reader, inputs.ids, Site(2, Tap.HEAD_OUTPUT)).of(0)
    chosen = {"mean": spoken[list(places[0][2])].mean(0), "last": spoken[places[0][2][-1]]}
    for pool, expected in chosen.items():
        features = gather_features(part, items, "heads", pool, progress=False)
        torch.testing.assert_close(features[2][1], expected, atol=1e-5, rtol=0)


def test_words_texts_and_images_can_have_labels(reader: Any) -> None:
    texts = sentences(16)
    labels = [["noun" if word in ("cat", "mat") else "other" for word in each] for each in texts]
    result = probe(reader, texts, labels, "residuals", progress=False)
    assert isinstance(result, ByLayer)
    assert result.metadata["level"] == "word"
    assert result.of(-1)["accuracy"] > 0.9
    lines = [" ".join(each) for each in texts]
    whole = probe(reader, lines, [len(each) % 2 for each in texts], progress=False)
    assert whole.metadata["level"] == "text"
    vit = small(VISIONS["vit"])
    pictures = images(((8, 8),) * 12)
    bright = [int(image.mean() > 0) for image in pictures]
    seen_by = probe(vit, pictures, bright, "residuals", strength="chosen", progress=False)
    assert isinstance(seen_by, ByLayer)
    assert set(seen_by.names) == {"accuracy", "majority", "control", "selectivity"}


def test_a_chosen_strength_does_no_worse_than_a_poor_one() -> None:
    model, batch = small(DECODERS["gpt2"]), ids(LENGTHS * 2)
    labels = by_text(batch.values % 2, batch)
    accuracies = []
    for strength in (1e-6, "chosen"):
        result = probe(model, batch, labels, "residuals", strength=strength, progress=False)
        assert isinstance(result, ByLayer)
        accuracies.append(result.of(-1)["accuracy"])
    assert accuracies[1] > accuracies[0]


def test_both_stacks_of_a_pair_can_be_probed() -> None:
    model = small(SEQ2SEQS["t5"])
    pair = (ids((5, 8, 4, 6)), ids((4, 6, 5, 7), seed=1))
    labels = [(pair[0].of(text) % 2).tolist() for text in range(4)]
    result = probe(model, pair, labels, stack="encoder", progress=False)
    assert isinstance(result, ByHead)
    assert result.addresses[0].stack == "encoder"
    labels = [(pair[1].of(text) % 2).tolist() for text in range(4)]
    result = probe(model, pair, labels, sublayer=Sublayer.CROSS, progress=False)
    assert isinstance(result, ByHead)
    assert result.addresses[0].sublayer is Sublayer.CROSS


def test_results_by_layer_come_back_from_disk(tmp_path: Any) -> None:
    model, batch = small(DECODERS["gpt2"]), ids((6, 7, 5, 8))
    result = probe(model, batch, by_text(batch.values % 2, batch), "residuals", progress=False)
    assert isinstance(result, ByLayer)
    for ending in ("json", "safetensors"):
        result.save(tmp_path / f"probe.{ending}")
        again = lens.load(tmp_path / f"probe.{ending}")
        assert str(again) == str(result)
        assert str(again.rows()) == str(result.rows())
        assert again.metadata == result.metadata
    assert result.table().row_count == 3
    assert len(result.frame()) == 3
    assert "embeddings" in str(result)
    with refuses(InputError, "layer 9 was not measured: use one of -1, 0, 1."):
        result.of(9)


def test_labels_that_cannot_be_are_refused(reader: Any) -> None:
    model = small(DECODERS["gpt2"])
    with refuses(InputError, "1 labels for 2 texts", "one per text"):
        probe(model, ids((5, 4)), [1])
    with refuses(InputError, "text 1 has 4 tokens and 3 labels", "None"):
        probe(model, ids((5, 4)), [[1, 0, 1, 0, 1], [1, 0, 1]])
    with refuses(InputError, "one label", "two or more"):
        probe(model, ids((5, 4, 6)), [1, 1, 1])
    with refuses(InputError, "2 texts", "got 1", "train"):
        probe(model, ids((5, 4)), [1, None])
    with refuses(InputError, "test", "got 1.0", "0 < test < 1"):
        probe(model, ids((5, 4)), [1, 0], test=1.0)
    with refuses(InputError, "strength", "got 0", "more than 0"):
        probe(model, ids((5, 4)), [1, 0], strength=0)
    with refuses(
        InputError,
        "this model has no tokenizer to read words with: set model.tokenizer, or give ids.",
    ):
        probe(model, [["a", "b"]], [[1, 0]])
    with refuses(InputError, "text 0 has 2 words and 1 labels", "None"):
        probe(reader, [["the", "cat"]], [[1]])


def test_without_scikit_learn_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with refuses(
        MissingPackageError,
        "a probe needs the package scikit-learn: run pip install scikit-learn.",
    ):
        probe(small(DECODERS["gpt2"]), ids((5, 4)), [1, 0])


def looks_of(model: Any, words: list[str], head: Head) -> np.ndarray:
    """From word to word, in plain loops: the sum to a word, the mean from it."""
    inputs, (places,) = split_words(model, [words])
    pattern = observe(model, inputs.ids, Site(head.layer, Tap.PATTERN)).of(0)[head.head]
    result = np.zeros((len(words), len(words)))
    for one, rows in enumerate(places):
        for other, columns in enumerate(places):
            result[one, other] = np.mean([sum(pattern[row, list(columns)]) for row in rows])
    return result


@pytest.fixture(scope="module")
def trees(reader: Any) -> list[tuple[list[str], list[int]]]:
    """Each word hangs on the one that L0H1 looks at most; the first is the root."""
    result = []
    for words in sentences(32):
        looks = looks_of(reader, words, Head(0, 1))
        np.fill_diagonal(looks, -1.0)
        heads = looks.argmax(1) + 1
        heads[0] = 0
        result.append((words, heads.tolist()))
    return result


def test_trees_of_one_head_are_predicted_from_attention(reader: Any, trees: Any) -> None:
    result = probe_syntax(reader, trees, progress=False)
    assert result.metadata["head"] == "L0H1 to the head"
    assert result.scores["head"][0] == pytest.approx(1.0)
    assert result.scores["probe"][0] > 0.9
    assert result.scores["offset"][0] < 0.7
    assert str(result.ranked(1)[0][0]) == "L0H1"
    assert result.metadata["sentences"] == [24, 8]
    turned = [(words, [0] * len(words)) for words, _ in trees]
    with refuses(InputError, "got 0", "two or more"):
        probe_syntax(reader, turned, progress=False)


def test_a_fixed_offset_is_recognized(reader: Any) -> None:
    chains = [(words, [*range(2, len(words) + 1), 0]) for words in sentences(10)]
    result = probe_syntax(reader, chains, progress=False)
    assert result.metadata["offset"] == 1
    assert result.scores["offset"][0] == pytest.approx(1.0)


def test_words_help_the_probe_to_fit(reader: Any, trees: Any, tmp_path: Any) -> None:
    result = probe_syntax(reader, trees, with_words=True, decay=1e-4, progress=False)
    assert result.metadata["with_words"]
    assert result.scores["probe"][0] > 0.8
    for ending in ("json", "safetensors"):
        result.save(tmp_path / f"syntax.{ending}")
        again = lens.load(tmp_path / f"syntax.{ending}")
        assert str(again) == str(result)
        assert again.ranked(3) == result.ranked(3)
    assert result.table().row_count == 3
    assert len(result.frame()) == 3


def test_trees_that_cannot_be_are_refused(reader: Any) -> None:
    with refuses(InputError, "sentence 0", "2 words and 1 heads", "one head per word"):
        probe_syntax(reader, [(["the", "cat"], [0])])
    with refuses(InputError, "sentence 0 has a head 3: use 0 for the root, 1 to 2."):
        probe_syntax(reader, [(["the", "cat"], [0, 3])])
    with refuses(InputError, "Vision", "an Encoder or a Decoder"):
        probe_syntax(small(VISIONS["vit"]), [(["the", "cat"], [0, 1])])
