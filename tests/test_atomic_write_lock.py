"""What one holds, another waits for."""

import threading
from pathlib import Path
from queue import Queue

import pytest

from manyheads.atomic_write import exclusive_lock

pytest.importorskip("fcntl")


def _never() -> None:
    raise AssertionError("nobody else is here")


def test_the_second_gets_a_message_and_waits_for_the_first(tmp_path: Path) -> None:
    file, said = tmp_path / "lock", Queue[str]()

    def second() -> None:
        with exclusive_lock(file, lambda: said.put("on_busy")):
            said.put("mine")

    other = threading.Thread(target=second)
    with exclusive_lock(file, _never):
        other.start()
        assert said.get(timeout=60) == "on_busy"
        other.join(0.2)
        assert said.empty()
    assert said.get(timeout=60) == "mine"
    other.join()


def test_a_refusal_is_raised_and_the_file_is_free_afterwards(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with exclusive_lock(file, _never), pytest.raises(AssertionError), exclusive_lock(file, _never):
        pass
    with exclusive_lock(file, _never):
        pass
