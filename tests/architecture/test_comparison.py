"""Tables of the README and the docs show what bench/results holds, and results say where from."""

import json
import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.house import ROOT

BENCH = ROOT / "bench"
RESULTS = sorted((BENCH / "results").glob("*.json"))


def read(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return result


@pytest.fixture(scope="module", autouse=True)
def bench_path() -> Iterator[None]:
    """Scripts in bench import their neighbors by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield


@pytest.fixture(scope="module")
def tables() -> Any:
    return import_module("comparison_tables")


@pytest.fixture(scope="module")
def stored_results() -> Any:
    return import_module("stored_results")


@pytest.fixture
def results(tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the results, from which the tables are made."""
    folder = tmp_path / "results"
    shutil.copytree(tables.RESULTS, folder)
    monkeypatch.setattr(tables, "RESULTS", folder)
    return folder


def test_tables_agree_with_the_stored_results(tables: Any) -> None:
    for page in tables.PAGES:
        # After a change of bench/results: python bench/readme_table.py --write
        assert (ROOT / page).read_text("utf-8") == tables.renew(page), page


def test_a_stored_figure_is_shown_in_both_languages(tables: Any, results: Path) -> None:
    file = results / "encode-h200.json"
    result = read(file)
    result["figures"]["8192 mixed, times transformers"] = 12.345
    result["versions"]["transformers"] = "9.8.7"
    file.write_text(json.dumps(result), "utf-8")
    assert "12.35 times as fast" in tables.renew("README.md")
    assert "в 12,35 раза быстрее" in tables.renew("README.ru.md")
    assert "transformers 9.8.7, SDPA" in tables.renew("docs/comparison.md")


def test_a_missing_figure_is_named_with_its_file(tables: Any, results: Path) -> None:
    file = results / "lens-arm.json"
    result = read(file)
    del result["figures"]["MB"]
    file.write_text(json.dumps(result), "utf-8")
    with pytest.raises(SystemExit, match=r"lens-arm\.json has no figure 'MB'.*--store"):
        tables.renew("README.md")


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_result_has_machine_flags_cores_versions_and_date(file: Path) -> None:
    result = read(file)
    assert file.stem.startswith(f"{result['bench']}-")
    assert result["machine"]
    assert re.fullmatch(r"\d{4}-\d{2}(-\d{2}(/\d{4}-\d{2}-\d{2})?)?", result["date"])
    carried_over = result.get("carried_over")
    # What was published before results were stored may lack flags, cores and versions.
    assert carried_over or (isinstance(result["flags"], list) and result["cores"] >= 1)
    assert {"flags", "cores"} <= result.keys()
    assert carried_over or result["versions"]["torch"]


def test_every_row_names_a_script_that_exists(tables: Any) -> None:
    for row in tables.ROWS:
        assert (BENCH / row.script).exists()
        assert (BENCH / "results" / f"{row.file}.json") in RESULTS


def test_a_bench_stores_its_figures_with_where_and_when(
    stored_results: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored_results.store(tmp_path, "encode", "cpu", {"times": 1.5}, "torch", "no-such-package")
    [file] = tmp_path.iterdir()
    result = read(file)
    assert re.fullmatch(r"encode-[a-z0-9_]+(-avx2|-avx512)?\.json", file.name)
    assert result["bench"] == "encode"
    assert result["figures"] == {"times": 1.5}
    assert set(result["flags"]) <= set(stored_results.FLAGS)
    assert result["cores"] >= 1
    assert result["versions"].keys() == {"python", "torch"}
    assert "carried_over" not in result
    assert str(file.name) in capsys.readouterr().out.replace("\n", "")


def test_a_bench_stores_no_figure_that_is_not_finite(stored_results: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        stored_results.store(tmp_path, "encode", "cpu", {"times": float("nan")})
    assert not list(tmp_path.iterdir())


def test_without_a_folder_nothing_is_stored(stored_results: Any) -> None:
    results = {file: file.stat().st_mtime_ns for file in RESULTS}
    stored_results.store(None, "encode", "cpu", {"times": 1.5})
    assert {file: file.stat().st_mtime_ns for file in RESULTS} == results
