"""manyheads gate: a trained model to one with gates."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyheads.cli.asked import (
    DeviceName,
    Flag,
    JsonFile,
    OutFolder,
    check_folder,
    check_json,
    open_model,
    write_json,
)

__all__ = ["GateCommand"]


@dataclass(frozen=True, slots=True)
class GateCommand:
    """Add gates to a model, teach them on a text, and tell what they did to its heads.

    For example: manyheads gate gpt2/ --file text.txt -o gated/ --at output --per head

    The gates start so that the model answers as before.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model that writes or fills in masked words, or a name on the hub."""

    file: Annotated[Path, tyro.conf.arg(metavar="TEXTFILE")]
    """The text to learn from: plain, .jsonl or .parquet."""

    out: OutFolder
    """The folder to save the gated model to."""

    at: Literal["query", "key", "value", "output", "final"] = "output"
    """Where the gates stand."""

    per: Literal["head", "channel"] = "head"
    """One number a head, or one a channel."""

    shared: Flag = False
    """One gate for all heads of a layer, in place of one each."""

    how: Literal["times", "plus"] = "times"
    """Whether it scales or shifts."""

    activation: Literal["sigmoid", "silu"] = "sigmoid"
    """What makes a gate of a number."""

    layers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N", help_behavior_hint="(all)")] = ()
    """The layers to gate."""

    learn: Literal["gates", "all"] = "gates"
    """What learns: the gates alone, or all weights with them."""

    steps: int = 200
    """How many steps to learn."""

    rate: float = 1e-3
    """The learning rate."""

    length: int = 256
    """Tokens of a piece of text."""

    batch: int = 2048
    """Tokens of a step."""

    held_out: float = 0.1
    """The share of the pieces to measure on."""

    seed: int = 0
    """The same numbers every time."""

    json: JsonFile = None
    """Where the figures before and after go as JSON, whole or not at all."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    def run(self) -> int:
        """Print the figures before and after, and where the model is."""
        from manyheads.checkpoints.folder import save
        from manyheads.data.sources.texts import TextFiles
        from manyheads.encoding.reading import reads_texts
        from manyheads.parts.gates import Gate
        from manyheads.surgery.gating import pieces, teach_gates

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
        learnt, held = pieces(reads_texts(model).tokenizer, read, self.length, most, self.held_out)
        done = teach_gates(
            model,
            gate,
            learnt,
            held,
            layers=self.layers or "all",
            learn=self.learn,
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
            write_json(self.json, {**told, "texts": done.texts, "learnt": done.learnt})
            print(f"the figures are in {self.json}")
        return 0
