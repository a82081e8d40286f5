"""manyheads encode: texts of files to vectors in a file."""

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from manyheads.cli.arguments import (
    DeviceName,
    DtypeName,
    Flag,
    LineFiles,
    OutFile,
    Texts,
    lines_of,
    open_model,
)
from manyheads.errors import InputError
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    from manyheads.encoding.encode import Options


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn texts into vectors: one text a line, one vector a text.

    For example: manyheads encode minilm/ --file sentences.txt -o vectors.npy
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model with a tokenizer, or a model of the hub: org/name."""

    text: Texts = ()
    """A text to encode; given several times, each is one."""

    file: LineFiles = ()
    """Texts to encode, each line one, empty ones too; - is what is piped in."""

    out: OutFile = None
    """Where the vectors go: a .npy, .safetensors or .jsonl file, written whole or not at all."""

    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        tyro.conf.arg(metavar="{mean,cls,last}", help_behavior_hint="(default: as the model says)"),
    ] = None
    """The mean of a text's tokens, the first or the last."""

    normalise: Flag = False
    """Bring vectors to length one, whatever the model says."""

    no_normalise: Flag = False
    """Leave vectors as long as they are, whatever the model says."""

    batch_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens computed together; by default as many as suit the device."""

    dtype: DtypeName = "as it is"
    """The type of the weights while encoding."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    def run(self) -> int:
        """Say how many texts went where, and how fast."""
        if self.out is None:
            raise InputError("nothing says where the vectors go", "add --out vectors.npy")
        if bool(self.file) == bool(self.text):
            raise InputError("texts come from --text or from --file", "give one of both")
        from manyheads.encoding.encode import check_target, store

        check_target(self.out)
        options, texts = self._options(), self._texts()
        from manyheads.encoding.encode import encode_counted

        model = open_model(self.model, self.device, self.dtype)
        started = time.perf_counter()
        done = encode_counted(model, texts, options)
        seconds = time.perf_counter() - started
        store(done.vectors, texts, self.out)
        if done.cut:
            print(done.told, file=sys.stderr)
        print(
            f"{pluralise(len(texts), 'text')}, {done.tokens:,} tokens in {seconds:.1f} s "
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
        return list(self.text) or [line for file in self.file for line in lines_of(file)]
