"""Attacks on runs: damage in every file of a run folder, mutated run files, kills at any moment.

A run that is taken up again must end with the weights of one that nothing happened to, or be
refused. A kill is a copy of the run folder at the moment of a file operation: what SIGKILL leaves.
"""

import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from random import Random
from threading import RLock
from typing import Any

from manyheads.train.loop.manifest import MANIFEST
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import read_run
from tests.train.tiny import write_corpus

STEPS = 5
# The run that is attacked was stopped here; it has checkpoints of steps 1 to 3.
STOPPED = 3
RUN_FILE = """
[model]
size = "gpt2"
change = { layers = 1, width = 8, heads = 2, vocabulary = 300, positions = 16, dropout = 0.1 }

[data]
train = "corpus.txt"
validation = 0.2
tokenizer = "tokenizer.json"
separator = "\\n\\n"
max_length = 16
batch = 32

[objective]
kind = "CausalLM"
z_loss = 0.001

[optimizer]
lr = 0.01

[schedule]
kind = "Cosine"
warmup = 1

[run]
folder = "out"
steps = 5
device = "cpu"
keep = 9
checkpoint_every = 1
validate_every = 2
telemetry_every = 2
"""


@cache
def home() -> Path:
    """A folder with the corpus, the run `out` stopped at step 3, and `whole`, which is complete."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-training-"))
    write_corpus(place, documents=30)
    (place / "run.toml").write_text(RUN_FILE)
    with inside(place):
        start(place / "run.toml", "run.folder=whole")
        shutil.copytree(place / "whole", place / "out")
        for step in range(STOPPED + 1, STEPS + 1):
            shutil.rmtree(place / f"out/checkpoints/step-{step}")
        shutil.rmtree(place / "out/model")
    return place


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Paths of a run file are relative to the working folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def start(file: Path, *settings: str, resume_from: str = "") -> str:
    """Train, and give back what the run said."""
    said = StringIO()
    with redirect_stderr(said):
        train(read_run(file, settings), resume_from=resume_from, progress=False)
    return said.getvalue()


def result(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The weights, and the log without timings."""
    lines = MetricsLog(run / "metrics.jsonl").read()
    for line in lines:
        line.pop("tokens_per_second", None)
    return (run / "model/model.safetensors").read_bytes(), lines


@cache
def expected() -> tuple[bytes, list[dict[str, Any]]]:
    return result(home() / "whole")


def prepare(folder: Path) -> Path:
    """A copy of the stopped run, with links to its texts."""
    for name in ("corpus.txt", "tokenizer.json", "run.toml"):
        (folder / name).symlink_to(home() / name)
    return Path(shutil.copytree(home() / "out", folder / "out"))


def damage(random: Random, file: Path) -> None:
    """What disks and people do to a file."""
    data = bytearray(file.read_bytes())
    kind = random.choice(("flip", "flip", "flip", "cut", "zeros", "grow", "remove", "digit"))
    place = random.randrange(max(len(data), 1))
    digits = [index for index, byte in enumerate(data) if chr(byte).isdigit()]
    if kind == "remove":
        file.unlink()
        return
    if kind == "cut":
        del data[place:]
    elif kind == "grow":
        data += random.randbytes(random.randint(1, 64))
    elif kind == "digit" and digits:
        data[random.choice(digits)] = ord(random.choice("0123456789"))
    elif data and kind == "zeros":
        data[place : place + 64] = bytes(len(data[place : place + 64]))
    elif data:
        data[place] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def continues(folder: Path, *, logs: bool = True) -> str:
    """Resume the run; its weights, and its log if that was not damaged, must be as ever."""
    with inside(folder):
        start(folder / "run.toml")
    weights, lines = result(folder / "out")
    assert weights == expected()[0], "the weights differ"
    if logs:
        assert lines == expected()[1], "the log differs"
    return "equal"


