"""The class of each word: what the model says at its first token."""

import pytest
import torch

from manyheads import tag, with_classes
from manyheads.errors import InputError, TruncationWarning
from tests.encoding.tiny import FIRST, LAST, LETTERS, small
from tests.messages import refuses

NAMES = ("noun", "verb", "other")
TEXTS = ["the cat sat", "a", "on the mat by the door"]


def ids_of(text: str) -> list[int]:
    """The text is read as it is, with the spaces between words."""
    letters = [3 + LETTERS.index(letter) for letter in text]
    return [FIRST, *letters, LAST]


def test_words_have_the_class_of_their_first_token() -> None:
    model = with_classes(small(), NAMES, "tokens")
    result = tag(model, TEXTS, batch_tokens=16)
    for text, row in zip(TEXTS, result, strict=True):
        words = text.split()
        assert [each.word for each in row] == words
        with torch.no_grad():
            shares = model(torch.tensor([ids_of(text)])).logits[0].softmax(1)
        starts = [1 + place + sum(map(len, words[:place])) for place in range(len(words))]
        for each, start in zip(row, starts, strict=True):
            assert each.label == NAMES[int(shares[start].argmax())]
            assert each.probability == pytest.approx(float(shares[start].max()), abs=1e-6)


def test_words_may_come_as_lists() -> None:
    model = with_classes(small(), 2, "tokens")
    assert tag(model, [["the", "cat", "sat"]]) == tag(model, ["the cat sat"])
    assert {each.label for each in tag(model, TEXTS)[0]} <= {"0", "1"}
    assert tag(model, [""]) == [[]]


def test_words_beyond_what_is_read_have_no_class() -> None:
    model = with_classes(small(), 2, "tokens")
    with pytest.warns(TruncationWarning, match="1 of 2 texts were read only in part"):
        result = tag(model, ["the cat sat", "a"], max_length=8)
    assert [bool(each.label) for each in result[0]] == [True, True, False]


def test_models_of_other_classes_are_refused() -> None:
    message = "the model does not classify tokens: add a head with manyheads.with_classes"
    with refuses(InputError, message):
        tag(with_classes(small(), 2), TEXTS)
