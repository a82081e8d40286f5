"""Pairs of prompts for circuits: they align, and their metric separates clean from corrupted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import load
from manyheads.errors import InputError
from manyheads.lens.circuit_discovery.task_pairs import CircuitTask, _year_tokens, circuit_task
from manyheads.lens.inputs.metrics import LogitDifference, ProbabilityDifference, bind_metric
from manyheads.lens.inputs.texts import read_inputs
from tests.messages import refuses
from tests.studio import models

ROWS = [
    {"clean": "The books", "corrupted": "The book", "answer": "are", "wrong": "is"},
    {"clean": "The film", "corrupted": "The films of it", "answer": "was", "wrong": "were"},
    {"clean": "The laws of it", "corrupted": "The law of it", "answer": "have", "wrong": "has"},
]


@pytest.fixture(scope="module")
def model() -> Any:
    return load("house-gpt")


def means(model: Any, task: CircuitTask) -> list[float]:
    values = []
    for texts in (task.clean, task.corrupted):
        inputs = read_inputs(model, list(texts))
        metric = bind_metric(model, inputs, range(len(task)), task.metric)
        with torch.no_grad():
            values.append(float(metric(model.run_inputs(inputs).hidden).mean()))
    return values


@pytest.mark.parametrize("name", ["ioi", "ioi-giver", "greater-than", "agreement"])
def test_every_pair_aligns_and_a_seed_draws_the_same_pairs(model: Any, name: str) -> None:
    task = circuit_task(model, name, 12, seed=3)
    assert task.name == name
    assert len(task) == 12
    for clean, corrupted in zip(task.clean, task.corrupted, strict=True):
        ids = [model.tokenizer.encode(text).ids for text in (clean, corrupted)]
        assert len(ids[0]) == len(ids[1])
        assert ids[0] != ids[1]
    assert circuit_task(model, name, 12, seed=3).clean == task.clean
    assert circuit_task(model, name, 12, seed=4).clean != task.clean


def test_the_small_model_knows_the_number_of_a_subject(model: Any) -> None:
    clean, corrupted = means(model, circuit_task(model, "agreement", 16))
    assert clean > 1 > -1 > corrupted


def test_years_are_later_or_earlier_by_tokens_of_two_digits(model: Any) -> None:
    task = circuit_task(model, "greater-than", 8)
    assert isinstance(task.metric, ProbabilityDifference)
    for text, later, earlier in zip(
        task.clean, task.metric.answers, task.metric.distractors, strict=True
    ):
        start = int(text.split("the year ")[1][2:4])
        assert {int(model.tokenizer.decode([token])) for token in later} <= {*range(start + 1, 100)}
        assert {int(model.tokenizer.decode([token])) for token in earlier} <= {*range(start + 1)}


class Digits:
    """A tokenizer of single characters."""

    def encode(self, text: str, **_: Any) -> Any:
        return type("Encoding", (), {"ids": [ord(letter) for letter in text]})


def test_a_digit_that_may_be_later_or_earlier_is_neither() -> None:
    years = dict(_year_tokens(Digits(), 17))
    later, earlier = ("".join(map(chr, tokens)) for tokens in years[41])
    assert (later, earlier) == ("56789", "0123")
    # Every year of the forties is up to 49.
    assert "".join(map(chr, years[49][1])) == "01234"
    assert 99 not in years


def test_years_of_one_token_give_no_prompts() -> None:
    class Whole:
        def encode(self, text: str, **_: Any) -> Any:
            return type("Encoding", (), {"ids": [int(text)]})

    assert dict(_year_tokens(Whole(), 17)) == {}


def test_the_giver_is_replaced_by_the_receiver(model: Any) -> None:
    task = circuit_task(model, "ioi-giver", 4)
    for clean, corrupted in zip(task.clean, task.corrupted, strict=True):
        changed = [*zip(clean.split(), corrupted.split(), strict=True)]
        [(giver, receiver)] = [pair for pair in changed if pair[0] != pair[1]]
        assert clean.split().count(giver) == 2
        assert corrupted.split().count(receiver) == 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_a_file_is_read_and_pairs_that_do_not_align_are_refused_or_skipped(
    model: Any, file: Path
) -> None:
    with refuses(InputError, "pair 1", "they part at token", "' films'"):
        circuit_task(model, file)
    task = circuit_task(model, file, skip=True)
    assert (len(task), task.skipped, task.name) == (2, 1, "pairs.jsonl")
    assert isinstance(task.metric, LogitDifference)
    answers = [model.tokenizer.decode([token]) for token in task.metric.answer]
    assert answers == [" are", " have"]
    assert len(circuit_task(model, str(file), count=1)) == 1


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"clean": "The cat"}, ("line 1", "corrupted")),
        (ROWS[0] | {"answer": "hippopotamus"}, ("line 1", "tokens of this model")),
        (ROWS[0] | {"wrong": "are"}, ("line 1", "the same token")),
        (ROWS[0] | {"clean": 3}, ("line 1", "not a string")),
        (ROWS[1], ("pair 0",)),
        (None, ("has no rows",)),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    model: Any, tmp_path: Path, row: Any, parts: tuple[str, ...]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("" if row is None else json.dumps(row))
    with refuses(InputError, *parts):
        circuit_task(model, path, skip=True)


def test_other_tasks_and_models_are_refused(model: Any) -> None:
    with refuses(InputError, "'docstring'", "greater-than"):
        circuit_task(model, "docstring")
    with refuses(InputError, "count", "0"):
        circuit_task(model, "ioi", 0)
    with refuses(InputError, "Encoder", "Decoder"):
        circuit_task(models.encoder(), "ioi")
    small = models.decoder(layers=1)
    with refuses(InputError, "plural"):
        circuit_task(small, "agreement")
    small.tokenizer = None
    with refuses(InputError, "no tokenizer"):
        circuit_task(small, "agreement")
