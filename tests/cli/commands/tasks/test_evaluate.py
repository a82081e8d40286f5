"""manyheads evaluate: scores, scores by head, and wrong use in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyheads import lens
from manyheads.cli.main import main
from tests.tasks.benchmarks.test_lm_eval_tasks import CHOICES, write_rows

pytest.importorskip("lm_eval")


@pytest.fixture(autouse=True)
def no_description_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness asks several programs for it, at every run."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_rows(tmp_path_factory.mktemp("rows") / "sky.jsonl", CHOICES))


def test_scores_are_printed_and_written(rows: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "scores.json"
    words = ["--without", "L0H1", "--json", str(out)]
    assert main(["evaluate", "house-gpt", "--tasks", rows, *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Without L0H1." in printed
    results = json.loads(out.read_text())
    assert f"sky acc {results['results']['sky']['acc,none']:.4f}" in printed
    assert "samples" not in results


def test_scores_by_head_are_printed_and_saved(rows: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "heads.json"
    words = ["--each-head", "--heads", "L3H0,L3H1", "--limit", "1", "--json", str(out)]
    assert main(["evaluate", "house-gpt", "--tasks", rows, *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "higher is better With all heads" in printed
    result = lens.load(out)
    assert f"L3H0 {result['sky acc'].of('L3H0'):.4f}" in printed
    assert result.metadata["documents"] == {"sky": 1}


def test_wrong_use_is_one_line(rows: str, capsys: Any) -> None:
    for words, expected in (
        ([], "needs --tasks"),
        (["--tasks", rows, "--heads", "L0"], "--heads is for --each-head"),
        (["--tasks", rows, "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", rows, "--each-head", "--out", "folder"], "--out is for the results of one"),
        (["--tasks", "gsm8k"], "openai/gsm8k (main), from huggingface.co: use --download"),
    ):
        assert main(["evaluate", "house-gpt", *words]) == 2
        assert expected in capsys.readouterr().err
