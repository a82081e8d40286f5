"""Who ends a text, and with what."""

from manyheads.data.eos import known_end, own_end
from manyheads.data.sources.texts import GivenTexts
from manyheads.data.tokenizer_training import train_tokenizer

WORDS = GivenTexts(("the cat sat on the mat " * 20,))


def test_bytes_have_an_end_and_do_not_put_it_there_and_wordpiece_does() -> None:
    plain = train_tokenizer(WORDS, 300, shown=False)
    assert own_end(plain) is None
    assert known_end(plain) == "<|end|>"
    framed = train_tokenizer(WORDS, 60, "wordpiece", shown=False)
    assert own_end(framed) == framed.token_to_id("[SEP]")
    assert known_end(framed) == "[SEP]"