def checkpoints(random: Random, folder: Path) -> str:
    """Damage in some files of checkpoints; the newest intact one is used."""
    run = prepare(folder)
    files = sorted(file for file in (run / "checkpoints").rglob("*") if file.is_file())
    for file in random.sample(files, random.choice((1, 1, 2, 4))):
        damage(random, file)
    return continues(folder)


def checkpoint_folders(random: Random, folder: Path) -> str:
    """Folders of checkpoints that are missing, empty, swapped, or files."""
    there = prepare(folder) / "checkpoints"
    for step in random.sample(range(1, STEPS + 1), random.randint(1, 3)):
        place, other = there / f"step-{step}", there / f"step-{random.randint(1, STOPPED)}"
        kind = random.choice(("remove", "empty", "part", "file", "state", "swap", "link"))
        if kind != "state":
            shutil.rmtree(place, ignore_errors=True)
        if kind == "empty":
            place.mkdir(exist_ok=True)
        elif kind == "part" and other.is_dir():
            shutil.copytree(other, there / f"step-{step}.part", dirs_exist_ok=True)
        elif kind == "file" and not place.exists():
            place.write_text("not a folder")
        elif kind == "state" and place.is_dir():
            for name in ("state.json", MANIFEST):
                (place / name).unlink(missing_ok=True)
        elif kind == "swap" and other.is_dir() and not place.exists():
            shutil.copytree(other, place)
        elif kind == "link" and not place.exists():
            place.symlink_to(folder / "nowhere")
    return continues(folder)


def token_store(random: Random, folder: Path) -> str:
    """Damage in the tokens, their tables or their index."""
    run = prepare(folder)
    files = sorted(file for file in (run / "data").rglob("*") if file.is_file())
    damage(random, random.choice(files))
    return continues(folder)


def logs(random: Random, folder: Path) -> str:
    """Damage in the logs, which the run does not depend on."""
    run = prepare(folder)
    damage(random, run / random.choice(("metrics.jsonl", "telemetry.jsonl")))
    return continues(folder, logs=False)


WRONG: tuple[Any, ...] = (
    None,
    True,
    "6",
    "",
    2.5,
    -1,
    [],
    [1],
    {},
    {"a": 1},
    [[]],
    [{"step": 1}],
    1e400,
)


def state_types(random: Random, folder: Path) -> str:
    """A value of another type in state.json of a checkpoint without checksums."""
    run = prepare(folder)
    checkpoint = run / f"checkpoints/step-{STOPPED}"
    (checkpoint / MANIFEST).unlink()
    file = checkpoint / "state.json"
    state = json.loads(file.read_text())
    table, key = random.choice(
        [(state, key) for key in state] + [(state["position"], key) for key in state["position"]]
    )
    was = table[key]
    if random.random() < 0.2:
        del table[key]
    else:
        table[key] = random.choice([each for each in WRONG if type(each) is not type(was)] + [-1])
    file.write_text(json.dumps(state))
    with inside(folder):
        start(folder / "run.toml", resume_from=checkpoint.name)
    # What does not decide how the run goes on may be left out.
    assert key in ("data_checksum", "skipped", "numbers", "kept"), f"{key}={table.get(key)!r}"
    assert result(run)[0] == expected()[0]
    return "harmless"


VALUES = ("0", "-1", "1", "2.5", "1e400", "nan", "true", '""', '"x"', "[]", "{}", "[1]", "5", "7")


