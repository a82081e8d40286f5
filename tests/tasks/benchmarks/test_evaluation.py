"""Scores as the harness writes them, and by head with errors of the same documents."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyheads
from manyheads import lens, tasks
from manyheads.errors import InputError
from manyheads.lens.inputs.synthetic import passages
from tests.messages import refuses
from tests.tasks.benchmarks.test_lm_eval_tasks import write_group, write_rows

pytest.importorskip("lm_eval")
WORDS = passages()[0].split()


@pytest.fixture(scope="module", autouse=True)
def no_description_of_the_machine() -> Iterator[None]:
    """The harness asks several programs for it, at every run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return manyheads.load("house-gpt")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four questions with two choices, and two texts."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [
        {
            "question": " ".join(WORDS[start : start + 9]),
            "choices": [WORDS[start + 9], "zebra"],
            "answer": start % 2,
        }
        for start in range(4)
    ]
    texts = [{"text": " ".join(WORDS[start : start + 12])} for start in (0, 12)]
    return [write_rows(folder / "choice.jsonl", rows), write_rows(folder / "prose.jsonl", texts)]


@pytest.fixture(scope="module")
def results(model: Any, files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("out")
    without = tasks.evaluate(model, files, without="L1H2", out=out, progress=False)
    return tasks.evaluate(model, files, progress=False), without, out


@pytest.fixture(scope="module")
def by_head(model: Any, files: list[Path]) -> Any:
    return tasks.evaluate_heads(model, files, "L1H2,L3H0", progress=False)


def test_results_have_the_form_of_the_harness(results: Any) -> None:
    scores = results[0]["results"]
    assert {"acc,none", "acc_stderr,none", "acc_norm,none"} <= set(scores["choice"])
    assert {"word_perplexity,none", "bits_per_byte,none"} <= set(scores["prose"])
    assert results[0]["n-samples"]["choice"] == {"original": 4, "effective": 4}
    assert results[0]["config"]["model_args"] == {"pretrained": "house-gpt"}


def test_files_are_those_of_the_harness(results: Any) -> None:
    _, without, out = results
    [folder] = out.iterdir()
    saved = json.loads(next(folder.glob("results_*.json")).read_text())
    assert saved["results"]["prose"]["bits_per_byte,none"] == pytest.approx(
        without["results"]["prose"]["bits_per_byte,none"]
    )
    assert saved["config"]["model_args"]["without"] == "L1H2"
    assert len(next(folder.glob("samples_choice_*.jsonl")).read_text().splitlines()) == 4


def test_the_score_of_a_head_is_that_of_the_model_without_it(results: Any, by_head: Any) -> None:
    complete, without, _ = results
    for task, metric in (("prose", "bits_per_byte"), ("choice", "acc")):
        name = f"{task} {metric}"
        before, after = (own["results"][task][f"{metric},none"] for own in (complete, without))
        assert by_head[name].of("L1H2") == pytest.approx(after, rel=1e-5)
        assert by_head[f"{name} change"].of("L1H2") == pytest.approx(after - before, abs=1e-5)
        assert by_head.metadata["baseline"][name] == pytest.approx(before, rel=1e-5)
    assert by_head.metadata["better"] == {
        "choice acc": "higher",
        "choice acc_norm": "higher",
        "prose word_perplexity": "lower",
        "prose byte_perplexity": "lower",
        "prose bits_per_byte": "lower",
    }
    assert np.isnan(by_head["choice acc"].of("L0H0"))


def test_the_error_of_a_change_is_of_the_same_documents(results: Any, by_head: Any) -> None:
    complete, without, _ = results
    before, after = (
        np.array([sample["acc_norm"] for sample in own["samples"]["choice"]], dtype=float)
        for own in (complete, without)
    )
    expected = (after - before).std(ddof=1) / len(after) ** 0.5
    assert by_head["choice acc_norm change"].error_of("L1H2") == pytest.approx(expected)
    # The harness has none for perplexities.
    assert by_head["prose bits_per_byte"].error_of("L3H0") > 0
    assert by_head["prose bits_per_byte change"].error_of("L3H0") > 0


def test_a_group_has_the_scores_of_all_its_documents(model: Any, tmp_path: Path) -> None:
    write_group(tmp_path)
    result = tasks.evaluate_heads(model, tmp_path, "L2H1", progress=False)
    assert {"first acc", "second acc", "both acc"} <= set(result.names)
    assert result["both acc"].of("L2H1") == result["first acc"].of("L2H1")
    assert result["both acc change"].error_of("L2H1") >= 0


def test_scores_by_head_are_saved_and_read_back(by_head: Any, tmp_path: Path) -> None:
    by_head.save(tmp_path / "heads.json")
    again = lens.load(tmp_path / "heads.json")
    assert again.metadata == by_head.metadata
    assert again["choice acc"].of("L3H0") == by_head["choice acc"].of("L3H0")


def test_needs_are_known_before_anything_is_read(files: list[Path], tmp_path: Path) -> None:
    assert tasks.benchmark_data(files) == []
    [need] = tasks.benchmark_data("gsm8k")
    assert str(need) == "openai/gsm8k (main)"
    (tmp_path / "openai/gsm8k").mkdir(parents=True)
    assert tasks.benchmark_data("gsm8k", data=tmp_path) == []


def test_code_that_a_model_writes_is_not_run(files: list[Path], model: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    task = """
task: local
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
unsafe_code: true
generation_kwargs: {until: ["\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
    (tmp_path / "local.yaml").write_text(task)
    with refuses(InputError, "local runs the code that a model writes"):
        tasks.evaluate(model, tmp_path)
    with refuses(InputError, "L7H0"):
        tasks.evaluate_heads(model, files, "L7H0")
