"""Writing a store: killed anywhere it goes on, and ends as if it had never been killed."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyheads.atomic_write import exclusive_lock
from manyheads.data import tokenize
from manyheads.data.sources.texts import InMemoryTexts, TextFiles
from manyheads.data.store import TokenStore, open_store
from manyheads.data.tokenize import write_store
from manyheads.errors import InputError
from tests.architecture.house import ROOT
from tests.data.tiny import TEXTS, tokenizer
from tests.messages import refuses

BYTES = tokenizer()
FILES = ("tokens.bin", "documents.bin", "passages.bin", "index.json")

# Each line that it reads says what to write. It writes that in one process after another, each a
# copy of itself, because it has imported everything already. A copy kills itself at the n-th time
# that it touches the disk: before a part is safe there, after that, with half of it written, or
# before the index is moved to its place.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from tokenizers import Tokenizer
from manyheads.data.sources import texts
from manyheads.data import tokenize

texts.PASSAGE = 100


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def counted(function):
    def call(*arguments):
        global left
        left -= 1
        if left < 0:
            if how == "after":
                function(*arguments)
            elif how == "half" and isinstance(arguments[0], int):
                size = os.fstat(arguments[0]).st_size
                os.ftruncate(arguments[0], size - size // 3)
            die()
        return function(*arguments)
    return call


def write(corpus, folder):
    os.fsync = counted(os.fsync)
    Path.replace = counted(Path.replace)
    tokenizer = Tokenizer.from_file(corpus + "/tokenizer.json")
    tokenize.write_store(texts.TextFiles(corpus + "/*.txt"), tokenizer, folder, part_size=700)


for line in sys.stdin:
    corpus, folder, how, kills = json.loads(line)
    codes = []
    for left in kills:
        child = os.fork()
        if not child:
            try:
                write(corpus, folder)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(codes), flush=True)
"""

# The exit codes of processes that write a store, each killed when it touched the disk.
Write = Callable[..., list[int]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text * 4)
    BYTES.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def write(corpus: Path) -> Iterator[Write]:
    """A function that writes the corpus to a folder in processes that are killed.

    All are copies of one process: to import what they need takes longer than to write.
    """
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=ROOT / "src",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        request, answers = process.stdin, process.stdout

        def exit_codes(folder: Path, *kills: int, how: str = "before") -> list[int]:
            print(json.dumps([str(corpus), str(folder), how, kills]), file=request, flush=True)
            codes: list[int] = json.loads(answers.readline())
            return codes

        yield exit_codes
        request.close()
        assert process.wait() == 0


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def untouched(write: Write, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("store") / "untouched"
    assert write(folder, 10**9) == [0]
    return files(folder)


@pytest.mark.parametrize(
    ("how", "kills"),
    [("before", [0, 7, 1]), ("after", [3, 6, 4]), ("half", [12, 2]), ("before", [2, 3, 4, 5])],
)
def test_killed_and_taken_up_again_it_ends_bit_for_bit_the_same(
    how: str, kills: list[int], write: Write, untouched: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    codes = write(folder, *kills, 10**9, how=how)
    assert codes == [*[-signal.SIGKILL] * len(kills), 0]
    assert files(folder) == untouched
    parts = json.loads(untouched["index.json"])["parts"]
    assert len(parts) > 4


def test_killed_at_the_very_end_it_adds_nothing(
    write: Write, untouched: dict[str, bytes], tmp_path: Path
) -> None:
    parts = len(json.loads(untouched["index.json"])["parts"])
    # The index is brought to the disk and moved, at first, with each part of three files, at last.
    touches = 2 + 5 * parts + 2
    codes = write(tmp_path / "store", touches - 1, 0, 2)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert files(tmp_path / "store") == untouched


def test_parts_that_are_finished_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(TEXTS[5])
    source = TextFiles(str(tmp_path / "*.txt"))
    read: list[Path] = []
    kept = TextFiles._texts

    def watched(self: TextFiles, file: Path) -> object:
        read.append(file)
        if len(read) == 4:
            raise KeyboardInterrupt
        return kept(self, file)

    monkeypatch.setattr(TextFiles, "_texts", watched)
    with pytest.raises(KeyboardInterrupt):
        write_store(source, BYTES, tmp_path / "s", part_size=1)
    store = write_store(source, BYTES, tmp_path / "s", part_size=1)
    # What was broken off is the fourth; the third is opened to see that it has no more.
    assert [int(file.stem) for file in read] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert len(store) == 6


def test_what_is_finished_is_only_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_store(InMemoryTexts(TEXTS), BYTES, tmp_path / "s")
    monkeypatch.setattr(tokenize, "_write", None)
    again = write_store(InMemoryTexts(TEXTS), BYTES, tmp_path / "s")
    assert isinstance(again, TokenStore)
    assert again.index == first.index


def test_a_store_of_something_else_is_left_alone(tmp_path: Path) -> None:
    folder, corpus = tmp_path / "s", tmp_path / "a.txt"
    corpus.write_text("words")
    source = TextFiles(corpus)
    write_store(source, BYTES, folder)
    with refuses(
        InputError,
        f"{folder} was made with another tokenizer: remove it, or use another folder.",
    ):
        write_store(source, tokenizer(size=270), folder)
    with refuses(
        InputError,
        f"{folder} was made with another end token: remove it, or use another folder.",
    ):
        write_store(source, BYTES, folder, end=None)
    with refuses(
        InputError,
        f"{folder} was made from other texts (separator was None and is ';'): "
        "remove it, or use another folder.",
    ):
        write_store(TextFiles(corpus, separator=";"), BYTES, folder)
    corpus.write_text("swords"[:5])
    with refuses(
        InputError,
        f"{folder} was made from other texts ({corpus} was not there or has changed): "
        "remove it, or use another folder.",
    ):
        write_store(source, BYTES, folder)
    other = tmp_path / "home"
    other.mkdir()
    (other / "letters.txt").write_text("dear")
    with refuses(InputError, f"{other} has letters.txt and no index.json: use an empty folder."):
        write_store(source, BYTES, other)


def test_a_disk_too_small_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    with pytest.raises(
        InputError, match=r"will need about .* GB, and 1e-08 GB are free: free some space"
    ):
        write_store(InMemoryTexts(TEXTS), BYTES, tmp_path / "s")
    assert (tmp_path / "s" / "tokens.bin").stat().st_size == 0


def test_two_writers_take_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    waits, tell = threading.Event(), tokenize._report_waiting

    def note(folder: Path) -> None:
        tell(folder)
        waits.set()

    monkeypatch.setattr(tokenize, "_report_waiting", note)
    with exclusive_lock(tmp_path / "lock", lambda: None):
        other = threading.Thread(target=write_store, args=(InMemoryTexts(TEXTS), BYTES, tmp_path))
        other.start()
        assert waits.wait(60)
        said = f"waiting for another process that is writing {tmp_path}\n"
        assert capsys.readouterr().err == said
        assert not (tmp_path / "index.json").exists()
    other.join(60)
    assert open_store(tmp_path, BYTES).size > 0


def test_an_end_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    with refuses(
        InputError,
        "the tokenizer has no token '<stop>': set end to its end-of-sequence token, or to None.",
    ):
        write_store(InMemoryTexts(TEXTS), BYTES, tmp_path / "s", end="<stop>")
