"""Runs that fail, are killed, are interrupted or come late, and what is left of them."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from manyheads.errors import InputError
from studies import run
from studies.run import Outcome, run_studies
from studies.study import Result
from tests.studies.planted import Planted

ARMS = ("narrow", "wide")


@pytest.fixture(autouse=True)
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put the planted study, with some arms, among those of the checkout."""

    def with_arms(*arms: str) -> None:
        study = type("Changed", (Planted,), {"full": {**Planted.full, "arms": arms}})()
        monkeypatch.setattr(run, "find_study", lambda _: study)

    with_arms(*ARMS)
    return with_arms


def start(folder: Path, **options: Any) -> run.StudyRun:
    return run_studies({"planted": folder}, **options)


def arms_of(folder: Path) -> set[str]:
    return set(Result.read(folder / "result.json").arms)


def test_a_run_leaves_numbers_a_plot_and_a_page(tmp_path: Path) -> None:
    ended = start(tmp_path)
    assert not ended.failures
    result = Result.read(tmp_path / "result.json")
    assert result == ended.results["planted"]
    assert result.settings["arms"] == list(ARMS)
    assert (tmp_path / "plot.png").is_file()
    page = (tmp_path / "README.md").read_text("utf-8")
    assert "✔ holds: 2.005 ± 0.005 and 1.505 ± 0.005" in page
    assert "4 runs" in page
    assert "steps 20,000" in page
    assert "It measures nothing." in page


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    late = start(tmp_path, minutes=-1.0)
    assert late.unmeasured == 4
    assert not (tmp_path / "result.json").exists()
    start(tmp_path)
    text = json.loads((tmp_path / "result.json").read_text("utf-8"))
    text["arms"]["narrow"]["0"]["loss"] = 7.0
    del text["arms"]["wide"]
    (tmp_path / "result.json").write_text(json.dumps(text), "utf-8")
    again = start(tmp_path).results["planted"]
    assert again.each("narrow", "loss") == [7.0, 2.01]
    assert again.each("wide", "loss") == [1.5, 1.51]


def test_an_arm_that_fails_is_named_and_the_others_are_measured(plant: Any, tmp_path: Path) -> None:
    plant("broken", "without data", *ARMS)
    ended = start(tmp_path, level="quick")
    broken, missing = ended.failures
    assert str(broken) == "study planted, arm 'broken #0': ZeroDivisionError: a fault of the study"
    assert "planted.py" in broken.trace
    assert "data/numbers.gz is missing: download it" in str(missing)
    assert not missing.trace
    assert arms_of(tmp_path) == set(ARMS)


def test_a_page_that_fails_loses_no_numbers(plant: Any, tmp_path: Path) -> None:
    plant("wide")
    [failure] = start(tmp_path).failures
    assert "study planted, its page" in str(failure)
    assert arms_of(tmp_path) == {"wide"}


def test_ctrl_c_leaves_what_has_ended(plant: Any, tmp_path: Path) -> None:
    plant("narrow", "interrupted", "wide")
    ended = start(tmp_path, level="quick")
    assert ended.interrupted
    assert ended.unmeasured == 2
    assert arms_of(tmp_path) == {"narrow"}
    assert "not measured" in (tmp_path / "README.md").read_text("utf-8")


def test_infinite_values_are_read_back_as_missing(plant: Any, tmp_path: Path) -> None:
    plant("narrow", "diverged")
    start(tmp_path)
    result = Result.read(tmp_path / "result.json")
    assert result.runs("diverged")[0]["loss"] is None
    assert result.text("diverged", "loss") == "not measured"


def test_an_arm_of_another_device_is_left_out(plant: Any, tmp_path: Path) -> None:
    plant("narrow", "on a GPU")
    ended = start(tmp_path)
    assert not ended.unmeasured
    assert arms_of(tmp_path) == {"narrow"}


def test_both_machines_of_a_result_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path)
    own = run.machine_name("cpu")
    assert start(tmp_path).results["planted"].machine == own
    monkeypatch.setattr(run, "machine_name", lambda _: "a GPU")
    assert start(tmp_path).results["planted"].machine == f"{own}; a GPU"


def test_a_result_of_other_settings_is_not_mixed_in(tmp_path: Path) -> None:
    start(tmp_path, level="quick")
    with pytest.raises(InputError, match=r"other settings.*another folder"):
        start(tmp_path)
    (tmp_path / "result.json").write_text("{", "utf-8")
    with pytest.raises(InputError, match="not the result of a study"):
        start(tmp_path)


class Pool:
    """Processes that run at once in this one; the first arm named "killer" kills all that run."""

    def __init__(self) -> None:
        self.running: list[Future[Outcome]] = []

    def submit(self, function: Any, task: run.Task, device: str) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self.running.append(future)
        if task.arm.name == "killer":
            for victim in self.running:
                if not victim.done():
                    victim.set_exception(BrokenProcessPool())
        elif task.arm.name == "slow" and len(self.running) == 1:
            pass
        else:
            future.set_result(function(task, device))
        return future


def test_a_killed_process_loses_no_other_run_and_time_is_measured_alone(
    plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("timed", "slow", "killer", *ARMS)
    sizes = []

    @contextmanager
    def pool(workers: int) -> Iterator[Pool]:
        sizes.append(workers)
        pool = Pool()
        pool.running += [Future()] * (workers == 1)
        yield pool

    monkeypatch.setattr(run, "_pool", pool)
    ended = start(tmp_path, level="quick", workers=2)
    assert [str(failure) for failure in ended.failures] == [
        "study planted, arm 'killer #0': its process was killed"
    ]
    assert set(ended.results["planted"].arms) == {"timed", "slow", *ARMS}
    assert list(ended.results["planted"].arms)[-2:] == ["timed", "slow"]
    # Two pools of two until all others were done, then one at a time.
    assert sizes == [2, 2, 1]
    assert not ended.unmeasured


def test_a_study_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(run, "study_names", lambda: ["gates"])
    with pytest.raises(InputError, match="there is no study 'gatess'"):
        run.find_study("gatess")
