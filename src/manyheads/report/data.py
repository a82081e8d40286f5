"""What a report shows: an inspection of a model on a text, importance and attention patterns."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.formatting import without_nan
from manyheads.lens.attention_maps.patterns import Largest, top_keys
from manyheads.lens.causal.ablation import Ablation, ablate
from manyheads.lens.causal.gradient_importance import Importance, importance
from manyheads.lens.head_kinds.labels import Kinds
from manyheads.lens.inputs.metrics import Similarity
from manyheads.lens.inspection import HeadImportance, Inspection, inspect
from manyheads.lens.measure.measure_table import MeasureInfo, describe_measure, in_order
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.results.addresses import blocks_of
from manyheads.models.build import Model
from manyheads.models.readout import LanguageHead
from manyheads.models.vision import Vision
from manyheads.report.inputs import ReportInput, read_picture, read_text
from manyheads.surgery.evaluation_inputs import EvaluationInputs, prepare_inputs

By = Literal["auto", "ablation", "gradient", "none"]

# Ablating every head may cost so many multiplications before gradients are used instead; 1.1e12
# took 59 seconds of an aarch64 core.
MOST_WORK = 1.5e12
# A few texts are enough to compare patterns and outputs.
REDUNDANCY_TEXTS = 8
KIND_SEQUENCES = 16
# Keys of all queries of all heads together, and of one query.
MOST_WEIGHTS = 900_000
FEWEST_KEYS, MOST_KEYS = 4, 32
# The columns of the table of heads; other measures only colour the atlas.
IN_TABLE = (
    "loss_change",
    "similarity_drop",
    "normalized_entropy",
    "max_weight",
    "distance",
    "first_token",
    "previous_token",
    "duplicate_token",
    "induction",
    "output_share",
)
# Other definitions of measures that are shown, and single offsets.
HIDDEN = ("previous_token_all_queries", "induction_score", "offset")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShownMeasure:
    """One value per head, with its standard error where it is known."""

    name: str
    about: MeasureInfo
    values: Float[np.ndarray, " h"]
    errors: Float[np.ndarray, " h"]

    @property
    def in_table(self) -> bool:
        return self.name in IN_TABLE


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReportData:
    """An inspection, the text or image it was made on, and the largest weights of every head.

    `unknown_importance` says why the inspection has no importance, where it has none.
    """

    name: str
    model: Model
    input: ReportInput
    inspection: Inspection
    unknown_importance: str
    largest: tuple[Largest, ...]
    keys: int

    @property
    def statistics(self) -> Statistics:
        return self.inspection.statistics

    @property
    def kinds(self) -> Kinds:
        assert self.inspection.kinds is not None, "no report is made of an interrupted inspection"
        return self.inspection.kinds

    @property
    def importance(self) -> HeadImportance | None:
        return self.inspection.importance

    @property
    def heads(self) -> int:
        return len(self.inspection.addresses)

    def measures(self) -> list[ShownMeasure]:
        """Importance first, where it is known, then every statistic that some head has."""
        shown = []
        if self.importance is not None:
            about = describe_measure(self.importance.measure)
            if self.importance.by == "gradient":
                about = replace(about, label=f"{about.label}, estimated")
            values, errors = self.importance.change, self.importance.errors
            name = self.importance.measure
            shown.append(ShownMeasure(name=name, about=about, values=values, errors=errors))
        order = in_order(name for name in self.statistics.names if not name.startswith(HIDDEN))
        for name in sorted(order, key=lambda name: name not in IN_TABLE):
            column = self.statistics[name]
            if not np.isnan(column.means).all():
                about = describe_measure(name)
                means, errors = column.means, column.errors
                shown.append(ShownMeasure(name=name, about=about, values=means, errors=errors))
        return shown


def collect_report(
    model: Model,
    text: str | Path,
    *,
    name: str,
    by: By = "auto",
    measured: int = 4096,
    shown: int = 256,
    progress: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ReportData:
    """Inspect a model on `measured` tokens of a text, and keep the patterns of the first `shown`.

    A path is that of an image, for a `Vision`. Importance is measured `by` ablation or estimated
    from one backward pass; "auto" ablates where that costs at most `MOST_WORK`. `on_progress`
    receives the name of each step.
    """
    for what, count in (("measured", measured), ("shown", shown)):
        if count < 2:
            raise InputError(f"{what} must be at least 2 tokens, got {count}", "use 2 or more")
    if isinstance(text, Path):
        given = read_picture(model, name, text)
    else:
        given = read_text(model, name, text, measured=measured, shown=shown)
    texts = list(given.measured)
    inspection = inspect(
        model,
        texts,
        sequences=KIND_SEQUENCES,
        redundancy_texts=REDUNDANCY_TEXTS,
        progress=progress,
        on_progress=on_progress,
    )
    if not inspection.complete:
        # A page without kinds or duplicates would be misread as a model without any.
        raise KeyboardInterrupt
    on_progress("importance of each head")
    found, why = _measure_importance(
        model, texts, by, inspection.statistics.facts["tokens"], progress
    )
    on_progress(f"attention patterns on {len(given)} tokens")
    keys = _keys_per_query(len(inspection.addresses), len(given))
    return ReportData(
        name=name,
        model=model,
        input=given,
        inspection=replace(inspection, importance=found),
        unknown_importance=why,
        largest=top_keys(model, given.shown, top_k=keys),
        keys=keys,
    )


def _measure_importance(
    model: Model, texts: list[Any], by: By, tokens: int, progress: bool
) -> tuple[HeadImportance | None, str]:
    """The importance of every head, or the reason why it cannot be known."""
    if by == "none":
        return None, "it was switched off"
    if isinstance(model, Vision):
        return None, "an image alone does not say what the right class is"
    if model.readout is not None and not isinstance(model.config.readout, LanguageHead):
        return None, "a text alone does not say what the right class is"
    asked = prepare_inputs(model, texts)
    shared: dict[str, Any] = {"metric": asked.metric, "targets": asked.targets, "shown": progress}
    if _choose_method(model, by, tokens, asked) == "ablation":
        return _from_ablation(ablate(model, asked.given, **shared)), ""
    return _from_gradients(importance(model, asked.given, **shared)), ""


def report_json(report: ReportData) -> dict[str, Any]:
    """The tables of a report as plain JSON: one row per head, and what they were measured on.

    Names are those of `manyheads inspect --json`. In a row each measure has its standard error
    beside it as `<name>_error`; what is not known is null.
    """
    inspection, importance = report.inspection, report.importance
    reasons, duplicates = inspection.dead.reasons, inspection.duplicates
    rows = inspection.rows()
    for address, row in zip(inspection.addresses, rows, strict=True):
        row["kinds"] = [asdict(label) for label in inspection.labels(address)]
        row["dead"] = list(reasons.get(address, ()))
        row["duplicates"] = [str(other) for other in duplicates.get(address, ())]
    method = None
    if importance is not None:
        fields = ("measure", "metric", "by", "baseline", "texts")
        method = {field: getattr(importance, field) for field in fields}
    known: dict[str, Any] = without_nan(
        {
            "kind": "report",
            "name": report.name,
            "statistics": report.statistics.facts,
            "importance": method,
            "rows": rows,
        }
    )
    return known


def _choose_method(
    model: Model, by: By, tokens: int, asked: EvaluationInputs
) -> Literal["ablation", "gradient"]:
    if isinstance(asked.metric, Similarity):
        if by == "gradient":
            raise InputError(
                "gradients say nothing about a model of text vectors: its similarity to itself is "
                "at its maximum, where all gradients are 0",
                "use --by ablation",
            )
        return "ablation"
    if by in ("ablation", "gradient"):
        return "ablation" if by == "ablation" else "gradient"
    weights = sum(each.numel() for each in model.parameters())
    heads = sum(block.heads for block in blocks_of(model))
    # Ablating a head of the middle layer runs half of the layers again.
    return "ablation" if heads / 2 * tokens * weights <= MOST_WORK else "gradient"


def _from_ablation(found: Ablation) -> HeadImportance:
    column = found["change"]
    higher = found.facts["better"] == "higher"
    return HeadImportance(
        change=-column.means if higher else column.means,
        errors=column.errors,
        metric="similarity" if higher else "loss",
        by="ablation",
        baseline=found.baseline,
        texts=int(found.facts.get("texts", 0)),
    )


def _from_gradients(found: Importance) -> HeadImportance:
    column = found["predicted"]
    return HeadImportance(
        change=column.means,
        errors=column.errors,
        metric="loss",
        by="gradient",
        baseline=None,
        texts=int(found.facts["texts"]),
    )


def _keys_per_query(heads: int, tokens: int) -> int:
    """So many keys that the file stays small."""
    return max(FEWEST_KEYS, min(MOST_KEYS, MOST_WEIGHTS // (heads * tokens)))
