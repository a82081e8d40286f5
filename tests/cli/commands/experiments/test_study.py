"""manyheads study, with a planted study in place of those of the checkout."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyheads.cli.commands.experiments import study as command
from manyheads.cli.main import main
from studies import run
from tests.studies.planted import Planted


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    plant(monkeypatch, "narrow", "wide")


def plant(monkeypatch: pytest.MonkeyPatch, *arms: str) -> None:
    study = type("Changed", (Planted,), {"full": {**Planted.full, "arms": arms}})()
    monkeypatch.setattr(command, "study_names", lambda: ("planted",))
    monkeypatch.setattr(run, "study_names", lambda: ["planted"])
    monkeypatch.setattr(run, "find_study", lambda _: study)


def measure(*options: str) -> int:
    return main(["study", "planted", "--quick", "--device", "cpu", *options])


def test_a_study_prints_its_verdicts_and_where_they_are(capsys: Any, tmp_path: Path) -> None:
    assert measure() == 0
    printed = capsys.readouterr().out
    assert "✔ holds: Wide models lose less" in printed
    assert "study-planted/README.md" in printed
    assert "study-planted/plot.png" in printed
    assert {file.name for file in (tmp_path / "study-planted").iterdir()} == {
        *("result.json", "README.md", "plot.png")
    }


def test_json_has_verdicts_and_numbers(capsys: Any) -> None:
    assert measure("-o", "there", "--json", "-") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["findings"][0]["verdict"] == "holds"
    assert values["result"]["arms"]["wide"]["0"]["loss"] == 1.5


def test_studies_are_listed_with_their_verdicts_so_far(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "measured_studies", list)
    assert main(["study"]) == 0
    assert "no result yet" in capsys.readouterr().out
    result = run.run_studies({"planted": tmp_path / "shipped"}).results["planted"]
    monkeypatch.setattr(run, "measured_studies", lambda: [(Planted(), result)])
    assert main(["study"]) == 0
    assert "1 holds" in capsys.readouterr().out
    assert main(["study", "--json", "-"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["study"], listed["findings"][0]["verdict"]) == ("planted", "holds")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["gatess"], "there is no study 'gatess': use planted."),
        (["planted", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["planted", "--minutes", "-1"], "--minutes must be above 0, got -1"),
        (["planted", "--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'"),
        (["planted", "--json", "numbers.txt"], ".json"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], reason: str, capsys: Any) -> None:
    assert main(["study", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_another_result_in_the_folder_is_not_overwritten(capsys: Any) -> None:
    assert measure() == 0
    assert main(["study", "planted", "--device", "cpu"]) == 2
    assert "study-planted/result.json has a result of other settings" in capsys.readouterr().err


def test_missing_data_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    plant(monkeypatch, "without data")
    assert main(["study", "planted", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "data/numbers.gz is missing: download it and 1 more." in error
    assert error.count("\n") == 1


def test_a_fault_of_an_arm_fails_and_leaves_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plant(monkeypatch, "narrow", "broken")
    assert measure() == 1
    printed = capsys.readouterr()
    assert "not measured: Wide models" in printed.out
    assert "study planted, arm 'broken #0': ZeroDivisionError" in printed.err


def test_ctrl_c_and_minutes_leave_what_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plant(monkeypatch, "narrow", "interrupted", "wide")
    assert measure() == 1
    printed = capsys.readouterr()
    assert "2 runs left: the same command goes on" in printed.out
    assert printed.err == "error: interrupted.\n"
    plant(monkeypatch, "narrow", "wide")
    assert measure("--out", "late", "--minutes", "1e-9") == 1
    assert "2 runs left" in capsys.readouterr().out


def test_a_package_without_its_checkout_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "study_names", tuple)
    assert main(["study"]) == 2
    assert "clone the repository" in capsys.readouterr().err
