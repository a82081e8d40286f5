"""manyheads ablate: what a model loses without each of its heads."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.cli.arguments import (
    DEFAULT_MODEL,
    AttentionName,
    DeviceName,
    ImageDirectory,
    JsonFile,
    ManyIds,
    ManyTexts,
    OptionalModel,
    TextFile,
    attention_site,
    check_json,
    image_source,
    is_text_classifier,
    load_texts,
    open_model,
    sample_images,
    split_labeled,
)
from manyheads.errors import InputError
from manyheads.formatting import pluralise, without_nan

if TYPE_CHECKING:
    from rich.table import Table

    from manyheads.lens.causal.ablation import Ablation, CumulativeAblation
    from manyheads.lens.causal.gradient_importance import Importance

REPLACEMENTS = {"zero": "zero", "mean": "their mean", "resample": "their output in another text"}


@dataclass(frozen=True, slots=True)
class Ablate:
    """Ablate every head in turn and measure how the loss changes, with standard errors.

    For example: manyheads ablate gpt2/ --file book.txt --replace-with mean --json ablation.json

    A decoder is measured by the loss of each next token, an encoder by that of masked tokens, an
    embedding model by how similar its vectors stay, and a classifier by the labels of a file of
    rows or of a folder of images. Ctrl-C ends the measurement and keeps what was measured.
    """

    model: OptionalModel = DEFAULT_MODEL
    """The folder of a model with a tokenizer, a bundled model, or a model of the hub: org/name."""

    text: ManyTexts = ()
    """A text to read."""

    file: TextFile = None
    """A file of texts separated by blank lines, or one text per line without any."""

    ids: ManyIds = ()
    """Token ids to read instead of a text; a model without a tokenizer needs them."""

    image: ImageDirectory = None
    """For a vision model: a folder of images; for a classifier, one folder per class."""

    tokens: int = 2_000
    """How many tokens of the file to read; an image has one per patch, and one more."""

    heads: Annotated[str, tyro.conf.arg(metavar="L2H7,...", help_behavior_hint="(all)")] = ""
    """The heads to ablate."""

    replace_with: Literal["zero", "mean", "resample"] = "zero"
    """What replaces a head: zero, its mean, or its output in another text."""

    greedy: Annotated[int, tyro.conf.arg(metavar="N", help_behavior_hint="")] = 0
    """Also ablate N heads one after another, each time the one that matters least."""

    of: AttentionName = "attention"
    """Of an encoder-decoder: the decoder's self-attention, the encoder's, or cross-attention."""

    json: JsonFile = None
    """A JSON file to save everything to; manyheads.lens reads it back."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    seed: int = 0
    """The seed of masked tokens and of resampling."""

    def run(self) -> int:
        """Print the heads by importance; 1 if the measurement was interrupted."""
        from manyheads.lens import ablate, ablate_greedily, importance
        from manyheads.surgery.evaluation_inputs import prepare_inputs

        check_json(self.json)
        heads: Any = [name for name in self.heads.split(",") if name.strip()] or "all"
        model = open_model(self.model, self.device)
        self._check(model, heads)
        texts, targets = self._inputs(model)
        inputs = prepare_inputs(model, texts, targets=targets, seed=self.seed)
        shared: dict[str, Any] = {"targets": inputs.targets, **attention_site(self.of)}
        options: dict[str, Any] = {
            "metric": inputs.metric,
            "replace_with": self.replace_with,
            "seed": self.seed,
        }
        ablation = ablate(model, inputs.model_inputs, heads, **options, **shared)
        estimate = order = None
        if ablation.complete and inputs.metric == "loss":
            estimate = importance(model, inputs.model_inputs, **shared)
        if ablation.complete and self.greedy:
            order = ablate_greedily(
                model, inputs.model_inputs, self.greedy, heads, **options, **shared
            )
        ablation = _merge(ablation, estimate, order)
        _print(self.model, ablation, order, "text" if self.image is None else "image")
        if self.json is not None:
            ablation.save(self.json)
            print(f"saved everything to {self.json}")
        if not ablation.complete:
            print("interrupted before everything was measured", file=sys.stderr)
        return 0 if ablation.complete and (order is None or order.complete) else 1

    def _inputs(self, model: Any) -> tuple[Any, Any]:
        """What to measure on, and its classes if it has any."""
        folder = image_source(model, self.image, texts=bool(self.text or self.file or self.ids))
        if folder is not None:
            return sample_images(model, folder, self.tokens, self.seed)[0]
        if not is_text_classifier(model):
            return load_texts(model, self.text, self.file, self.tokens, self.ids), None
        if self.text or self.ids:
            raise InputError(
                "--text and --ids have no label", "give --file with rows of text and label"
            )
        return split_labeled(model, self.file, self.tokens)[0]

    def _check(self, model: Any, heads: Any) -> None:
        """Refuse wrong heads before anything is measured."""
        from manyheads.lens.inputs.cached_run import find_heads, head_scope

        count = len(find_heads(head_scope(model, **attention_site(self.of)), heads))
        if not 0 <= self.greedy <= count:
            raise InputError(f"--greedy must be in 0 to {count}, got {self.greedy}")


