"""Copies of tokenizers that pad nothing, and cut at one's own length or not at all."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from manyheads.errors import InputError
from manyheads.tokenizers import (
    disable_padding_and_truncation,
    plain_copy,
    truncating_copy,
)
from tests.messages import refuses

WORDS = ("a", "b", "c", "[X]")


@pytest.fixture
def bound() -> Tokenizer:
    """One that begins with a special token, cuts to three tokens and pads to five."""
    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="[X]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[X] $A", special_tokens=[("[X]", 3)]
    )
    made.enable_truncation(3)
    made.enable_padding(length=5)
    return made


def test_a_copy_neither_pads_nor_cuts_and_leaves_the_first_as_it_was(bound: Tokenizer) -> None:
    assert plain_copy(bound).encode("a b c a").ids == [3, 0, 1, 2, 0]
    assert bound.encode("a b c a").ids == [3, 0, 1, 0, 0]
    assert disable_padding_and_truncation(bound) is bound
    assert bound.encode("a").ids == [3, 0]


def test_it_cuts_at_ones_own_length_on_the_tokenizers_own_side(bound: Tokenizer) -> None:
    assert truncating_copy(bound, 2).encode("a b").ids == [3, 0]
    assert truncating_copy(bound, None).encode("a b c a").ids == [3, 0, 1, 2, 0]
    bound.enable_truncation(3, direction="left")
    assert truncating_copy(bound, 2).encode("a b").ids == [3, 1]


def test_room_for_nothing_but_special_tokens_is_refused(bound: Tokenizer) -> None:
    with refuses(InputError, "got 1: use 2 or more."):
        truncating_copy(bound, 1)
