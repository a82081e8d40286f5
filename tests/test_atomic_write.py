"""A file that was there stays as it was until the new one is whole."""

import stat
from pathlib import Path

import pytest

from manyheads.atomic_write import atomic_write, check_writable
from manyheads.errors import InputError


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text("old")

    def write() -> None:
        with atomic_write(file) as beside:
            beside.write_text("ne")
            assert file.read_text() == "old"
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write()
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"numbers.txt": "old"}


def test_the_new_file_takes_its_place_and_others_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "folder/numbers.txt"
    with atomic_write(file) as beside:
        beside.write_text("new")
    assert [each.name for each in file.parent.iterdir()] == ["numbers.txt"]
    plain = tmp_path / "plain.txt"
    plain.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_place_that_cannot_be_written_is_refused_and_another_left_as_it_was(
    tmp_path: Path,
) -> None:
    check_writable(tmp_path / "new" / "numbers.json")
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match=f"{file} is not writable .*: choose another folder"):
        check_writable(file / "numbers.json")
