"""manyheads prune: remove the heads, neurons or layers that a text does not need."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from manyheads.cli import arguments, inputs
from manyheads.cli.options import DeviceOptions
from manyheads.errors import InputError
from manyheads.formatting import listed, pluralise

if TYPE_CHECKING:
    from rich.console import Console

    from manyheads.surgery.pipeline import PruningConfig, PruningResult

CURVE = "curve.png"
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

    model: arguments.RequiredModel
    """The folder of a model with a tokenizer, or a model of the hub: org/name."""

    file: arguments.TextFile = None
    """Texts to evaluate on, separated by blank lines, or one per line without any; for an
    encoder-decoder, lines of source, tab and target; for a classifier, rows of text and label in a
    .jsonl or .parquet file."""

    image: arguments.ImageFolder = None

    out: arguments.OptionalOutFolder = None
    """The folder to save the pruned model and its curve to; without it nothing is saved."""

    what: Literal["heads", "neurons", "layers"] = "heads"
    """Prune heads, neurons of the feed-forwards, or whole layers."""

    fraction: Annotated[float | None, arguments.metavar("FRACTION")] = None
    """The fraction of them to remove, such as 0.4."""

    loss_budget: Annotated[float | None, arguments.metavar("NATS")] = None
    """How much the loss per token may rise, or the similarity of an embedding model may drop."""

    by: Annotated[
        Literal["ablation", "gradient", "redundancy", "l0", "random"] | None,
        arguments.metavar("{ablation,gradient,redundancy,l0,random}"),
    ] = None
    """The measure of importance; by default ablation, and gradient for neurons."""

    gate_steps: int = 300
    """Training steps of the gates of --by l0."""

    iterative: arguments.Flag = False
    """Measure again after each head or layer, or after each tenth of the neurons."""

    replace_with: Literal["zero", "mean"] = "zero"
    """What replaces a head: zero, or its mean output."""

    of: arguments.AttentionName = "attention"

    recover: int = 0
    """Training steps after pruning, on the texts not used for measuring, or on all without any."""

    tokens: int = 20_000
    """How many tokens to measure on; an image has one per patch, and one more."""

    picture: arguments.PngFile = None
    """A PNG file to draw the curve to; by default curve.png in the folder of --out."""

    json: arguments.JsonFile = None
    """A JSON file to save all numbers to; - prints it instead."""

    seed: int = 0
    """The seed of random orders, masked tokens, gates and recovery."""

    compute: DeviceOptions = DeviceOptions()

    def run(self) -> int:
        """Print what was removed, why, and size and speed; 1 where the budget cannot be met."""
        from rich.console import Console

        from manyheads.surgery.finetune.loop import RecoveryConfig
        from manyheads.surgery.pipeline import run_pruning

        config = self._config()
        if self.file is None and self.image is None:
            raise InputError("manyheads prune needs --file or --image", "give one of them")
        texts = [] if self.file is None else inputs.read_texts(self.file)
        model = self.compute.open(self.model)
        folder = inputs.image_source(model, self.image, texts=self.file is not None)
        if folder is None:
            both = self._texts(model, texts)
        else:
            more_tokens = self.recover * RecoveryConfig().batch_tokens
            both = inputs.sample_images(model, folder, self.tokens, self.seed, more_tokens)
        (measured, targets), (more, more_targets) = both
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
        arguments.write_json(self.json, result.to_dict())
        selection = result.selection
        if not selection.complete:
            measured_units = f"{len(selection.candidates):,} of {selection.total:,}"
            place = "above" if self.json is None else f"above and in {self.json}"
            print(
                f"interrupted after {measured_units} {selection.unit}: what is {place} was "
                "measured, and no model was saved",
                file=sys.stderr,
            )
        elif result.model is None:
            print(f"nothing was saved: {result.selection.shortfall}", file=sys.stderr)
        else:
            self._save(result)
            return 0
        return 1

    def _texts(self, model: Any, texts: list[str]) -> tuple[Any, Any]:
        """The texts to measure and to recover on, each with its classes if there are any."""
        from manyheads.models.seq2seq import Seq2Seq

        inputs.check_tokenizer(model)
        if inputs.is_text_classifier(model):
            return inputs.split_labeled(model, self.file, self.tokens)
        pairs: list[Any] = inputs.split_pairs(texts) if isinstance(model, Seq2Seq) else texts
        measured, more = inputs.split_texts(model, pairs, self.tokens)
        return (measured, None), (more, None)

    def _config(self) -> "PruningConfig":
        from manyheads.surgery.pipeline import PruningConfig
        from manyheads.surgery.selection.l0_selection import L0Config

        arguments.check_minimum("--gate-steps", self.gate_steps, 1)
        arguments.check_minimum("--recover", self.recover, 0)
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise InputError(f"--fraction must be in [0, 1], got {self.fraction:g}")
        arguments.check_json(self.json)
        arguments.check_picture(self.picture)
        arguments.check_out_folder(self.out, self.model)
        return PruningConfig(
            unit=self.what,
            fraction=self.fraction,
            budget=self.loss_budget,
            by=self.by,
            iterative=self.iterative,
            replace_with=self.replace_with,
            **arguments.attention_site(self.of),
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
    console.print(selection.table())
    if selection.harmful:
        console.print(f"better without: {listed(selection.harmful_names)}")
    if result.before is not None and result.after is not None:
        console.print(result.table())


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
