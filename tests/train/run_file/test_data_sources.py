"""Sources mixed by weight and validation sets by name: parsed, trained on, reported, resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import load
from manyheads.errors import ConfigError
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.run_file.data_sources import (
    WeightedSource,
    training_paths,
    validation_paths,
)
from manyheads.train.run_file.run_config import parse_run
from tests.messages import refuses
from tests.train.tiny import tables, write_corpus

COUNTS = "one two three four five six seven eight nine ten"


def mixed_tables(folder: Path, **settings: Any) -> dict[str, Any]:
    """A run on two sources, with a validation set of each."""
    write_corpus(folder, documents=40)
    (folder / "counts.txt").write_text("\n\n".join([COUNTS] * 12))
    result = tables(folder, **settings)
    result["data"] |= {
        "train": [
            {"path": str(folder / "corpus.txt"), "weight": 3, "name": "words"},
            {"path": [str(folder / "counts.txt")], "weight": 1},
        ],
        "validation": {
            "words": str(folder / "corpus.txt"),
            "counts": [str(folder / "counts.txt")],
        },
    }
    return result


def metrics(folder: Path, name: str) -> list[Any]:
    lines = MetricsLog(folder / "out/metrics.jsonl").read()
    return [line[name] for line in lines if name in line]


def test_sources_and_sets_are_read_from_a_run_file(tmp_path: Path) -> None:
    data = parse_run(mixed_tables(tmp_path)).data[0]
    words, counts = str(tmp_path / "corpus.txt"), str(tmp_path / "counts.txt")
    assert data.train == (
        WeightedSource(path=(words,), weight=3.0, name="words"),
        WeightedSource(path=(counts,), weight=1.0),
    )
    assert training_paths(data.train) == [words, counts]
    assert validation_paths(data.validation) == {"words": (words,), "counts": (counts,)}
    assert validation_paths(("a.txt",)) == {"": ("a.txt",)}
    assert validation_paths(0.1) == validation_paths(()) == {}


def test_shares_and_named_sets_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(parse_run(mixed_tables(tmp_path, steps=8, validate_every=4)), progress=True)
    shares = metrics(tmp_path, "shares")
    assert len(shares) == 8
    assert set(shares[0]) == {"words", str(tmp_path / "counts.txt")}
    mean = sum(share["words"] for share in shares) / 8
    assert mean == pytest.approx(0.75, abs=0.12)
    first, last = metrics(tmp_path, "validation")
    assert set(first) == {"words", "counts"}
    assert last["counts"]["loss"] < first["counts"]["loss"]
    assert set(first["words"]) == {"loss", "perplexity", "bits_per_byte"}
    printed = capsys.readouterr().err
    assert "step 4, validation on words: loss" in printed
    assert "step 8, validation on counts: loss" in printed


def test_a_fraction_of_a_mixture_holds_out_a_set_of_each_source(tmp_path: Path) -> None:
    settings = mixed_tables(tmp_path, steps=1)
    settings["data"]["validation"] = 0.2
    train(parse_run(settings), progress=False)
    assert set(metrics(tmp_path, "validation")[-1]) == {"words", str(tmp_path / "counts.txt")}


def test_a_resumed_mixture_is_bitwise_the_run_that_was_never_interrupted(tmp_path: Path) -> None:
    places = tmp_path / "whole", tmp_path / "resumed"
    for place in places:
        place.mkdir()
    (tmp_path / "data").mkdir()
    settings = mixed_tables(tmp_path / "data", steps=8)
    for place, parts in zip(places, ((8,), (3, 8)), strict=True):
        for steps in parts:
            settings["run"] |= {"folder": str(place / "out"), "steps": steps}
            train(parse_run(settings), progress=False)
    for name in ("loss", "shares"):
        assert metrics(places[1], name) == metrics(places[0], name)
    weights = [load(place / "out/model").state_dict() for place in places]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


def test_rows_are_validated_on_several_sets(tmp_path: Path) -> None:
    write_corpus(tmp_path, documents=20)
    rows = [f'{{"text": "the cat sat", "label": {n % 2}}}' for n in range(8)]
    for name in ("train", "one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    settings = tables(tmp_path, steps=1)
    settings["model"] = {"size": "bert-base", "classes": "data"} | {
        "change": {"layers": 1, "width": 16, "heads": 2, "vocabulary": 300, "hidden": 32}
    }
    settings["objective"] = {"kind": "SequenceClassification"}
    settings["data"] = {
        "kind": "labeled",
        "train": str(tmp_path / "train.jsonl"),
        "validation": {name: str(tmp_path / f"{name}.jsonl") for name in ("one", "two")},
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "max_length": 16,
        "batch": 64,
    }
    train(parse_run(settings), progress=False)
    held = metrics(tmp_path, "validation")[-1]
    assert held["one"] == held["two"]
    assert set(held["one"]) == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": [{"path": "a.txt"}]}, "data.train.0.weight is missing: add it."),
        ({"train": [{"path": "a.txt", "weight": 0}]}, "weight must be above 0, got 0"),
        (
            {"train": ["a.txt", {"path": "b.txt", "weight": 1}]},
            "train has paths and sources with a weight: give every source a weight.",
        ),
        (
            {"train": [{"path": "a.txt", "weight": 1}, {"path": "a.txt", "weight": 2}]},
            "train has 'a.txt' twice: give one of them another name.",
        ),
        ({"validation": {"": "a.txt"}}, "no name or no file: write it as name = file."),
    ],
)
def test_what_cannot_be_mixed_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    settings = tables(tmp_path)
    settings["data"] |= change
    with refuses(ConfigError, message):
        parse_run(settings)
