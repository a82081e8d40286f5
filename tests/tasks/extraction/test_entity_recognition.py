"""Entities: exact offsets, consistent tags, texts longer than the model reads."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads import load, save, tasks, with_classes
from manyheads.data.tag_schemes import (
    Scheme,
    TagSpan,
    allowed_transitions,
    complete_names,
    convert_tags,
    scheme_of,
    spans_of_tags,
    tags_of_spans,
)
from manyheads.encoding.word_reader import SpannedText, WordOptions, read_words
from manyheads.errors import InputError
from manyheads.tasks.extraction.entity_recognition import decode_tags, split_words
from manyheads.train import parse_run, train
from tests.encoding.tiny import small
from tests.messages import refuses

NAMES = ("B-a", "B-b", "I-a", "I-b", "O")
SCHEMES: tuple[Scheme, ...] = ("IOB2", "BILOU", "IO")


@pytest.fixture(scope="module")
def model() -> Any:
    return with_classes(small(), NAMES, "tokens", seed=3)


@st.composite
def spans(draw: st.DrawFn) -> list[TagSpan]:
    """Entities with a word between neighbors, so that IO can tell them apart."""
    result, start = [], 0
    for kind, gap, length in draw(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.integers(1, 3)))
    ):
        start += gap
        result.append(TagSpan(kind, start, start + length))
        start += length
    return result


@given(spans(), st.sampled_from(SCHEMES), st.sampled_from(SCHEMES))
def test_schemes_hold_the_same_entities(wanted: list[TagSpan], one: Scheme, other: Scheme) -> None:
    count = wanted[-1].end + 1 if wanted else 2
    tags = tags_of_spans(wanted, count, one)
    assert spans_of_tags(tags) == wanted
    assert spans_of_tags(convert_tags(tags, other)) == wanted
    assert not wanted or scheme_of(tags) in (one, "IOB2")


def test_inconsistent_tags_are_read_as_conlleval_does() -> None:
    tags = ["I-a", "I-a", "I-b", "O", "I-b", "B-b", "L-a", "U-a", "I-a"]
    assert spans_of_tags(tags) == [
        ("a", 0, 2),
        ("b", 2, 3),
        ("b", 4, 5),
        ("b", 5, 6),
        ("a", 6, 7),
        ("a", 7, 8),
        ("a", 8, 9),
    ]
    assert complete_names(["S-x", "O"]) == ("B-x", "E-x", "I-x", "O", "S-x")
    with refuses(InputError, "two entities share word 1"):
        tags_of_spans([TagSpan("a", 0, 2), TagSpan("b", 1, 3)], 4, "IOB2")


@pytest.mark.parametrize("names", [NAMES, ("O", "B-a", "I-a", "L-a", "U-a"), ("O", "I-a", "I-b")])
def test_decoding_finds_the_most_likely_consistent_tags(names: tuple[str, ...]) -> None:
    """Against all sequences of four tags, one by one."""
    shares = np.random.default_rng(0).dirichlet(np.full(len(names), 0.3), size=(20, 4))
    transitions = allowed_transitions(names)
    numbers = range(len(names))
    allowed = [
        path
        for path in itertools.product(numbers, repeat=4)
        if transitions.first[path[0]]
        and transitions.last[path[-1]]
        and all(transitions.following[a, b] for a, b in itertools.pairwise(path))
    ]
    for each in allowed:
        tags = [names[index] for index in each]
        assert tags_of_spans(spans_of_tags(tags), 4, scheme_of(names)) == tags
    for rows in shares:
        best = max(
            allowed, key=lambda path: sum(np.log(rows[i, tag]) for i, tag in enumerate(path))
        )
        assert decode_tags(rows, names, transitions) == [names[index] for index in best]
        assert decode_tags(rows, names, None) == [names[index] for index in rows.argmax(1)]


def test_offsets_are_those_of_the_text(model: Any) -> None:
    texts = ["  the cat,sat \u00e9 it's\ton the-mat", "", "漢字 \U0001f600😀 नमस्ते!"]
    result = tasks.entities(model, texts)
    assert [len(each) > 0 for each in result] == [True, False, True]
    for text, row in zip(texts, result, strict=True):
        for each in row:
            assert text[each.start : each.end] == each.text
            assert each.text == each.text.strip()
            assert 0 < each.score <= 1
        ends = [each.end for each in row]
        assert all(each.start >= end for end, each in zip(ends, row[1:], strict=False))
    words = [[text[a:b] for a, b in split_words(text)] for text in texts]
    assert words[0] == ["the", "cat", ",", "sat", "é", "it", "'s", "on", "the-mat"]
    assert words[2] == ["漢", "字", "\U0001f600😀", "नमस्ते", "!"]
    assert tasks.entities(model, "the cat") == tasks.entities(model, [["the", "cat"]])


def test_windows_leave_nothing_out(model: Any) -> None:
    """Words in the middle of a window are tagged as in a text of their neighbors alone."""
    text = "the cat sat on a mat by the door " * 12
    spanned = split_words(text)
    assert tasks.entities(model, [text], max_length=400) == tasks.entities(model, [text])
    [shares] = read_words(
        model, [SpannedText(text, spanned)], WordOptions(max_length=42, windows=True)
    )
    assert not shares.isnan().any()
    # The first window has its 40 letters to itself.
    alone = read_words(model, [SpannedText(text[:40], spanned[:4])], WordOptions())[0]
    torch.testing.assert_close(shares[:4], alone[:4])
    result = tasks.entities(model, [text], max_length=42)[0]
    assert max(each.end for each in result) > 300
    assert all(text[each.start : each.end] == each.text for each in result)


def test_models_without_tags_are_refused(model: Any) -> None:
    with refuses(InputError, "does not classify tokens", "with_classes"):
        tasks.entities(small(), "a")
    with refuses(InputError, "no class 'O'", "noun", "manyheads.tag"):
        tasks.entities(with_classes(small(), ("noun", "verb"), "tokens"), "a")
    with refuses(InputError, "text 1 is an int", "list of words"):
        tasks.entities(model, ["a", 3])
    with refuses(InputError, "min_score", "2"):
        tasks.entities(model, "a", min_score=2.0)


def test_a_run_learns_from_conll_files_and_finds_what_it_learnt(tmp_path: Path) -> None:
    """Names are found from the file, tags converted, and the trained model gives the entities."""
    lines = [
        "the\tO",
        "cat\tB-animal",
        "sat\tO",
        "by\tO",
        "the\tO",
        "red\tB-thing",
        "door\tI-thing",
    ]
    (tmp_path / "train.conll").write_text("\n".join(lines) + "\n")
    start = small()
    save(start, tmp_path / "start")
    tables = {
        "model": {"folder": str(tmp_path / "start"), "classes": "data"},
        "data": {
            "kind": "tagged",
            "train": str(tmp_path / "train.conll"),
            "scheme": "BILOU",
            "max_length": 64,
            "batch": 64,
        },
        "objective": {"kind": "TokenClassification"},
        "optimizer": {"lr": 1e-2},
        "run": {"folder": str(tmp_path / "run"), "steps": 15, "device": "cpu"},
    }
    train(parse_run(tables), progress=False)
    model = load(tmp_path / "run/model")
    assert model.class_names == tuple(
        sorted(["O", *(f"{prefix}-{kind}" for prefix in "BILU" for kind in ("animal", "thing"))])
    )
    text = "the cat sat by the red door"
    [result] = tasks.entities(model, text)
    assert [(each.type, each.text) for each in result] == [("animal", "cat"), ("thing", "red door")]
    assert tasks.score_entities([[("animal", 4, 7), ("thing", 19, 27)]], [result]).f1 == 1
