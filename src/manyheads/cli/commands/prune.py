"""manyheads prune: remove the heads, neurons or layers that a text does not need."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from manyheads.cli.arguments import (
    AttentionName,
    DeviceName,
    Flag,
    ImageDirectory,
    JsonFile,
    OptionalOutFolder,
    PngFile,
    RequiredModel,
    TextFile,
    attention_site,
    check_json,
    check_minimum,
    check_out_folder,
    check_tokenizer,
    image_source,
    is_text_classifier,
    open_model,
    read_paragraphs,
    sample_images,
    split_labeled,
    split_pairs,
    split_texts,
    write_json,
)
from manyheads.errors import InputError
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from manyheads.surgery.pipeline import PruningConfig, PruningResult

CURVE = "curve.png"
MAX_NAMES = 20
TRAINED_ON_MEASURED = (
    "all texts are used for measuring, and recovery trains on them too: the loss after recovery "
    "is that of texts trained on; give more texts, or a smaller --tokens"
)


@dataclass(frozen=True, slots=True)
class Prune:
    """Remove the heads, neurons or layers that a text does not need.

    For example: manyheads prune gpt2/ --file book.txt --fraction 0.4 -o gpt2-small/

    As many as fit a budget, then recover: manyheads prune gpt2/ --file book.txt
    --loss-budget 0.01 --recover 200 -o gpt2-small/
    """

    PYTHON_NAMES: ClassVar[dict[str, str]] = {
        "budget": "--loss-budget",
        "unit": "--what",
        "recovery_steps": "--recover",
    }

    model: RequiredModel
    """The folder of a model with a tokenizer, or a model of the hub: org/name."""

    file: TextFile = None
    """Texts to evaluate on, separated by blank lines, or one per line without any; for an
    encoder-decoder, lines of source, tab and target; for a classifier, rows of text and label in a
    .jsonl or .parquet file."""

    image: ImageDirectory = None
    """For a vision model: a folder of images; for a classifier, one folder per class."""

    out: OptionalOutFolder = None
    """The folder to save the pruned model and its curve to; without it nothing is saved."""

    what: Literal["heads", "neurons", "layers"] = "heads"
    """Prune heads, neurons of the feed-forwards, or whole layers."""

    fraction: Annotated[float | None, tyro.conf.arg(metavar="FRACTION", help_behavior_hint="")] = (
        None
    )
    """The fraction of them to remove, such as 0.4."""

    loss_budget: Annotated[float | None, tyro.conf.arg(metavar="NATS", help_behavior_hint="")] = (
        None
    )
    """How much the loss per token may rise, or the similarity of an embedding model may drop."""

    by: Annotated[
        Literal["ablation", "gradient", "redundancy", "l0", "random"] | None,
        tyro.conf.arg(metavar="{ablation,gradient,redundancy,l0,random}", help_behavior_hint=""),
    ] = None
    """The measure of importance; by default ablation, and gradient for neurons."""

    gate_steps: int = 300
    """Training steps of the gates of --by l0."""

    iterative: Flag = False
    """Measure again after each head or layer, or after each tenth of the neurons."""

    replace_with: Literal["zero", "mean"] = "zero"
    """What replaces a head: zero, or its mean output."""

    of: AttentionName = "attention"
    """Of an encoder-decoder: the decoder's self-attention, the encoder's, or cross-attention."""

    recover: int = 0
    """Training steps after pruning, on the texts not used for measuring, or on all without any."""

    tokens: int = 20_000
    """How many tokens to measure on; an image has one per patch, and one more."""

    picture: PngFile = None
    """A PNG file to draw the curve to; by default curve.png in the folder of --out."""

    json: JsonFile = None
    """A JSON file to save all numbers to."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    seed: int = 0
    """The seed of random orders, masked tokens, gates and recovery."""

    def run(self) -> int:
        """Print what was removed, why, and size and speed; 1 where the budget cannot be met."""
        from rich.console import Console

        from manyheads.surgery.pipeline import run_pruning

        config = self._config()
        if self.file is None and self.image is None:
            raise InputError("manyheads prune needs --file or --image", "give one of them")
        texts = [] if self.file is None else read_paragraphs(self.file)
        model = open_model(self.model, self.device)
        folder = image_source(model, self.image, texts=self.file is not None)
        inputs = self._texts(model, texts) if folder is None else self._images(model, folder)
        (measured, targets), (more, more_targets) = inputs
        if self.recover and not more:
            print(TRAINED_ON_MEASURED, file=sys.stderr)
        result = run_pruning(
            model,
            measured,
            config,
            recovery_texts=more,
            targets=targets,
            recovery_targets=more_targets,
        )
        evaluated_on = pluralise(len(measured), "text" if folder is None else "image")
        _print(Console(highlight=False), result, evaluated_on)
        if self.json is not None:
            write_json(self.json, result.to_dict())
        selection = result.selection
        if not selection.complete:
            measured_units = f"{len(selection.candidates):,} of {selection.total:,}"
            kept = "what is above" if self.json is None else f"what is above and in {self.json}"
            print(
                f"interrupted after {measured_units} {selection.unit}: {kept} was measured, and "
                "no model was saved",
                file=sys.stderr,
            )
            return 1
        if result.model is None:
            print(f"nothing was saved: {result.selection.shortfall}", file=sys.stderr)
            return 1
        self._save(result)
        return 0

    def _texts(self, model: Any, texts: list[str]) -> tuple[Any, Any]:
        """The texts to measure and to recover on, each with its classes if there are any."""

        check_tokenizer(model)
        if is_text_classifier(model):
            return split_labeled(model, self.file, self.tokens)
        inputs: list[Any] = split_pairs(texts) if model.reads_pairs else texts
        measured, more = split_texts(model, inputs, self.tokens)
        return (measured, None), (more, None)

    def _images(self, model: Any, folder: Path) -> tuple[Any, Any]:
        from manyheads.surgery.finetune.loop import RecoveryConfig

        more = self.recover * RecoveryConfig().batch_tokens
        return sample_images(model, folder, self.tokens, self.seed, more)

    def _config(self) -> "PruningConfig":
        from manyheads.pictures import check_image_path
        from manyheads.surgery.pipeline import PruningConfig
        from manyheads.surgery.selection.l0_selection import L0Config

        check_minimum("--gate-steps", self.gate_steps, 1)
        check_minimum("--recover", self.recover, 0)
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise InputError(f"--fraction must be in [0, 1], got {self.fraction:g}")
        check_json(self.json)
        if self.picture is not None:
            check_image_path(self.picture)
        check_out_folder(self.out, self.model)
        return PruningConfig(
            unit=self.what,
            fraction=self.fraction,
            budget=self.loss_budget,
            by=self.by,
            iterative=self.iterative,
            replace_with=self.replace_with,
            **attention_site(self.of),
            l0=L0Config(steps=self.gate_steps),
            recovery_steps=self.recover,
            seed=self.seed,
        )

    def _save(self, result: "PruningResult") -> None:
        from manyheads.checkpoints.folder import save

        assert result.model is not None
        if self.out is not None:
            print(save(result.model, self.out))
        picture = self.picture or (None if self.out is None else self.out / CURVE)
        if picture is not None:
            _draw(result, picture)
            print(f"saved the curve to {picture}")


