"""A corpus of a few words, its tokenizer, and a run small enough for a test."""

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from manyheads.data.sources.texts import TextFiles
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.train.run_file.run_config import Run, parse_run

SENTENCE = "the cat sat on a mat while one dog ran over some hill and sun was low"


def write_corpus(folder: Path, *, documents: int = 200, seed: int = 0) -> None:
    """corpus.txt with documents separated by blank lines, and tokenizer.json."""
    for name, text in corpus(documents, seed).items():
        (folder / name).write_text(text, encoding="utf-8")


@cache
def corpus(documents: int, seed: int) -> dict[str, str]:
    """The text of each file; the tokenizer is trained once per process."""
    draw = random.Random(seed)
    words = SENTENCE.split()
    texts = [" ".join(draw.choices(words, k=draw.randint(4, 30))) for _ in range(documents)]
    with TemporaryDirectory() as folder:
        source, tokenizer = Path(folder, "corpus.txt"), Path(folder, "tokenizer.json")
        source.write_text("\n\n".join(texts), encoding="utf-8")
        train_tokenizer(TextFiles(str(source)), 300, progress=False).save(str(tokenizer))
        return {each.name: each.read_text(encoding="utf-8") for each in (source, tokenizer)}


def tables(folder: Path, *, dropout: float = 0.0, **settings: Any) -> dict[str, Any]:
    """The tables of a run file; settings go to its run section."""
    return {
        "model": {
            "size": "gpt2",
            "change": {
                "layers": 2,
                "width": 16,
                "heads": 2,
                "vocabulary": 300,
                "positions": 32,
                "dropout": dropout,
            },
        },
        "data": {
            "train": str(folder / "corpus.txt"),
            "separator": "\n\n",
            "tokenizer": str(folder / "tokenizer.json"),
            "max_length": 16,
            "batch": 128,
            "micro_batch": 64,
        },
        "objective": {"kind": "CausalLM"},
        "optimizer": {"lr": 1e-2},
        "run": {
            "folder": str(folder / "out"),
            "device": "cpu",
            "steps": 8,
            "checkpoint_every": 3,
            **settings,
        },
    }


def tiny(folder: Path, **settings: Any) -> Run:
    return parse_run(tables(folder, **settings))


RUN_FILE = """
[model]
size = "gpt2"
change = { layers = 1, width = 16, heads = 2, vocabulary = 300, positions = 16, dropout = 0.0 }

[data]
train = "corpus.txt"
tokenizer = "tokenizer.json"
max_length = 16
batch = 64

[objective]
kind = "CausalLM"

[run]
folder = "out"
steps = 4
device = "cpu"
"""


def write_run_file(folder: Path) -> Path:
    """run.toml of a causal model of one layer, and all that it names."""
    write_corpus(folder, documents=40)
    (folder / "run.toml").write_text(RUN_FILE)
    return folder / "run.toml"
