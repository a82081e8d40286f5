"""What ends a document, by what the tokenizer has, is known before any work."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from manyheads.data.texts import GivenTexts
from manyheads.data.tokenizer import train_tokenizer
from manyheads.errors import ConfigError
from manyheads.train.feeding import Texts
from manyheads.train.run import run_of
from manyheads.train.session import train
from tests.messages import refuses
from tests.train.tiny import tables, write_corpus

WORDS = GivenTexts(("the cat sat on the mat " * 20,))


def texts(**more: Any) -> Texts:
    return Texts(train=("corpus.txt",), length=8, batch=8, **more)


def wordpiece(**more: Any) -> Tokenizer:
    tokenizer: Tokenizer = train_tokenizer(WORDS, 60, "wordpiece", shown=False, **more)
    return tokenizer


def test_a_document_ends_as_the_tokenizer_has_it() -> None:
    assert texts()._end(wordpiece()) == "[SEP]"
    assert texts()._end(wordpiece(specials=("<|end|>",))) == "<|end|>"
    assert texts()._end(train_tokenizer(WORDS, 300, shown=False)) == "<|end|>"
    assert texts(end="[CLS]")._end(wordpiece()) == "[CLS]"
    assert texts(end="")._end(wordpiece()) is None


@pytest.mark.parametrize("key", ["end", "opening", "closing"])
def test_a_token_that_is_not_there_is_refused_before_any_work(key: str, tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=4)
    asked = tables(tmp_path)
    asked["data"][key] = "[NO]"
    message = f"data.{key}: the tokenizer has no token '[NO]': name one that it has, or none."
    with refuses(ConfigError, message):
        train(run_of(asked), shown=False)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_any_end_says_what_to_write() -> None:
    from tokenizers import models

    with pytest.raises(ConfigError, match='or write end = "" for none'):
        texts().check_words(Tokenizer(models.BPE()))
