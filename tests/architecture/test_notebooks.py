"""Every notebook of the docs runs from its first cell to its last."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.house import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def read_cells(file: Path) -> list[dict[str, Any]]:
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content["cells"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_every_cell_runs_and_shows_what_is_stored(file: Path) -> None:
    """The result of the last line is displayed as it was when the notebook was stored."""
    names: dict[str, Any] = {}
    for cell in read_cells(file):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(file), "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(file), "eval"), names)
            stored = [each["data"] for each in cell["outputs"] if "data" in each]
            assert bool(stored) == (value is not None)
            for data in stored:
                assert ("text/html" in data) == hasattr(value, "_repr_html_")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_with_its_outputs_is_small(file: Path) -> None:
    assert file.stat().st_size < 400_000


def test_the_docs_have_three() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["find-and-prune", "first-look", "your-own-model"]
