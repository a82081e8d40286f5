"""A word after a text is found among the tokens and traced."""

import pytest

from manyheads.errors import InputError
from manyheads.lens.answering import attribute, find_token
from tests.studio import models


def test_a_word_is_sought_with_a_space_where_the_text_ends_without_one() -> None:
    tokenizer = models.tokenizer()
    spaced, bare = (tokenizer.encode(each).ids for each in (" the", "t"))
    assert find_token(tokenizer, "the", "on") == spaced[0]
    assert find_token(tokenizer, "t", "on ") == bare[0]


def test_a_word_of_many_tokens_is_refused_with_its_pieces() -> None:
    with pytest.raises(InputError, match="tokens of this model"):
        find_token(models.tokenizer(), "hippopotamus")


def test_a_difference_of_two_words_is_the_difference_of_their_traces() -> None:
    model, text = models.decoder(layers=1), "The cat sat on the"
    one, other = (attribute(model, text, word) for word in ("mat", "log"))
    both = attribute(model, text, "mat", "log")
    for part in ("L0H2", "feedforward 0", "embedding"):
        assert both.of(part) == pytest.approx(one.of(part) - other.of(part), abs=1e-4)


def test_an_image_has_no_next_word() -> None:
    with pytest.raises(InputError, match="reads no texts"):
        attribute(models.vision(), "The cat")
