"""manyheads encode: one vector per text, or the activations of its tokens."""

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from manyheads.cli import arguments, inputs
from manyheads.cli.options import EngineOptions, PlainTextOptions
from manyheads.errors import InputError
from manyheads.formatting import pluralise


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn texts into vectors, one vector per text, or write the activations of all tokens.

    For example: manyheads encode minilm/ --file sentences.txt -o vectors.npy
    or manyheads encode gpt2/ --file texts.txt --site L3.after -o activations/
    """

    model: arguments.RequiredModel
    """The folder of a model with a tokenizer, or a model of the hub: org/name."""

    ids: arguments.ManyIds = ()
    """Token ids to encode instead of a text; a model without a tokenizer needs them."""

    out: arguments.OutFile = None
    """The file to write the vectors to: .npy, .safetensors or .jsonl; with --site a folder."""

    site: Annotated[arguments.Strings, arguments.repeatable("SITE")] = ()
    """Write the activations of every token at a site: L3.before, L3.after, L3.z, L3H5, ..."""

    parquet: arguments.Flag = False
    """With --site, write Parquet instead of safetensors."""

    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        arguments.metavar("{mean,cls,last}", "(default: the model's own)"),
    ] = None
    """The mean of a text's tokens, the first or the last."""

    normalize: arguments.Flag = False
    """Scale vectors to length 1, whatever the model's own setting."""

    no_normalize: arguments.Flag = False
    """Do not scale vectors, whatever the model's own setting."""

    input: PlainTextOptions = PlainTextOptions()
    compute: EngineOptions = EngineOptions()

    def run(self) -> None:
        """Print how many texts were encoded, how fast, and where the vectors are."""
        if self.out is None:
            raise InputError("manyheads encode needs --out FILE", "add --out vectors.npy")
        flags = "--text, --file or --ids"
        arguments.check_one_of("encode", flags, self.input.text, self.input.file, self.ids)
        self.compute.check()
        if self.site and self.compute.ray:
            raise InputError("--engine ray does not write activations", "leave out --site or it")
        if self.site:
            self._write_activations()
            return
        if self.parquet:
            raise InputError("--parquet is for activations", "add --site L3.after, or leave it out")
        from manyheads.encoding.encode import Options, check_target, encode_with_counts, store

        check_target(self.out)
        if self.normalize and self.no_normalize:
            raise InputError("--normalize and --no-normalize exclude each other", "give one")
        options = Options(
            pooling=self.pooling,
            normalize=self.normalize if self.normalize or self.no_normalize else None,
            batch_tokens=self.compute.batch_tokens,
        )
        texts = self._texts()
        model = self.compute.open_for_engine(self.model)
        started = time.perf_counter()
        if self.compute.ray:
            from manyheads.tasks.filtering.ray_engine import encode_on_workers

            workers, device = self.compute.workers, self.compute.device
            done = encode_on_workers(model, texts, options, workers, device)
        else:
            done = encode_with_counts(model, texts, options)
        seconds = time.perf_counter() - started
        store(done.vectors, texts, self.out)
        if done.truncated:
            print(done.truncation, file=sys.stderr)
        print(
            f"{pluralise(len(texts), 'text')}, {done.tokens:,} tokens in {seconds:.1f} s "
            f"({done.tokens / seconds:,.0f} tokens/s): "
            f"vectors of {done.vectors.shape[1]} to {self.out}"
        )

    def _texts(self) -> list[Any]:
        return inputs.read_ids(self.ids) if self.ids else self.input.texts()

    def _write_activations(self) -> None:
        from manyheads import lens

        if self.pooling is not None or self.normalize or self.no_normalize:
            raise InputError(
                "--pooling and --normalize make one vector per text, and --site one per token",
                "leave out one of them",
            )
        assert self.out is not None
        files = lens.activations(
            self.compute.open(self.model),
            self._texts(),
            list(self.site),
            self.out,
            format="parquet" if self.parquet else "safetensors",
            batch_tokens=self.compute.batch_tokens,
        )
        print(files)