def _print(console: "Console", result: "PruningResult", evaluated_on: str) -> None:
    selection = result.selection
    summary = f"{selection.total:,} {selection.unit}"
    if selection.met:
        summary = f"{selection.count:,} of {summary} removed"
    console.print(f"{summary} by {selection.by}, evaluated on {evaluated_on}")
    console.print(_curve(result))
    if selection.harmful:
        console.print(f"better without: {_listed(selection.harmful_names)}")
    if result.before is not None and result.after is not None:
        console.print(_sizes(result))


def _curve(result: "PruningResult") -> "Table":
    selection = result.selection
    from rich.table import Table

    table = Table("", selection.unit.removesuffix("s"), "reason", box=None, pad_edge=False)
    for name in (selection.metric, "change", "±"):
        table.add_column(name, justify="right")
    table.add_row("0", "none", "the full model", f"{selection.baseline:.4f}", "", "")
    for row in selection.rows():
        if (selection.met and not row["selected"]) or isnan(row["value"]):
            continue
        table.add_row(
            f"{row['removed']:,}",
            row["name"],
            row["reason"] + _harm(row),
            f"{row['value']:.4f}",
            f"{row['change']:+.4f}",
            # A single text has no standard error.
            "" if isnan(row["change_error"]) else f"{row['change_error']:.2g}",
        )
    return table


def _harm(row: dict[str, Any]) -> str:
    """Whether the unit of a row is harmful, or how many of its units are."""
    if not row["harmful"]:
        return ""
    return ", harmful" if row["units"] == 1 else f", {row['harmful']} of them harmful"


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    first = ", ".join(names[:MAX_NAMES])
    more = len(names) - MAX_NAMES
    return first if more <= 0 else f"{first} and {more:,} more"


def _sizes(result: "PruningResult") -> "Table":
    before, after = result.before, result.after
    assert before is not None
    assert after is not None
    from rich.table import Table

    table = Table("", box=None, pad_edge=False)
    for name in ("before", "after", "ratio"):
        table.add_column(name, justify="right")
    for name, one, other in (
        ("heads", before.heads, after.heads),
        ("parameters", before.parameters, after.parameters),
        ("of attention", before.attention, after.attention),
        ("bytes", before.bytes, after.bytes),
        ("tokens per second", before.tokens_per_second, after.tokens_per_second),
    ):
        ratio = f"{other / one:.2f}" if one else "-"
        table.add_row(name, f"{one:,.0f}", f"{other:,.0f}", ratio)
    table.add_row(
        result.selection.metric, f"{result.selection.baseline:.4f}", f"{result.pruned:.4f}", ""
    )
    if result.recovered is not None:
        table.add_row("after recovery", "", f"{result.recovered:.4f}", "")
    return table


def _draw(result: "PruningResult", path: Path) -> None:
    """Draw the curve as a picture."""
    from manyheads.pictures import Curve, CurveLabels, draw_curve

    selection, rows = result.selection, result.selection.rows()
    line = Curve(
        name=f"by {selection.by}",
        fractions=[row["fraction"] for row in rows],
        values=[row["value"] for row in rows],
        errors=[row["change_error"] for row in rows],
        chosen=selection.count / selection.total if selection.count else None,
    )
    labels = CurveLabels(
        title=f"{selection.count:,} of {selection.total:,} {selection.unit} removed",
        subtitle=f"in the order of {selection.by}; the band is one standard error of the change",
        xlabel=f"fraction of {selection.unit} removed",
        ylabel=selection.metric,
    )
    draw_curve([line], selection.baseline, path, labels=labels)
