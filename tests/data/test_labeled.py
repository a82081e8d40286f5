"""Labeled texts, pairs and tags are read from named fields, and errors name the line."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.data.batch import IGNORE_INDEX
from manyheads.data.labeled import (
    Examples,
    LabeledText,
    LabeledTexts,
    TaggedText,
    TaggedTexts,
    TextPair,
    TextPairs,
    labeled_examples,
    paired_examples,
    tagged_examples,
)
from manyheads.data.sources.rows import FileRows
from manyheads.data.stream import Stream
from manyheads.errors import InputError
from tests.data.tiny import tokenizer
from tests.messages import refuses


def rows(folder: Path, *values: dict[str, Any]) -> FileRows:
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, values)))
    return FileRows(folder / "a.jsonl")


def test_fields_are_chosen_by_name(tmp_path: Path) -> None:
    result = rows(tmp_path, {"text": "good", "label": 1, "de": "gut", "tokens": ["a"], "tags": [0]})
    location = f"{tmp_path}/a.jsonl, line 1"
    assert list(LabeledTexts(result)) == [("good", 1, location)]
    assert list(LabeledTexts(result, text="de", label="text")) == [("gut", "good", location)]
    assert list(TextPairs(result, first="text", second="de")) == [("good", "gut", location, (), ())]
    assert list(TaggedTexts(result)) == [(("a",), (0,), location)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "has no field 'label': use one of: text"),
        (
            {"text": "a", "label": 0.5},
            ": field 'label' is 0.5: use a name, or a number of 0 or more",
        ),
        (
            {"text": "a", "label": -1},
            ": field 'label' is -1: use a name, or a number of 0 or more",
        ),
        ({"text": 5, "label": 1}, ": field 'text' is an int, not a string: use a field of texts"),
    ],
)
def test_wrong_labels_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    gap = "" if message.startswith(":") else " "
    with refuses(InputError, f"{tmp_path}/a.jsonl, line 1{gap}{message}."):
        list(LabeledTexts(rows(tmp_path, row)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a"], "tags": []}, " has 1 tokens and 0 tags: give one tag per word"),
        ({"tokens": "a", "tags": [1]}, ": field 'tokens' is a str: give a list"),
        ({"tokens": [1], "tags": [1]}, ": tokens are no words: give a list of texts"),
    ],
)
def test_wrong_tags_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with refuses(InputError, f"{tmp_path}/a.jsonl, line 1{message}."):
        list(TaggedTexts(rows(tmp_path, row)))


BYTES, PIECES = tokenizer("bytes"), tokenizer("wordpiece")
LABELED = [LabeledText("cat " * n, ("odd", "even")[n % 2 == 0], f"line {n}") for n in range(1, 30)]


def test_text_and_label_stay_together() -> None:
    examples = labeled_examples(LABELED, PIECES)
    assert examples.names == ("even", "odd")
    seen = []
    for batch in Stream(examples, batch_tokens=50, seed=4).single_epoch():
        assert batch.texts is not None
        assert batch.labels is not None
        assert batch.tokens <= 50
        for length, label in zip(batch.texts.lengths.each, batch.labels.tolist(), strict=True):
            assert label == length % 2
            seen.append(length - 2)
    assert sorted(seen) == list(range(1, 30))


def test_steps_are_addressed_as_those_of_a_store() -> None:
    stream = Stream(labeled_examples(LABELED, PIECES), batch_tokens=40, micro_batches=3, seed=1)
    whole = list(islice(stream.steps(), 9))
    rest = list(islice(stream.steps(whole[3].after), 5))
    for one, other in zip(whole[4:], rest, strict=True):
        for left, right in zip(one.batches, other.batches, strict=True):
            assert left.texts is not None
            assert right.texts is not None
            assert torch.equal(left.texts.values, right.texts.values)
            assert left.labels is not None
            assert right.labels is not None
            assert torch.equal(left.labels, right.labels)


def test_names_of_training_number_the_labels_of_testing() -> None:
    inputs = [LabeledText("cat", "b", "line 1")]
    assert labeled_examples(inputs, PIECES, names=("a", "b")).labels.tolist() == [1]  # type: ignore[union-attr]
    with refuses(InputError, "line 1: the label 'b' is unknown: use one of: a, c."):
        labeled_examples(inputs, PIECES, names=("a", "c"))
    with refuses(
        InputError, "some labels are names and some are numbers: use only names or only numbers."
    ):
        labeled_examples([*inputs, LabeledText("dog", 1, "line 2")], PIECES)


def test_pairs_are_counted_together_and_cut_apart() -> None:
    pairs = paired_examples(
        [TextPair("cat", "the cat", "line 1"), TextPair("on", "mat " * 50, "line 2")],
        PIECES,
        max_length=6,
    )
    assert pairs.sizes.tolist() == [7, 9]
    batch = pairs.batch([1, 0])
    assert batch.texts is not None
    assert batch.others is not None
    assert (batch.texts.lengths.each, batch.others.lengths.each) == ((3, 3), (6, 4))
    assert PIECES.decode(batch.others.of(1).tolist()) == "the cat"
    assert batch.tokens == 16


def test_the_first_token_of_a_word_carries_its_tag() -> None:
    tagged = tagged_examples(
        [
            TaggedText(("mat", "thecat"), ("X", "Y"), "line 1"),
            TaggedText(("on",), ("Y",), "line 2"),
        ],
        PIECES,
    )
    batch = tagged.batch([0, 1])
    assert batch.texts is not None
    assert batch.labels is not None
    assert batch.labels.shape == batch.texts.values.shape
    first = batch.labels[: batch.texts.lengths.each[0]].tolist()
    assert first[:3] == [IGNORE_INDEX, 0, 1]
    assert set(first[3:]) == {IGNORE_INDEX}
    assert batch.labels[-3:].tolist() == [IGNORE_INDEX, 1, IGNORE_INDEX]


def test_what_cannot_be_learnt_from_is_refused() -> None:
    with refuses(InputError, "the source has no examples: give at least one."):
        labeled_examples([], BYTES)
    with refuses(InputError, "line 7 has a text without tokens: remove empty texts."):
        labeled_examples([LabeledText("", 0, "line 7")], BYTES)
    with pytest.raises(InputError, match=r"2 special tokens.*use 3 or more"):
        paired_examples([TextPair("a", "b", "line 1")], PIECES, max_length=2)


def test_a_share_of_the_rows_is_held_out_by_chance_and_each_row_is_in_one_part() -> None:
    rows = [LabeledText(f"word {number}", number // 50, f"row {number}") for number in range(100)]
    whole = labeled_examples(rows, BYTES)
    kept, held = whole.split(0.2)
    assert (len(kept), len(held)) == (80, 20)
    assert {0, 1} == set(held.batch(range(20)).labels.tolist())  # type: ignore[union-attr]

    def texts(examples: Examples) -> list[tuple[int, ...]]:
        result = examples.batch(range(len(examples))).texts
        assert result is not None
        return [tuple(result.of(index).tolist()) for index in range(len(examples))]

    assert sorted(texts(kept) + texts(held)) == sorted(texts(whole))
    with refuses(
        InputError, "cannot split off 0.001 of 100 rows: use more rows, or another fraction."
    ):
        whole.split(0.001)
