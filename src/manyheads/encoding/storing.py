"""Vectors to a file: written beside it under another name, then moved, so never found in part."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.whole import whole, write_tensors

__all__ = ["check_place", "check_target", "store"]


def store(vectors: Float[Tensor, "b c"], texts: Sequence[str], target: Path) -> None:
    """The rows of a .npy array, the tensor "vectors" of a .safetensors, a line a text of .jsonl."""
    check_target(target)
    write = partial(WRITERS[target.suffix], vectors.detach().cpu(), texts)
    with whole(target) as beside:
        write(beside)


def check_target(target: Path) -> None:
    """Refuse, before any work is done, a place that could not be written to."""
    if target.suffix not in WRITERS:
        raise InputError(f"{target} does not end as a file of vectors", f"use {', '.join(WRITERS)}")
    check_place(target)


def check_place(target: Path) -> None:
    """The same of a file that may end anyhow."""
    if target.is_dir():
        raise InputError(f"{target} is a folder", "name a file in it")
    if not target.absolute().parent.is_dir():
        raise InputError(f"there is no folder {target.parent}", "make it, or name another")


def _write_npy(vectors: Tensor, texts: Sequence[str], file: Path) -> None:  # noqa: ARG001
    with file.open("wb") as opened:
        np.save(opened, vectors.numpy())


def _write_safetensors(vectors: Tensor, texts: Sequence[str], file: Path) -> None:  # noqa: ARG001
    write_tensors({"vectors": vectors.contiguous()}, file)


def _write_jsonl(vectors: Tensor, texts: Sequence[str], file: Path) -> None:
    with file.open("w", encoding="utf-8") as opened:
        for text, vector in zip(texts, vectors, strict=True):
            row = {"text": text, "vector": vector.tolist()}
            opened.write(json.dumps(row, ensure_ascii=False) + "\n")


WRITERS: dict[str, Callable[[Tensor, Sequence[str], Path], None]] = {
    ".npy": _write_npy,
    ".safetensors": _write_safetensors,
    ".jsonl": _write_jsonl,
}
