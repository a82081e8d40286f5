"""The figures that go to JSON are those that the page and `manyheads inspect` tell."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from manyheads.lens import inspect
from manyheads.report.figures import figures_of
from manyheads.report.measures import measures_of
from manyheads.taps import Head
from tests.report.small import decoder, findings

HEADS = (Head(0, 0), Head(0, 1), Head(1, 0), Head(1, 1))


def test_every_measure_of_the_page_is_in_every_row() -> None:
    found = findings()
    rows = figures_of(found)["rows"]
    assert tuple(Head(row["layer"], row["head"]) for row in rows) == HEADS
    for measure in measures_of(found):
        mine = [np.nan if row[measure.name] is None else row[measure.name] for row in rows]
        assert mine == pytest.approx(measure.values.tolist(), nan_ok=True)


def test_what_inspect_tells_as_well_has_the_same_name_and_value(tmp_path: Path) -> None:
    found = findings()
    told = figures_of(found)
    path = tmp_path / "inspection.json"
    inspect(decoder(), list(found.reading.measured), sequences=2, progress=False).save(path)
    theirs = json.loads(path.read_text("utf-8"))
    names = [name for name in told["rows"][0] if f"statistics/means/{name}" in theirs["arrays"]]
    assert {"entropy", "first_token", "induction", "output_share"} <= set(names)
    for name in names:
        mine = [row[name] for row in told["rows"]]
        for one, other in zip(mine, theirs["arrays"][f"statistics/means/{name}"], strict=True):
            assert one == (None if other is None else pytest.approx(other, rel=1e-4, abs=1e-7))
    assert told["statistics"].keys() == theirs["fields"]["statistics"]["facts"].keys()
    labels = [label for some in theirs["fields"]["kinds"]["labels"].values() for label in some]
    assert {*labels[0]} == {*next(row for row in told["rows"] if row["kinds"])["kinds"][0]}


def test_the_dead_the_doubled_and_the_harmful_are_told() -> None:
    found = findings()
    assert found.worth is not None
    worth = replace(found.worth, loses=np.array([0.5, -0.4, 0.1, 0.1]), errors=np.full(4, 0.1))
    # All heads are more alike than not at all.
    alike = replace(found.alike, double_above=-1.0)
    rows = figures_of(replace(found, worth=worth, alike=alike))["rows"]
    assert [row["harmful"] for row in rows] == [False, True, False, False]
    assert sorted(rows[1]["doubles"]) == ["L0H0", "L1H0", "L1H1"]
    assert [row["dead"] for row in rows] == [list(found.dead.why(each)) for each in HEADS]


def test_what_was_not_measured_is_null_and_all_of_it_is_json() -> None:
    told = figures_of(replace(findings(), worth=None))
    assert told["worth"] is None
    assert "worth" not in told["rows"][0]
    json.dumps(told, allow_nan=False)
