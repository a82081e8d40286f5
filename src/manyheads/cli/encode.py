"""manyheads encode: texts of files to vectors in a file."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from manyheads.errors import InputError

if TYPE_CHECKING:
    from manyheads.encoding.encode import Options
    from manyheads.models.build import Model

__all__ = ["Encode"]


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn texts into vectors: one text a line, one vector a text.

    For example: manyheads encode minilm/ sentences.txt --out vectors.npy
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model with a tokenizer, or a model of the hub: org/name."""

    files: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="TEXTFILE ...", help_behavior_hint=""),
    ] = ()
    """Files of texts, each line a text, empty ones too; - is what is piped in."""

    text: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT ...", help_behavior_hint="")] = ()
    """Texts given here, in place of files."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Where the vectors go: a .npy, .safetensors or .jsonl file, written whole or not at all."""

    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        tyro.conf.arg(metavar="{mean,cls,last}", help_behavior_hint="(default: as the model says)"),
    ] = None
    """The mean of a text's tokens, the first or the last."""

    normalise: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")
    ] = False
    """Bring vectors to length one, whatever the model says."""

    no_normalise: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")
    ] = False
    """Leave vectors as long as they are, whatever the model says."""

    batch_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens computed together; by default as many as suit the device."""

    dtype: Literal["as it is", "float32", "bfloat16", "float16"] = "as it is"
    """The type of the weights while encoding."""

    device: str = "auto"
    """Where to compute: cpu or cuda; auto is cuda where there is one."""

    def run(self) -> int:
        """Say how many texts went where, and how fast."""
        if self.out is None:
            raise InputError("nothing says where the vectors go", "add --out vectors.npy")
        if bool(self.files) == bool(self.text):
            raise InputError("texts come from files or from --text", "give one of both, not both")
        from manyheads.encoding.storing import check_target, store

        check_target(self.out)
        options, texts = self._options(), self._texts()
        from manyheads.encoding.encode import encode_counted

        model = self._load()
        started = time.perf_counter()
        done = encode_counted(model, texts, options)
        seconds = time.perf_counter() - started
        store(done.vectors, texts, self.out)
        if done.cut:
            print(done.told, file=sys.stderr)
        print(
            f"{len(texts):,} texts, {done.tokens:,} tokens in {seconds:.1f} s "
            f"({done.tokens / seconds:,.0f} tokens/s): "
            f"vectors of {done.vectors.shape[1]} to {self.out}"
        )
        return 0

    def _options(self) -> "Options":
        from manyheads.encoding.encode import Options

        if self.normalise and self.no_normalise:
            raise InputError("--normalise and --no-normalise contradict each other", "give one")
        return Options(
            pooling=self.pooling,
            normalise=self.normalise if self.normalise or self.no_normalise else None,
            batch_tokens=self.batch_tokens,
        )

    def _texts(self) -> list[str]:
        return list(self.text) or [line for file in self.files for line in _lines(file)]

    def _load(self) -> "Model":
        import torch

        from manyheads.checkpoints.folder import load

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"--device {device}: torch finds no CUDA device here", "use cpu")
        kind = None if self.dtype == "as it is" else getattr(torch, self.dtype)
        return load(self.model, dtype=kind, device=device)


def _lines(name: str) -> list[str]:
    """Lines end where a line feed or a carriage return says so, and nowhere else."""
    try:
        if name == "-":
            return _without_ends(sys.stdin)
        with Path(name).open(encoding="utf-8") as file:
            return _without_ends(file)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8: {error.reason} at byte {error.start}", "convert it first"
        ) from None


def _without_ends(lines: Iterable[str]) -> list[str]:
    return [line.removesuffix("\n") for line in lines]
