from dataclasses import replace

import numpy as np

from manyheads.report.advice import advise
from tests.report.small import findings


def test_idle_heads_are_to_be_pruned_and_the_studio_comes_last() -> None:
    found = findings()
    assert found.worth is not None
    idle = replace(found, worth=replace(found.worth, loses=np.array([0.5, 0.0, 0.0, 0.2])))
    given = advise(idle, where="it", file="a b.txt")
    assert given[0].command.startswith("manyheads prune it --file 'a b.txt'")
    assert "2 of 4 heads" in given[0].why
    assert given[-1].command == "manyheads studio it"


def test_needed_heads_are_left_alone() -> None:
    found = findings()
    assert found.worth is not None
    needed = replace(found, worth=replace(found.worth, loses=np.full(4, 0.5)))
    assert not any("--loss-budget" in each.command for each in advise(needed, where="it", file="t"))
