"""manyheads prune: a model without the heads that a text does not need."""

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.errors import CutWarning, InputError

if TYPE_CHECKING:
    from manyheads.models.build import Model
    from manyheads.surgery.operation import Operation, Wish

__all__ = ["Prune"]

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
CURVE = "curve.png"


@dataclass(frozen=True, slots=True)
class Prune:
    """Take away the heads that a text does not need, and leave a smaller model.

    For example: manyheads prune gpt2/ --file book.txt --keep 0.6 -o gpt2-small/

    As many as cost no more than a budget, mended after: manyheads prune gpt2/ --file book.txt
    --loss-budget 0.01 --mend 200 -o gpt2-small/
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model with a tokenizer, or a model of the hub: org/name."""

    file: Annotated[Path, tyro.conf.arg(metavar="TEXTFILE")]
    """Texts to judge by, apart by blank lines, or one a line where there are none.

    For a model that translates, each line is a source, a tab and its target.
    """

    out: Annotated[
        Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER", help_behavior_hint="")
    ] = None
    """Where the pruned model goes, with its curve; without it nothing is written."""

    keep: Annotated[float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="")] = None
    """The share of the heads that stays, such as 0.6."""

    loss_budget: Annotated[float | None, tyro.conf.arg(metavar="NATS", help_behavior_hint="")] = (
        None
    )
    """How much the loss a token may rise; of a model of vectors, how much likeness may be lost."""

    by: Literal["ablation", "gradient", "redundancy", "random", "l0"] = "ablation"
    """What heads are ordered by."""

    iterative: Flag = False
    """Measure all that are left anew after each head."""

    mean: Flag = False
    """Let what a head says on average stay behind."""

    of: Literal["attention", "encoder", "cross"] = "attention"
    """Of an encoder-decoder: the decoder's own attention, the encoder's, or across."""

    mend: int = 0
    """Steps of training after cutting, on what of the text was not measured on."""

    tokens: int = 20_000
    """How much of the text is measured on."""

    picture: Annotated[Path | None, tyro.conf.arg(metavar="PNG", help_behavior_hint="")] = None
    """Where the curve is drawn; by default in the folder of the model."""

    json: Flag = False
    """Print all numbers as JSON instead of a table."""

    device: str = "cpu"
    """Where to compute: cpu or cuda."""

    seed: int = 0
    """For random orders, masked words, gates and mending."""

    def run(self) -> int:
        """Say what went and why, how large and fast the model is now; 1 where it cannot be had."""
        from manyheads.checkpoints.folder import load
        from manyheads.surgery.operation import operate

        wish, texts = self._wish(), _texts(self.file)
        model = load(self.model, device=self.device)
        pairs = _pairs(texts, self.file) if hasattr(model, "encoder") else texts
        measured, more = _shared_out(model, pairs, self.tokens)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", CutWarning)
            done = operate(model, measured, wish, more=more, shown=not self.json)
        for each in told[:1]:
            print(each.message, file=sys.stderr)
        self._print(done, len(measured))
        if done.model is None:
            print(f"nothing was written: {done.chosen.shortfall}", file=sys.stderr)
            return 1
        self._write(done)
        return 0

    def _wish(self) -> "Wish":
        from manyheads.pictures.png import check_path
        from manyheads.surgery.operation import Wish
        from manyheads.taps import Sublayer

        if self.keep is not None and not 0 <= self.keep <= 1:
            raise InputError(f"--keep {self.keep:g} is no share of the heads", "use 0 to 1")
        if self.tokens < 1:
            raise InputError(f"--tokens {self.tokens} measures nothing", "use 1 or more")
        if self.picture is not None:
            check_path(self.picture)
        if self.out is not None and self.out.is_file():
            raise InputError(f"--out {self.out} is a file", "name a folder")
        return Wish(
            share=None if self.keep is None else 1 - self.keep,
            budget=self.loss_budget,
            by=self.by,
            iterative=self.iterative,
            keep="mean" if self.mean else "zero",
            stack="encoder" if self.of == "encoder" else None,
            sublayer=Sublayer.CROSS if self.of == "cross" else Sublayer.ATTENTION,
            mend_steps=self.mend,
            seed=self.seed,
        )

    def _print(self, done: "Operation", texts: int) -> None:
        if self.json:
            print(json.dumps(done.told(), indent=1))
            return
        from rich.console import Console

        from manyheads.cli.prune_page import show

        show(Console(), done, texts)

    def _write(self, done: "Operation") -> None:
        from manyheads.checkpoints.folder import save
        from manyheads.cli.prune_page import draw

        assert done.model is not None
        place = sys.stderr if self.json else sys.stdout
        if self.out is not None:
            print(save(done.model, self.out), file=place)
        picture = self.picture or (None if self.out is None else self.out / CURVE)
        if picture is not None:
            draw(done, picture)
            print(f"the curve is in {picture}", file=place)


def _texts(file: Path) -> list[str]:
    try:
        whole = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8: {error.reason} at byte {error.start}", "convert it first"
        ) from None
    parts = whole.split("\n\n") if "\n\n" in whole.strip() else whole.split("\n")
    texts = [text.strip("\n") for text in parts if text.strip()]
    if not texts:
        raise InputError(f"{file} holds no text", "name a file with some")
    return texts


def _pairs(texts: list[str], file: Path) -> list[tuple[str, str]]:
    lines = [line for text in texts for line in text.split("\n")]
    found = []
    for place, line in enumerate(lines):
        source, tab, target = line.partition("\t")
        if not tab:
            raise InputError(
                f"text {place} of {file} has no tab", "write a source, a tab and its target a line"
            )
        found.append((source, target))
    return found


def _shared_out(model: "Model", texts: list[Any], tokens: int) -> tuple[list[Any], list[Any]]:
    """The first texts, up to so many tokens, and the others."""
    if model.tokenizer is None:
        raise InputError("this model has no tokenizer", "put a tokenizer.json into its folder")
    held = 0
    for place, text in enumerate(texts):
        parts = text if isinstance(text, tuple) else (text,)
        held += sum(len(model.tokenizer.encode(part).ids) for part in parts)
        if held >= tokens:
            return texts[: place + 1], texts[place + 1 :]
    return texts, []
