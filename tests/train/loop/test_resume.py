"""A killed run that is started again is the run that was never killed."""

import signal
from typing import Any

import pytest

from tests.train.killed_runs import kill_runs


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return kill_runs(tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize(
    "when",
    [
        "before the first step",
        "before any checkpoint",
        "just after a checkpoint",
        "before the last step",
        "with half a shard",
        "before its name",
        "within its manifest",
        "while a damaged one is replaced",
        "while old ones go",
    ],
)
def test_resumed_after_a_kill_it_is_bitwise_the_same(killed: dict[str, Any], when: str) -> None:
    assert killed[when]["codes"] == [-signal.SIGKILL, 0]
    assert killed[when]["losses"] == killed["whole"]["losses"]
    assert len(killed[when]["losses"]) == 8
    assert killed[when]["same"], "the weights differ"
