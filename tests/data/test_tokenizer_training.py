"""Tokenizers of one's own write back what they read, and frame texts as their kind does."""

from hypothesis import given
from hypothesis import strategies as st

from manyheads.data.sources.texts import InMemoryTexts, TextFiles
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.errors import ConfigError, InputError
from tests.data.tiny import TEXTS, tokenizer
from tests.messages import refuses

BYTES = tokenizer("bytes")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_bytes(text: str) -> None:
    ids = BYTES.encode(text).ids
    assert BYTES.decode(ids, skip_special_tokens=False) == text


def test_bytes_know_every_byte_an_end_and_what_is_frequent() -> None:
    assert BYTES.token_to_id("<|end|>") == 0
    assert 257 < BYTES.get_vocab_size() <= 300
    assert len(BYTES.encode(" the mat").ids) == 2


def test_wordpiece_frames_texts_as_bert_does() -> None:
    pieces = tokenizer("wordpiece", 100)
    assert pieces.encode("The CAT").tokens == ["[CLS]", "the", "cat", "[SEP]"]
    pair = pieces.encode("the", "mat")
    assert pair.tokens == ["[CLS]", "the", "[SEP]", "mat", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 1, 1]
    cased = train_tokenizer(InMemoryTexts(("The The the the",)), 100, "wordpiece", lowercase=False)
    assert cased.encode("The the").tokens == ["[CLS]", "The", "the", "[SEP]"]


def test_learning_twice_gives_the_same_bytes() -> None:
    assert tokenizer("bytes").to_str() == BYTES.to_str()


def test_what_cannot_be_learnt_is_refused() -> None:
    given_texts = InMemoryTexts(TEXTS)
    with refuses(ConfigError, "size=256 is too small for 256 bytes and <|end|>: use 257 or more."):
        train_tokenizer(given_texts, 256)
    with refuses(ConfigError, "size=5 is too small for 5 special tokens: use 6 or more."):
        train_tokenizer(given_texts, 5, "wordpiece")
    with refuses(InputError, "there is no text to train on: use a source that has text."):
        train_tokenizer(InMemoryTexts(("", " ")))
    with refuses(InputError, "nowhere.txt does not exist: check the path."):
        train_tokenizer(TextFiles("nowhere.txt"))
