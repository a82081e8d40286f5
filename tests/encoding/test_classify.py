"""The class of each text: what the model says of it alone, whatever it is batched with."""

import pytest
import torch

from manyheads import classify, with_classes
from manyheads.errors import InputError, TruncationWarning
from tests.encoding.tiny import letters, small
from tests.messages import refuses

TEXTS = ["the cat sat", "a", "on the mat by the door", "sun"]


def test_shares_are_those_of_each_text_alone() -> None:
    model = with_classes(small(), ("glad", "sad", "none"))
    result = classify(model, TEXTS, batch_tokens=20)
    with torch.no_grad():
        for text, shares in zip(TEXTS, result.probabilities, strict=True):
            ids = torch.tensor([letters_of(text)])
            torch.testing.assert_close(shares, model(ids).logits.softmax(1)[0])
    likeliest = result.probabilities.argmax(1).tolist()
    assert result.labels == tuple(("glad", "sad", "none")[place] for place in likeliest)


def letters_of(text: str) -> list[int]:
    tokenizer = letters()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    result: list[int] = tokenizer.encode(text).ids
    return result


def test_classes_without_names_are_numbers() -> None:
    assert classify(with_classes(small(), 2), "the cat").names == ("0", "1")


def test_decoders_tell_classes_by_their_last_token() -> None:
    model = with_classes(small("gpt2"), 2)
    result = classify(model, TEXTS)
    with torch.no_grad():
        alone = model(torch.tensor([letters_of(TEXTS[0])])).logits.softmax(1)[0]
    torch.testing.assert_close(result.probabilities[0], alone)


def test_long_texts_are_truncated_with_a_warning() -> None:
    with pytest.warns(TruncationWarning, match="1 of 1 texts were truncated to 6 tokens"):
        classify(with_classes(small(), 2), "the cat sat", max_length=6)


def test_what_tells_no_classes_is_refused() -> None:
    message = "the model has no classification head: add one with manyheads.with_classes."
    with refuses(InputError, message):
        classify(small(), TEXTS)
    message = "the model classifies tokens, not texts: use manyheads.tag."
    with refuses(InputError, message):
        classify(with_classes(small(), 2, "tokens"), TEXTS)
    model = with_classes(small(), 2)
    with refuses(InputError, "text 1 has no tokens: leave it out."):
        classify(model, [[5, 6], []])
