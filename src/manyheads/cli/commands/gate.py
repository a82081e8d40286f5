"""manyheads gate: a trained model to one with gates."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyheads.cli.arguments import (
    DeviceName,
    Flag,
    JsonFile,
    OutFolder,
    check_folder,
    check_json,
    open_model,
    write_json,
)
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class GateCommand:
    """Add gates to a model, train them on a text, and report what they did to its heads.

    For example: manyheads gate gpt2/ --file text.txt -o gated/ --at output --per head

    The gates start so that the model's output does not change.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a decoder or a masked language model, or a name on the hub."""

    file: Annotated[Path, tyro.conf.arg(metavar="TEXTFILE")]
    """The text to train on: plain, .jsonl or .parquet."""

    out: OutFolder
    """The folder to save the gated model to."""

    at: Literal["query", "key", "value", "output", "final"] = "output"
    """Where the gates are."""

    per: Literal["head", "channel"] = "head"
    """One value per head, or one per channel."""

    shared: Flag = False
    """One gate for all heads of a layer instead of one each."""

    how: Literal["times", "plus"] = "times"
    """Whether it multiplies or adds."""

    activation: Literal["sigmoid", "silu"] = "sigmoid"
    """The activation of the gate."""

    layers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N", help_behavior_hint="(all)")] = ()
    """The layers to gate."""

    train: Literal["gates", "all"] = "gates"
    """What is trained: the gates alone, or all weights with them."""

    steps: int = 200
    """Training steps."""

    rate: float = 1e-3
    """The learning rate."""

    length: int = 256
    """Tokens per chunk of text."""

    batch: int = 2048
    """Tokens per step."""

    held_out: float = 0.1
    """The fraction of the chunks to measure on."""

    seed: int = 0
    """Seed of the training."""

    json: JsonFile = None
    """Write the figures before and after to this JSON file."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    def run(self) -> int:
        """Print the figures before and after, and where the model is."""
        from manyheads.checkpoints.folder import save
        from manyheads.data.sources.texts import TextFiles
        from manyheads.encoding.text_reader import require_text_model
        from manyheads.parts.gates import Gate
        from manyheads.surgery.gates import split_chunks, train_gates

        self._check()
        check_json(self.json)
        check_folder(self.out, self.model)
        model = open_model(self.model, self.device)
        gate = Gate(
            at=self.at,
            per=self.per,
            heads="shared" if self.shared else "own",
            how=self.how,
            activation=self.activation,
        )
        read = (passage.text for passage in TextFiles(str(self.file)).read())
        most = 2 * max(1, self.steps) * max(1, self.batch // self.length)
        training, held = split_chunks(
            require_text_model(model).tokenizer, read, self.length, most, self.held_out
        )
        done = train_gates(
            model,
            gate,
            training,
            held,
            layers=self.layers or "all",
            train=self.train,
            steps=self.steps,
            rate=self.rate,
            batch_tokens=self.batch,
            seed=self.seed,
        )
        saved = save(done.model, self.out)
        print(done)
        print(saved)
        if self.json is not None:
            told = {"before": asdict(done.before), "after": asdict(done.after)}
            write_json(self.json, {**told, "texts": done.texts, "trained": done.trained})
            print(f"the figures are in {self.json}")
        return 0

    def _check(self) -> None:
        """Refuse wrong numbers before anything is read."""
        for flag, number, least in (
            ("--steps", self.steps, 1),
            ("--batch", self.batch, 1),
            ("--length", self.length, 2),
        ):
            if number < least:
                raise InputError(
                    f"{flag} must be at least {least}, got {number}", f"use {least} or more"
                )
        if not 0 < self.held_out <= 0.5:
            raise InputError(
                f"--held-out must be in (0, 0.5], got {self.held_out:g}",
                "use a fraction such as 0.1",
            )
