"""Copies of tokenizers that pad nothing, and cut at one's own length or not at all."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from manyheads import build, chat_prompt, generate, lens
from manyheads.errors import InputError
from manyheads.tokenizers import (
    disable_padding_and_truncation,
    plain_copy,
    plain_tokenizer,
    token_text,
    token_texts,
    truncating_copy,
)
from tests.decoding.scripted import by_bytes
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
    assert plain_tokenizer(bound).encode("a b c a").ids == [3, 0, 1, 2, 0]
    assert disable_padding_and_truncation(bound) is bound
    assert plain_tokenizer(bound) is bound
    assert bound.encode("a").ids == [3, 0]


def test_it_cuts_at_ones_own_length_on_the_tokenizers_own_side(bound: Tokenizer) -> None:
    assert truncating_copy(bound, 2).encode("a b").ids == [3, 0]
    assert truncating_copy(bound, None).encode("a b c a").ids == [3, 0, 1, 2, 0]
    bound.enable_truncation(3, direction="left")
    assert truncating_copy(bound, 2).encode("a b").ids == [3, 1]


def test_room_for_nothing_but_special_tokens_is_refused(bound: Tokenizer) -> None:
    with refuses(InputError, "got 1: use 2 or more."):
        truncating_copy(bound, 1)


@pytest.fixture
def byte_level() -> Tokenizer:
    """One token per byte, but for a few pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # "Ġ" is the space, "Ð" the first byte of most Russian letters.
    vocabulary = {letter: id for id, letter in enumerate([*alphabet, "ĠÐ", "ab"])}
    made = Tokenizer(models.BPE(vocabulary, [("Ġ", "Ð"), ("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.decoder = decoders.ByteLevel()
    return made


def test_parts_of_a_letter_are_bytes_and_the_letter_begins_in_the_first(
    byte_level: Tokenizer,
) -> None:
    text = "ab П é"
    parts = token_texts(byte_level, text, byte_level.encode(text).ids)
    assert parts == [
        ("ab", "ab"),
        (" <0xD0>", " П"),
        ("<0x9F>", ""),
        (" ", " "),
        ("<0xC3>", "é"),
        ("<0xA9>", ""),
    ]


@pytest.mark.parametrize(
    "text", ["Привет, мир", "مرحبا", "👨‍👩‍👧 🇫🇷", "cafe\u0301", "a\u200bb", "\ufffd"]
)
def test_the_letters_of_all_tokens_are_the_text(byte_level: Tokenizer, text: str) -> None:
    parts = token_texts(byte_level, text, byte_level.encode(text).ids)
    assert "".join(letters or "" for _, letters in parts) == text
    assert not any("\ufffd" in token for token, _ in parts)


def test_a_token_outside_the_text_has_its_name_and_no_letters(bound: Tokenizer) -> None:
    assert token_texts(bound, "a b", [3, 0, 1]) == [("[X]", None), ("a", "a"), ("b", "b")]
    # Ids that the text does not have.
    assert token_texts(bound, "a b", [1, 0]) == [("b", None), ("a", None)]


def test_a_byte_alone_is_spelled(byte_level: Tokenizer) -> None:
    assert token_text(byte_level, byte_level.token_to_id("Ð")) == "<0xD0>"
    assert token_text(byte_level, byte_level.token_to_id("ab")) == "ab"


def test_a_lone_surrogate_is_refused_wherever_texts_come_in() -> None:
    model = build("gpt2", layers=1, width=32, heads=2, vocabulary=300, seed=0)
    model.tokenizer = by_bytes()
    broken = ["fine", "a\ud800b"]
    with refuses(InputError, "text 1", "surrogate at character 1", "errors='replace'"):
        generate(model, broken, max_new_tokens=1)
    with refuses(InputError, "text 1", "surrogate at character 1"):
        lens.statistics(model, broken)
    model.side_files = {"chat_template.jinja": b"{{ messages[0].content }}"}
    with refuses(InputError, "surrogate at character 0"):
        chat_prompt(model, [{"role": "user", "content": "\udfff"}])
