"""Every study runs at its smallest size, and the pages are those of the results."""

import json
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from manyheads.formatting import without_nan
from studies import pages
from studies.run import DOCS, HERE, Task, find_study, measured_studies, run_task, study_names
from studies.study import Finding, Result, Study, Verdict

each_study = pytest.mark.parametrize("name", study_names())
each_result = pytest.mark.parametrize(
    ("study", "result"), measured_studies(), ids=lambda value: getattr(value, "name", "result")
)


@cache
def smallest(name: str) -> Result:
    """The result of the `test` level, as a file would have it."""
    study = find_study(name)
    result = Result(name, "test", study.settings("test"), "a machine")
    for arm in study.arms(result.settings):
        if arm.device in ("", "cpu"):
            outcome = run_task(Task(name, arm, result.settings), "cpu")
            assert outcome.failure is None, f"{outcome.failure}\n{outcome.failure.trace}"
            result.add(arm, outcome.values, outcome.seconds)
    return Result(**json.loads(json.dumps(without_nan(asdict(result)))))


def is_sentence(finding: Finding) -> bool:
    return bool(re.search(r"\w", finding.measured)) and finding.measured.rstrip()[-1:] in ".!)"


@each_study
def test_a_study_runs_and_its_claims_are_measured(name: str, tmp_path: Path) -> None:
    study, result = find_study(name), smallest(name)
    assert study.name == name
    findings = study.findings(result)
    assert findings
    assert all(is_sentence(finding) for finding in findings)
    if not any(arm.device == "cuda" for arm in study.arms(result.settings)):
        assert Verdict.OPEN not in [finding.verdict for finding in findings]
    pages.write_page(study, result, tmp_path)
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "README.md").read_text("utf-8")
    assert page == pages.render(study, result)
    for finding in findings:
        assert finding.claim.text.removesuffix(".") in page
        assert finding.measured in page
    assert study.limits


@each_study
def test_without_arms_every_claim_is_open(name: str) -> None:
    study = find_study(name)
    empty = Result(name, "test", study.settings("test"), "a machine")
    findings = study.findings(empty)
    claims = [finding.claim for finding in study.findings(smallest(name))]
    assert [finding.claim for finding in findings] == claims
    assert {finding.verdict for finding in findings} == {Verdict.OPEN}


@each_study
def test_no_two_arms_have_the_same_name_and_seed(name: str) -> None:
    study = find_study(name)
    for level in ("full", "quick", "test"):
        keys = [arm.key for arm in study.arms(study.settings(level))]
        assert keys
        assert len(set(keys)) == len(keys)


@each_result
def test_a_shipped_page_is_that_of_its_result(study: Study, result: Result) -> None:
    folder = HERE / study.name
    assert result.level == "full"
    assert result.settings == study.settings("full")
    assert (folder / "README.md").read_text("utf-8") == pages.render(study, result)
    assert (DOCS / "images" / "studies" / f"{study.name}.png").is_file()
    assert (folder / "plot.png").is_file()


def test_the_page_of_verdicts_is_that_of_all_results() -> None:
    page = (DOCS / "studies.md").read_text("utf-8")
    assert page == pages.verdict_page(measured_studies())