def run_file(random: Random, folder: Path) -> str:
    """A run file with other values, keys and characters."""
    prepare(folder)
    (folder / "run.toml").unlink()
    lines = RUN_FILE.splitlines()
    for _ in range(random.choice((1, 1, 2))):
        number = random.randrange(len(lines))
        name, equals, _ = lines[number].partition(" = ")
        kind = random.choice(("value", "value", "key", "drop", "twice", "character"))
        if kind == "value" and equals:
            lines[number] = f"{name} = {random.choice(VALUES)}"
        elif kind == "key" and equals:
            lines[number] = lines[number].replace(name, name[::-1], 1)
        elif kind == "twice":
            lines.insert(number, random.choice(lines))
        elif kind == "character" and lines[number]:
            place = random.randrange(len(lines[number]))
            letter = chr(random.choice((0, 32, 34, 91, 0x1F600, 45, 57)))
            lines[number] = lines[number][:place] + letter + lines[number][place + 1 :]
        elif len(lines) > 1:
            del lines[number]
    (folder / "run.toml").write_text("\n".join(lines))
    with inside(folder):
        run = read_run(folder / "run.toml")
        if run.phases.step_count > 2 * STEPS or run.model != read_run(home() / "run.toml").model:
            return "harmless"
        start(folder / "run.toml", "run.folder=other", "run.device=cpu")
    tables = tomllib.loads("\n".join(lines))
    end = tables["run"].get("steps", run.phases.step_count)
    state = json.loads((folder / f"other/checkpoints/step-{end}/state.json").read_text())
    assert state["step"] == end
    if tables == tomllib.loads(RUN_FILE):
        assert result(folder / "other")[0] == expected()[0]
    return "equal"


class Photographer:
    """Copies a run folder at the nth file operation within it, as a kill then would leave it.

    Other threads wait at their next operation meanwhile.
    """

    def __init__(self) -> None:
        self.folder, self.to = "", Path()
        self.left = 0
        self.copying = False
        self.lock = RLock()
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.left or event not in EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        if not os.path.abspath(os.fspath(arguments[0])).startswith(self.folder):  # noqa: PTH100
            return
        with self.lock:
            if self.copying or not self.left:
                return
            if self.left > 1:
                self.left -= 1
                return
            self.copying = True
            # If a file went away while it was copied, the next moment is taken instead.
            self.left = 0 if self.copy() else 1
            self.copying = False

    def copy(self) -> bool:
        """Checkpoints first: a log may be ahead of them, but not behind."""
        source = Path(self.folder)
        try:
            if (source / "checkpoints").is_dir():
                shutil.copytree(source / "checkpoints", self.to / "checkpoints")
            rest = shutil.ignore_patterns("checkpoints")
            shutil.copytree(source, self.to, dirs_exist_ok=True, ignore=rest)
            return True
        except (shutil.Error, FileNotFoundError):
            shutil.rmtree(self.to, ignore_errors=True)
            return False


EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}


@cache
def photographer() -> Photographer:
    return Photographer()


def kills(random: Random, folder: Path) -> str:
    """A kill at any file operation: while tokenizing, logging, saving and removing checkpoints."""
    camera, run = photographer(), prepare(folder)
    if random.random() < 0.3:
        shutil.rmtree(run)
    settings = random.choice((("run.keep=1",), ("run.keep=2", "run.keep_every=2"), ()))
    camera.folder, camera.to = str(run), folder / "killed"
    camera.left = random.randint(1, 160)
    with inside(folder):
        try:
            start(folder / "run.toml", *settings)
        finally:
            camera.left = 0
        if not camera.to.is_dir():
            return "equal" if result(run)[0] == expected()[0] else "wrong"
        shutil.rmtree(run)
        camera.to.rename(run)
        if (run / "metrics.jsonl").exists() and random.random() < 0.3:
            with (run / "metrics.jsonl").open("a") as log:
                log.write('{"step": 4, "lo')
        start(folder / "run.toml", *settings)
    weights, lines = result(run)
    assert weights == expected()[0], "the weights differ"
    assert lines == expected()[1], "the log differs"
    return "equal"


ATTACKS: list[Callable[[Random, Path], str]] = [
    checkpoints,
    checkpoint_folders,
    token_store,
    logs,
    state_types,
    run_file,
    kills,
]
SLOW: list[Callable[[Random, Path], str]] = []
