"""manyheads gate: add gates to a trained model."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyheads.cli import arguments
from manyheads.cli.options import DeviceOptions
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class GateCommand:
    """Add gates to a model, train them on a text, and report what they did to its heads.

    For example: manyheads gate gpt2/ --file text.txt -o gated/ --at output --per head

    The gates start so that the model's output does not change.
    """

    model: arguments.RequiredModel
    """The folder of a decoder or a masked language model, or a model of the hub: org/name."""

    file: Annotated[Path, tyro.conf.arg(metavar="TEXTFILE")]
    """The text to train on: plain, .jsonl or .parquet."""

    out: arguments.OutFolder
    """The folder to save the gated model to."""

    at: Literal["query", "key", "value", "output", "final"] = "output"
    """What the gates act on: queries, keys, values, head outputs, or the attention output."""

    per: Literal["head", "channel"] = "head"
    """One value per head, or one per channel."""

    shared: arguments.Flag = False
    """One gate for all heads of a layer instead of one each."""

    operation: Literal["multiply", "add"] = "multiply"
    """Whether gates multiply or add."""

    activation: Literal["sigmoid", "silu"] = "sigmoid"
    """The activation of the gate."""

    layers: Annotated[tuple[int, ...], arguments.metavar("N", "(all)")] = ()
    """The layers to gate."""

    train: Literal["gates", "all"] = "gates"
    """What is trained: the gates alone, or all weights with them."""

    steps: int = 200
    """Training steps."""

    lr: float = 1e-3
    """The learning rate."""

    max_length: int = 256
    """The most tokens per chunk of text."""

    batch_tokens: int = 2048
    """Tokens per training step."""

    held_out: float = 0.1
    """The fraction of the chunks that is not trained on but measured on."""

    seed: int = 0
    """The seed of the training."""

    json: arguments.JsonFile = None
    """A JSON file to save the numbers before and after to; - prints it instead."""

    compute: DeviceOptions = DeviceOptions()

    def run(self) -> None:
        """Print the numbers before and after, and where the model is."""
        from manyheads.bridge.automatic import require_native
        from manyheads.checkpoints.folder import save
        from manyheads.data.sources.texts import TextFiles
        from manyheads.encoding.text_reader import require_text_model
        from manyheads.parts.gates import Gate
        from manyheads.surgery.gates import split_chunks, train_gates

        arguments.check_minimum("--steps", self.steps, 1)
        arguments.check_minimum("--batch-tokens", self.batch_tokens, 1)
        arguments.check_minimum("--max-length", self.max_length, 2)
        if not 0 < self.held_out <= 0.5:
            raise InputError(f"--held-out must be in (0, 0.5], got {self.held_out:g}")
        arguments.check_json(self.json)
        arguments.check_out_folder(self.out, self.model)
        model = self.compute.open(self.model)
        require_native(model, "a gate")
        gate = Gate(
            at=self.at,
            per=self.per,
            heads="shared" if self.shared else "own",
            operation=self.operation,
            activation=self.activation,
        )
        texts = (passage.text for passage in TextFiles(str(self.file)).read())
        max_chunks = 2 * self.steps * max(1, self.batch_tokens // self.max_length)
        training, held_out = split_chunks(
            require_text_model(model).tokenizer, texts, self.max_length, max_chunks, self.held_out
        )
        done = train_gates(
            model,
            gate,
            training,
            held_out,
            layers=self.layers or "all",
            train=self.train,
            steps=self.steps,
            lr=self.lr,
            batch_tokens=self.batch_tokens,
            seed=self.seed,
        )
        saved = save(done.model, self.out)
        print(done)
        print(saved)
        if self.json is not None:
            counts = {"texts": done.texts, "trained": done.trained}
            numbers = {"before": asdict(done.before), "after": asdict(done.after)}
            arguments.write_json(self.json, numbers | counts)
            print(f"saved the numbers to {self.json}")
