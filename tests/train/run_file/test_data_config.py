"""Texts are read as the run file says, once, and again where they have changed."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.errors import ConfigError, InputError
from manyheads.train.loop.session import train
from manyheads.train.run_file.data_config import Images, Labeled, Pairs, Tagged, Texts
from manyheads.train.run_file.run_config import parse_run
from tests.messages import refuses
from tests.train.tiny import tables, tiny, write_corpus

WORDS = InMemoryTexts(("the cat sat on the mat " * 20,))


def texts(**more: Any) -> Texts:
    return Texts(train=("corpus.txt",), max_length=8, batch=8, **more)


def wordpiece(**more: Any) -> Tokenizer:
    tokenizer: Tokenizer = train_tokenizer(WORDS, 60, "wordpiece", progress=False, **more)
    return tokenizer


def test_a_document_ends_as_the_tokenizer_has_it() -> None:
    assert texts()._end(wordpiece()) == "[SEP]"
    assert texts()._end(wordpiece(specials=("<|end|>",))) == "<|end|>"
    assert texts()._end(train_tokenizer(WORDS, 300, progress=False)) == "<|end|>"
    assert texts(end="[CLS]")._end(wordpiece()) == "[CLS]"
    assert texts(end="")._end(wordpiece()) is None


@pytest.mark.parametrize("key", ["end", "opening", "closing"])
def test_a_missing_token_is_refused_before_any_work(key: str, tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=4)
    settings = tables(tmp_path)
    settings["data"][key] = "[NO]"
    message = (
        f"data.{key}: the tokenizer has no token '[NO]': use one of its tokens, or \"\" for none."
    )
    with refuses(ConfigError, message):
        train(parse_run(settings), progress=False)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_an_end_token_is_refused_with_a_remedy() -> None:
    from tokenizers import models

    with pytest.raises(ConfigError, match='or to "" for none'):
        texts().check_tokens(Tokenizer(models.BPE()))


def changed_corpus(folder: Path) -> Path:
    """A corpus whose text has changed and whose size has not."""
    corpus = folder / "corpus.txt"
    corpus.write_text(corpus.read_text().replace("cat", "tac"))
    return corpus


def test_texts_that_change_under_a_run_are_refused_and_read_anew_by_a_fresh_one(
    tmp_path: Path,
) -> None:
    write_corpus(tmp_path, documents=40)
    train(tiny(tmp_path, steps=2), progress=False)
    corpus = changed_corpus(tmp_path)
    with refuses(
        ConfigError,
        f"{corpus}: the tokens of this run were made from other texts "
        f"({corpus} was not there or has changed): "
        "restore the texts, or start again with --fresh.",
    ):
        train(tiny(tmp_path, steps=4), progress=False)
    train(tiny(tmp_path, steps=2), fresh=True, progress=False)
    stores = sorted(tmp_path.glob("out/data/*"))
    assert [store.name for store in stores] == [stores[0].name, f"{stores[0].name}.before-1"]
    one, other = ((store / "tokens.bin").read_bytes() for store in stores)
    assert one != other
    train(tiny(tmp_path, steps=3), progress=False)


def test_a_corpus_without_text_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=4)
    (tmp_path / "corpus.txt").write_text(" \n")
    problem = f"{tmp_path / 'corpus.txt'}: there is no text in it: give other files."
    with refuses(InputError, problem):
        train(tiny(tmp_path), progress=False)


def test_bytes_that_are_no_utf8_may_be_replaced(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=40)
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(corpus.read_bytes() + b"\xff\xff")
    settings = tables(tmp_path, steps=1)
    with pytest.raises(InputError, match="is not UTF-8"):
        train(parse_run(settings), progress=False)
    settings["data"]["errors"] = "replace"
    assert train(parse_run(settings), progress=False).state.step == 1


def test_rows_of_the_hub_are_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_corpus(tmp_path, documents=40)
    hub = tmp_path / "hub"
    hub.mkdir()
    rows = (
        json.dumps({"body": text}) for text in (tmp_path / "corpus.txt").read_text().split("\n\n")
    )
    (hub / "train.jsonl").write_text("\n".join(rows))
    settings = tables(tmp_path, steps=1)
    train(parse_run(settings), progress=False)
    settings["run"]["folder"] = str(tmp_path / "from hub")
    settings["data"] |= {"train": f"hub:{hub}", "text_column": "body", "separator": ""}
    train(parse_run(settings), progress=False)
    one, other = ((tmp_path / run / "metrics.jsonl").read_text() for run in ("out", "from hub"))
    assert json.loads(one)["loss"] == json.loads(other)["loss"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"std": 0.0}, "std=0.0 cannot normalize images"),
        ({"std": (0.5, 0.0, 0.5)}, r"std=\(0.5, 0.0, 0.5\) cannot normalize images"),
        ({"mean": float("nan")}, "mean must be .* got nan"),
        ({"size": 0}, "size must be at least 1, got 0"),
    ],
)
def test_images_that_would_be_no_numbers_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Images(train=("photos",), batch=2, **inputs)


def test_a_pair_that_no_batch_holds_is_refused_by_the_key_of_the_run_file(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"first": "the cat " * 20, "second": "the mat " * 20}) + "\n")
    pairs = Pairs(train=(str(file),), max_length=16, batch=24, end="")
    pairs.check()
    with refuses(ConfigError, "batch=24 cannot hold a row of 32 tokens: use 32 or more."):
        pairs.load(wordpiece(), tmp_path)


@pytest.mark.parametrize("kind", [Labeled, Pairs, Tagged])
def test_a_missing_field_is_refused_before_any_work(kind: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"words": "the cat"}\n')
    with pytest.raises(InputError, match=r"line 1 has no field '\w+': use one of: words"):
        kind(train=(str(file),), max_length=8, batch=8).check()
