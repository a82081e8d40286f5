"""Retrievers trained from run files: negatives, scores of a teacher, late interaction."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import encode, load
from manyheads.encoding.token_vectors import encode_tokens
from manyheads.errors import ConfigError, InputError
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import parse_run
from tests.train.tiny import SENTENCE, tables, write_corpus

WORDS = SENTENCE.split()


def retriever(place: Path, objective: dict[str, Any], **run: Any) -> dict[str, Any]:
    """A run on queries of two words, the sentences that hold them, and others."""
    write_corpus(place, documents=20)
    rows = [
        {
            "query": f"{first} {second}",
            "text": f"{second} and {first}",
            "wrong": [f"{first} over"] * (index % 3 + 1),
            "scores": [2.0, *[0.5] * (index % 3 + 1)],
        }
        for index, (first, second) in enumerate(zip(WORDS, WORDS[3:], strict=False))
    ]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = tables(place, **run)
    settings["model"] = {
        "size": "bert-base",
        "change": {
            "layers": 1,
            "width": 16,
            "heads": 2,
            "hidden": 16,
            "vocabulary": 300,
            "dropout": 0.0,
        },
    }
    settings["data"] = {
        "kind": "pairs",
        "train": str(place / "rows.jsonl"),
        "tokenizer": str(place / "tokenizer.json"),
        "first": "query",
        "second": "text",
        "negatives": "wrong",
        "max_length": 16,
        "batch": 160,
    }
    settings["objective"] = objective
    return settings


def losses(folder: Path) -> list[float]:
    lines = MetricsLog(folder / "out/metrics.jsonl").read()
    return [line["loss"] for line in lines if "loss" in line]


def test_negatives_are_learned_in_parts_with_watchers_and_half_precision(tmp_path: Path) -> None:
    settings = retriever(
        tmp_path,
        {"kind": "Contrastive", "cache_tokens": 40},
        steps=12,
        precision="bfloat16",
        telemetry_every=6,
    )
    settings["regularizer"] = [{"kind": "HeadDiversity", "weight": 0.01}]
    settings["data"]["validation"] = 0.2
    train(parse_run(settings), progress=False)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.1
    model = load(tmp_path / "out/model")
    assert model.sentence is not None
    assert model.sentence.pooling == "mean"
    assert (tmp_path / "out/model/modules.json").exists()
    # sentence-transformers pads, and this tokenizer has no token for that.
    assert json.loads((tmp_path / "out/model/tokenizer_config.json").read_text())["pad_token"]
    assert encode(model, ["the cat"], progress=False).shape == (1, 16)


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_a_teacher_is_learned_from(tmp_path: Path, kind: str) -> None:
    objective = {"kind": "Distillation", "loss_kind": kind, "cache_tokens": 60}
    settings = retriever(tmp_path, objective, steps=10)
    with pytest.raises(ConfigError, match=r"set data\.negatives and data\.scores"):
        parse_run(settings)
    settings["data"]["scores"] = "scores"
    train(parse_run(settings), progress=False)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_a_model_gets_late_interaction_and_keeps_it(tmp_path: Path) -> None:
    objective = {"kind": "Contrastive", "similarity": "maxsim", "token_width": 8}
    settings = retriever(tmp_path, objective, steps=2, checkpoint_every=2)
    train(parse_run(settings), progress=False)
    settings["run"]["steps"] = 4
    train(parse_run(settings), progress=False)
    result = load(tmp_path / "out/model")
    whole = {**settings, "run": {**settings["run"], "folder": str(tmp_path / "whole")}}
    train(parse_run(whole), progress=False)
    at_once = load(tmp_path / "whole/model")
    assert result.late is not None
    assert at_once.late is not None
    (dense,), (other,) = result.late.projection, at_once.late.projection
    assert dense.weight.shape == (8, 16)
    torch.testing.assert_close(dense.weight, other.weight)
    # It was trained: its rows are no longer orthogonal.
    assert (dense.weight @ dense.weight.T - torch.eye(8)).abs().max() > 1e-3
    assert encode_tokens(result, ["the cat"], progress=False).values.shape[1] == 8
    # It goes on with what it has.
    again = {**settings, "objective": {"kind": "Contrastive"}, "model": {"folder": result.source}}
    again["run"] = {**settings["run"], "folder": str(tmp_path / "again")}
    train(parse_run(again), progress=False)
    last = load(tmp_path / "again/model").late
    assert last is not None
    assert not torch.equal(last.projection[0].weight, dense.weight)


def test_rows_that_cannot_be_learned_from_are_refused(tmp_path: Path) -> None:
    settings = retriever(tmp_path, {"kind": "Contrastive"})

    def refused(error: type[Exception], match: str, *rows: Any, **data: Any) -> None:
        if rows:
            (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(error, match=match):
            train(parse_run({**settings, "data": {**settings["data"], **data}}), progress=False)

    one = {"query": "the cat", "text": "a mat", "wrong": ["dog"], "scores": [1.0, 0.0]}
    alike = dict(one, text=SENTENCE)
    refused(ConfigError, "holds one pair at a time", alike, alike, negatives=[], batch=24)
    refused(ConfigError, "needs negatives", negatives=[], scores="scores")
    refused(InputError, "no field 'none': use one of: query", negatives="none")
    refused(InputError, "is 5: give texts", {**one, "wrong": 5})
    refused(InputError, "there is one pair", one, negatives=[])
    refused(
        InputError, "has nan: use finite", {**one, "scores": [1.0, float("nan")]}, scores="scores"
    )
    refused(InputError, "3 scores and 1 negatives", {**one, "scores": [1, 2, 3]}, scores="scores")
    refused(InputError, "2 scores and 0 negatives", {**one, "wrong": []}, scores="scores")
