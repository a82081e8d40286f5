import numpy as np

from manyheads.report.data import suggest_commands
from tests.report.small import with_importance


def test_idle_heads_are_to_be_pruned_and_the_studio_comes_last() -> None:
    idle = with_importance(change=np.array([0.5, 0.0, 0.0, 0.2]))
    advice = suggest_commands(idle, model_path="it", text_file="a b.txt")
    assert advice[0].command.startswith("manyheads prune it --file 'a b.txt'")
    assert "2 of 4 heads" in advice[0].why
    assert advice[-1].command == "manyheads studio it"


def test_needed_heads_are_left_alone() -> None:
    needed = with_importance(change=np.full(4, 0.5))
    commands = [each.command for each in suggest_commands(needed, model_path="it", text_file="t")]
    assert not any("--loss-budget" in each for each in commands)
