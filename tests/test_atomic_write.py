"""A file or folder that was there stays as it was until the new one is whole."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manyheads import atomic_write as module
from manyheads.atomic_write import (
    atomic_folder,
    atomic_write,
    check_writable,
    exchange,
    recover_folder,
)
from manyheads.errors import InputError
from tests.messages import refuses

EXCHANGES = pytest.mark.skipif(sys.platform != "linux", reason="other systems may not exchange")
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")


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


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("old")
    (tmp_path / "link").symlink_to("numbers.txt")
    with atomic_write(tmp_path / "link") as beside:
        beside.write_text("new")
    assert (tmp_path / "link").readlink() == Path("numbers.txt")
    assert (tmp_path / "numbers.txt").read_text() == "new"


def test_a_place_that_cannot_be_written_is_refused_and_another_left_as_it_was(
    tmp_path: Path,
) -> None:
    check_writable(tmp_path / "new" / "numbers.json")
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match=f"{file} is not writable .*: choose another folder"):
        check_writable(file / "numbers.json")


def fill(folder: Path, text: str) -> None:
    with atomic_folder(folder) as fresh:
        for name in ("config.json", "model.safetensors"):
            (fresh / name).unlink(missing_ok=True)
            (fresh / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in folder.iterdir()}


def complete(text: str) -> dict[str, str]:
    return dict.fromkeys(("config.json", "model.safetensors"), text)


@contextmanager
def without_exchange() -> Iterator[None]:
    """As on a system or file system that cannot exchange two names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "exchange", lambda *_: False)
        yield


@EXCHANGES
def test_two_folders_exchange_their_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fill(tmp_path / name, name)
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert (content(tmp_path / "a"), content(tmp_path / "b")) == (complete("b"), complete("a"))


@EXCHANGES
def test_a_reader_always_finds_a_folder(tmp_path: Path) -> None:
    folder, missing, done = tmp_path / "model", list[str](), threading.Event()
    fill(folder, "0")

    def read() -> None:
        while not done.is_set():
            try:
                (folder / "config.json").read_text()
            except OSError as error:
                missing.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(80):
        fill(folder, str(number))
    done.set()
    reader.join()
    assert not missing
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def killed_at(event: int, folder: Path, *, exchanged: bool) -> bool:
    """Whether a process that saves is killed before it has touched files so many times."""
    child = os.fork()
    if child == 0:
        left = [event]

        def count(name: str, arguments: tuple[object, ...]) -> None:
            touched = any(str(folder.parent) in str(each) for each in arguments)
            if touched and name.startswith(("open", "os.", "shutil.")):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            if not exchanged:
                module.exchange = lambda *_: False
            sys.addaudithook(count)
            fill(folder, "new")
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@FORKS
@pytest.mark.parametrize("exchanged", [pytest.param(True, marks=EXCHANGES), False])
def test_a_kill_at_any_moment_loses_nothing_and_leaves_nothing(
    tmp_path: Path, exchanged: bool
) -> None:
    folder, event, killed, result = tmp_path / "model", 0, True, set[str]()
    while killed:
        fill(folder, "old")
        killed = killed_at(event, folder, exchanged=exchanged)
        if exchanged:
            assert folder.is_dir()
        recover_folder(folder)
        text = (folder / "config.json").read_text()
        assert content(folder) == complete(text)
        result.add(text)
        event += 1
    assert result == {"old", "new"}
    assert event > 15
    fill(folder, "last")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    assert content(folder) == complete("last")


@FORKS
def test_the_next_save_removes_what_a_kill_left_of_its_own_folder_only(tmp_path: Path) -> None:
    for name in ("model", "model.2", "mod[e]l"):
        fill(tmp_path / name, "old")
        assert killed_at(12, tmp_path / name, exchanged=False)
    assert len(list(tmp_path.glob(".*.part"))) == 3
    for left, name in ((2, "model"), (1, "mod[e]l"), (0, "model.2")):
        fill(tmp_path / name, "new")
        assert len(list(tmp_path.glob(".*.part"))) == left
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mod[e]l", "model", "model.2"]


@pytest.mark.parametrize("exchanged", [pytest.param(True, marks=EXCHANGES), False])
def test_writers_of_one_folder_take_turns(tmp_path: Path, exchanged: bool) -> None:
    pytest.importorskip("fcntl")
    folder, failed = tmp_path / "model", list[Exception]()

    def save(text: str) -> None:
        try:
            for _ in range(10):
                fill(folder, text)
        except Exception as error:
            failed.append(error)

    def run() -> None:
        writers = [threading.Thread(target=save, args=(text,)) for text in "abc"]
        for each in writers:
            each.start()
        for each in writers:
            each.join()

    if exchanged:
        run()
    else:
        with without_exchange():
            run()
    assert not failed
    assert content(folder) == complete((folder / "config.json").read_text())
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_writer_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    folder = tmp_path / "model"
    with atomic_folder(folder) as fresh:
        (fresh / "config.json").write_text("first")
        with refuses(InputError, str(folder), "wait for it"):
            fill(folder, "second")
    assert content(folder) == {"config.json": "first"}


def test_without_an_exchange_a_failure_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "model", Path.rename
    fill(folder, "old")

    def refuse_new(self: Path, target: Path) -> Path:
        if self.suffix == ".part":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with without_exchange(), pytest.raises(OSError, match="no"):
        fill(folder, "new")
    assert content(folder) == complete("old")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_links_stay_links(tmp_path: Path) -> None:
    fill(tmp_path / "target", "old")
    (tmp_path / "notes").mkdir()
    (tmp_path / "target" / "notes").symlink_to(tmp_path / "notes")
    (tmp_path / "link").symlink_to("target")
    fill(tmp_path / "link", "new")
    assert (tmp_path / "link").readlink() == Path("target")
    assert (tmp_path / "target" / "notes").readlink() == tmp_path / "notes"
    assert (tmp_path / "target" / "config.json").read_text() == "new"


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("model")
    with refuses(InputError, str(tmp_path / "model")):
        fill(tmp_path / "model", "new")


def test_without_locks_a_folder_is_restored_and_leftovers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    fill(folder, "old")
    folder.rename(tmp_path / ".model.1.old")
    (tmp_path / ".model.2.part").mkdir()
    monkeypatch.setattr(module, "_try_lock", lambda _: "unsupported")
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    recover_folder(folder)
    assert content(folder) == complete("old")
    fill(folder, "new")
    assert content(folder) == complete("new")
    assert sorted(each.name for each in tmp_path.iterdir()) == [".model.2.part", "model"]