def _merge(
    ablation: "Ablation", estimate: "Importance | None", order: "CumulativeAblation | None"
) -> "Ablation":
    """Everything as one result by head, which can be saved as such."""
    metadata = ablation.metadata | {"harmful": [str(head) for head, _ in ablation.harmful()]}
    means, errors = dict(ablation.means), dict(ablation.errors)
    if estimate is not None:
        metadata["rank_correlation"] = without_nan(estimate.agreement(ablation))
        means |= {name: estimate.means[name] for name in ("importance", "predicted")}
        errors |= {name: estimate.errors[name] for name in ("importance", "predicted")}
    if order is not None:
        steps = without_nan(order.rows())
        metadata["greedy"] = {
            "baseline": order.baseline,
            "complete": order.complete,
            "steps": steps,
        }
    return replace(ablation, means=means, errors=errors, metadata=metadata)


def _print(name: str, ablation: "Ablation", order: "CumulativeAblation | None", unit: str) -> None:
    from manyheads.console import TerminalPage

    page, metadata = TerminalPage(), ablation.metadata
    page.title(name)
    error = metadata["baseline_error"]
    error = "" if error is None else f" ±{error:.2g}"
    page.paragraph(
        f"The {metadata['metric']} of the full model is {ablation.baseline:.4f}{error} over "
        f"{pluralise(metadata['texts'], unit)}. "
        f"Heads are replaced by {REPLACEMENTS[metadata['replace_with']]}, one at a time."
    )
    page.heading("Heads")
    page.show(_heads_table(ablation))
    if metadata.get("rank_correlation") is not None:
        page.paragraph(
            "Rank correlation (Spearman) with the importance from one backward pass (Michel et "
            f"al.): {metadata['rank_correlation']:.2f}."
        )
    names = ", ".join(f"{head} ({change:+.4f})" for head, change in ablation.harmful())
    page.paragraph(f"Better without, by more than a standard error: {names or 'none'}.")
    if order is not None:
        page.heading("Greedy ablation")
        page.show(_order_table(order))


def _heads_table(ablation: "Ablation") -> "Table":
    from rich.table import Table

    names = [name for name in ("metric", "change", "importance", "predicted") if name in ablation]
    columns = [ablation[name] for name in names]
    table = Table("head", box=None, pad_edge=False)
    for name in names:
        title = ablation.metadata["metric"] + " without" if name == "metric" else name
        table.add_column(title, justify="right")
        if name == "change":
            table.add_column("±", justify="right")
    smallest_first = ablation.metadata["better"] != "lower"
    for head, _ in ablation["change"].ranked(smallest=smallest_first):
        cells = []
        for column in columns:
            cells.append(f"{column.of(head):{'+' if column.name == 'change' else ''}.4f}")
            if column.name == "change":
                cells.append(_error(column.error_of(head)))
        table.add_row(str(head), *cells)
    return table


def _order_table(order: "CumulativeAblation") -> "Table":
    from rich.table import Table

    table = Table("", "head", box=None, pad_edge=False)
    for name in ("value", "change", "±"):
        table.add_column(name, justify="right")
    table.add_row("0", "none", f"{order.baseline:.4f}", "", "")
    for row in order.rows():
        table.add_row(
            str(row["removed"]),
            row["head"],
            f"{row['value']:.4f}",
            f"{row['change']:+.4f}",
            _error(row["change_error"]),
        )
    return table


def _error(error: float | None) -> str:
    """A standard error, which a single text does not have."""
    return "" if error is None or error != error else f"{error:.2g}"
