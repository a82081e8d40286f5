"""A trained model says how what it writes starts and ends, so that it can write."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from manyheads import generate
from manyheads.checkpoints.folder import load
from manyheads.checkpoints.side_files import read_tokenizer
from manyheads.data.sources.texts import TextFiles
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.decoding.generation_config import GenerationDefaults
from manyheads.decoding.request import read_prompts
from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import parse_run
from tests.train.tiny import tables, tiny, write_corpus


def test_a_language_model_knows_its_last_word(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=20)
    train(tiny(tmp_path, steps=1), progress=False)
    model = load(tmp_path / "out/model")
    assert GenerationDefaults.of(model).eos_token_ids == (model.tokenizer.token_to_id("<|end|>"),)


def translating(folder: Path, kind: Any, start: str, **data: Any) -> Any:
    rows = [{"first": f"the cat {number}", "second": f"a dog {number}"} for number in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = TextFiles(str(folder / "pairs.jsonl"), text_column="second")
    train_tokenizer(source, 300, kind, progress=False).save(str(folder / "tokenizer.json"))
    settings = tables(folder, steps=1)
    shape = {"layers": 1, "width": 16, "heads": 2, "hidden": 16, "vocabulary": 300}
    settings["model"] = {"size": "transformer-base", "change": shape}
    settings["objective"] = {"kind": "Seq2SeqLM", "start": start}
    settings["data"] = {
        "kind": "pairs",
        "train": str(folder / "pairs.jsonl"),
        "tokenizer": str(folder / "tokenizer.json"),
        "max_length": 16,
        "batch": 128,
        **data,
    }
    return settings


@pytest.mark.parametrize(
    ("kind", "start", "end"), [("bytes", "<|end|>", "<|end|>"), ("wordpiece", "[CLS]", "[SEP]")]
)
def test_a_translator_knows_where_to_start_and_when_to_end(
    tmp_path: Path, kind: str, start: str, end: str
) -> None:
    settings = translating(tmp_path, kind, start)
    train(parse_run(settings), progress=False)
    model = load(tmp_path / "out/model")
    token = model.tokenizer.token_to_id
    result = GenerationDefaults.of(model)
    assert (result.decoder_start_token_id, result.eos_token_ids) == (token(start), (token(end),))
    pieces = parse_run(settings).data[0].load(model.tokenizer, tmp_path).training
    batch = pieces.batch([0, 1, 2])
    for texts in (batch.texts, batch.others):
        assert texts is not None
        assert [texts.of(index)[-1].item() for index in range(3)] == [token(end)] * 3


@pytest.mark.parametrize(
    ("kind", "start", "data"),
    [
        ("bytes", "<|end|>", {}),
        ("wordpiece", "[CLS]", {}),
        ("wordpiece", "[CLS]", {"end": "[MASK]"}),
        ("bytes", "<|end|>", {"end": ""}),
    ],
)
def test_a_source_ends_in_use_as_in_training(
    tmp_path: Path, kind: str, start: str, data: dict[str, str]
) -> None:
    tables_of_run = translating(tmp_path, kind, start, **data)
    train(parse_run(tables_of_run), progress=False)
    model = load(tmp_path / "out/model")
    before = read_tokenizer(
        {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}, tmp_path
    )
    batch = parse_run(tables_of_run).data[0].load(before, tmp_path).training.batch([0, 1, 2])
    assert batch.texts is not None
    trained = [batch.texts.of(index).tolist() for index in range(3)]
    texts = [f"the cat {number}" for number in range(3)]
    settings = {"max_new_tokens": 4, "eos_token_ids": ()}
    assert read_prompts(model, texts, GenerationDefaults.of(model)) == trained
    assert [each.ids for each in generate(model, texts, **settings)] == [
        each.ids for each in generate(model, trained, **settings)
    ]
    peer = AutoTokenizer.from_pretrained(tmp_path / "out/model")
    assert peer(texts)["input_ids"] == trained
    # A second run on the trained model appends nothing twice.
    tables_of_run["model"], tables_of_run["data"]["tokenizer"] = (
        {"folder": str(tmp_path / "out/model")},
        "",
    )
    again = parse_run(tables_of_run).data[0].load(model.tokenizer, tmp_path).training.batch([0])
    assert again.texts is not None
    if "end" not in data:
        assert again.texts.of(0).tolist() == trained[0]


def test_a_trained_embedding_model_records_its_pooling(tmp_path: Path) -> None:
    settings = translating(tmp_path, "wordpiece", "[CLS]")
    settings["model"] = {
        "size": "bert-base",
        "change": {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "vocabulary": 300},
    }
    settings["objective"] = {"kind": "Contrastive", "pooling": "cls"}
    train(parse_run(settings), progress=False)
    sentence = load(tmp_path / "out/model").sentence
    assert sentence is not None
    assert sentence.pooling == "cls"


def test_sentences_that_should_lie_close_end_as_they_are_encoded(tmp_path: Path) -> None:
    settings = translating(tmp_path, "bytes", "<|end|>")
    settings["objective"] = {"kind": "Contrastive"}
    assert getattr(parse_run(settings).data[0], "end", None) == ""
    settings["data"]["end"] = "[MASK]"
    assert getattr(parse_run(settings).data[0], "end", None) == "[MASK]"
