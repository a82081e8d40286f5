"""Who ends a text, and with what."""

from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.tokenizer_training import appended_eos, find_eos, train_tokenizer

WORDS = InMemoryTexts(("the cat sat on the mat " * 20,))


def test_bytes_have_an_end_that_they_do_not_append_and_wordpiece_does() -> None:
    plain = train_tokenizer(WORDS, 300, progress=False)
    assert appended_eos(plain) is None
    assert find_eos(plain) == "<|end|>"
    framed = train_tokenizer(WORDS, 60, "wordpiece", progress=False)
    assert appended_eos(framed) == framed.token_to_id("[SEP]")
    assert find_eos(framed) == "[SEP]"
