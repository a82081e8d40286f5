"""Two models side by side: which heads changed, by every statistic, and how."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.formatting import pluralise
from manyheads.lens.causal.ablation import ablate
from manyheads.lens.causal.evaluate import Evaluation
from manyheads.lens.causal.replacements import Replacement
from manyheads.lens.diff.head_matching import HeadMatch, match_heads, weight_changes
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.inputs import metrics, token_classes
from manyheads.lens.inputs.texts import Inputs, PassSummary, Targets, for_each_batch, read_inputs
from manyheads.lens.measure.measures import MeasureSums, SequenceGroups, sum_by_sequence
from manyheads.lens.measure.statistics import LARGEST, StatisticsTotals, ids_by_stack, make_plan
from manyheads.lens.measure.watcher import StatisticsWatcher
from manyheads.lens.redundant import dead_heads
from manyheads.lens.results.addresses import Address, Block, HeadName, blocks_of, pick_head
from manyheads.lens.results.files import Metadata
from manyheads.lens.results.measure_names import describe_measure, format_value, sort_measures
from manyheads.lens.results.tables import ByHead, Tabular, titled_table
from manyheads.models.build import Model
from manyheads.models.model_interface import ModelInputs

KIND = "comparison"
# Measures listed per head, those with the largest z-scores.
MAX_MEASURES = 3
# Fewer texts than this do not show how much a change varies between texts.
MIN_TEXTS = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """One measure of one head in both models; `z` is the change in standard errors.

    `z` is NaN if there were too few texts.
    """

    before: float
    after: float
    change: float
    error: float
    z: float


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of both models on the same texts, and its change with the standard error."""

    before: float
    after: float
    change: float
    error: float | None

    def __str__(self) -> str:
        error = "" if self.error is None else f" ±{self.error:.2g}"
        return f"loss {self.before:.4f} before, {self.after:.4f} after ({self.change:+.4f}{error})"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Comparison(Tabular):
    """Every measure of every head before and after, by the addresses in the first model.

    `change` has the standard errors of the changes, `weights` how far each head's weights moved,
    `addresses_after` the address of each head in the second model (None if it was removed). `died`
    and `revived` have the reasons, `kind_changes` the kinds before and after if they differ.
    """

    before: ByHead
    after: ByHead
    change: ByHead
    weights: ByHead
    addresses_after: Mapping[Address, Address | None]
    losses: Losses | None = None
    died: Mapping[Address, tuple[str, ...]] = field(default_factory=dict)
    revived: Mapping[Address, tuple[str, ...]] = field(default_factory=dict)
    kind_changes: Mapping[Address, tuple[tuple[str, ...], tuple[str, ...]]] = field(
        default_factory=dict
    )
    metadata: Metadata = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self.before.addresses

    @property
    def names(self) -> tuple[str, ...]:
        """All measures that either model has."""
        return self.change.names

    @property
    def removed(self) -> tuple[Address, ...]:
        """Heads that the second model does not have."""
        return tuple(head for head, other in self.addresses_after.items() if other is None)

    @property
    def enough_texts(self) -> bool:
        """Whether there were enough texts for z-scores: at least eight."""
        return int(self.change.metadata["texts"]) >= MIN_TEXTS

    def z(self, name: str) -> Float[np.ndarray, " h"]:
        """The change of a measure in standard errors; 0 if nothing changed, NaN with few texts."""
        column = self.change[name]
        if not self.enough_texts:
            return np.full(len(column.means), np.nan)
        errors = np.where(column.errors > 0, column.errors, np.nan)
        return np.asarray(np.where(column.means == 0, 0.0, column.means / errors))

    def shift(self) -> Float[np.ndarray, " h"]:
        """How far each head moved over all measures, relative to the spread of heads.

        The root mean square over measures of the change divided by the measure's standard deviation
        over all heads of both models. With many texts every change has a large z; the shift shows
        which changes are large.
        """
        squares = []
        for name in self.names:
            spread = self._spread(name)
            if not np.isnan(spread):
                squares.append(np.square(self.change.means[name] / spread))
        if not squares:
            return np.full(len(self.addresses), np.nan)
        count = (~np.isnan(squares)).sum(0)
        return np.asarray(np.sqrt(np.nansum(squares, 0) / np.where(count > 0, count, np.nan)))

    def ranked(self, name: str | None = None) -> list[tuple[Address, float]]:
        """Heads by the absolute change of one measure, or by `shift`, without removed heads."""
        values = self.shift() if name is None else self.change[name].means
        pairs = zip(self.addresses, values.tolist(), strict=True)
        measured = [(head, value) for head, value in pairs if not np.isnan(value)]
        return sorted(measured, key=lambda pair: -abs(pair[1]))

    def of(self, head: HeadName) -> dict[str, Difference]:
        """All measures of one head."""
        head = pick_head(self.addresses, head)
        one, two, moved = (result.of(head) for result in (self.before, self.after, self.change))
        return {
            name: Difference(
                one[name],
                two[name],
                moved[name],
                self.change[name].error_of(head),
                float(self.z(name)[self.addresses.index(head)]),
            )
            for name in self.names
        }

    def rows(self) -> list[dict[str, Any]]:
        """One record per head and measure."""
        values = {name: self.z(name) for name in self.names}
        return [
            {
                "head": str(address),
                "measure": name,
                "before": float(self.before.means[name][index]),
                "after": float(self.after.means[name][index]),
                "change": float(self.change.means[name][index]),
                "error": float(self.change[name].errors[index]),
                "z": float(values[name][index]),
            }
            for index, address in enumerate(self.addresses)
            for name in self.names
        ]

    def table(self, max_rows: int = 20) -> Any:
        """A rich table of the heads that moved most, with the measures that changed most."""
        table = titled_table(KIND, ["head"], ["shift", "weights"])
        for name in ("most changed", "kinds"):
            table.add_column(name)
        for address, shift in self.ranked()[:max_rows]:
            numbers = f"{shift:.2g}", f"{self.weights['all'].of(address):.2g}"
            words = self._largest_changes(address), self._kind_change(address)
            table.add_row(str(address), *numbers, *words)
        return table

    def _lines(self) -> Iterator[str]:
        yield f"{len(self.addresses)} heads compared by {len(self.names)} measures"
        if self.losses is not None:
            yield f"  {self.losses}"
        if not self.enough_texts:
            texts = pluralise(self.change.metadata["texts"], "text")
            yield f"  {texts}: too few for z-scores, which need at least {MIN_TEXTS}"
        moved = [(address, shift) for address, shift in self.ranked() if shift > 0]
        for address, shift in moved[:5]:
            yield f"  {address} moved by {shift:.2g}: {self._largest_changes(address)}"
        if not moved:
            yield "  no head moved"
        for name, reasons in (("died", self.died), ("revived", self.revived)):
            for address, why in reasons.items():
                yield f"  {address} {name} ({', '.join(why)})"
        for address in self.kind_changes:
            yield f"  {address} {self._kind_change(address)}"
        if self.removed:
            yield f"  removed: {', '.join(map(str, self.removed))}"
        if not self.metadata.get("complete", True):
            yield "  interrupted before all texts were read"

    def _largest_changes(self, address: Address) -> str:
        """The measures of a head with the largest z-scores, or changes if texts are too few."""
        changed = [(name, diff) for name, diff in self.of(address).items() if diff.change]
        if self.enough_texts:
            sizes = {name: abs(diff.z) for name, diff in changed}
        else:
            sizes = {name: abs(diff.change) / self._spread(name) for name, diff in changed}
        measured = [pair for pair in changed if not np.isnan(sizes[pair[0]])]
        measured.sort(key=lambda pair: -sizes[pair[0]])
        changes = []
        for name, diff in measured[:MAX_MEASURES]:
            about = describe_measure(name)
            one, two = (format_value(value, about.unit) for value in (diff.before, diff.after))
            z = f" (z {diff.z:+.1f})" if self.enough_texts else ""
            changes.append(f"{about.label} {one} to {two}{z}")
        return ", ".join(changes)

    def _spread(self, name: str) -> float:
        """The standard deviation of a measure over all heads of both models; NaN if it has none."""
        both = np.concatenate((self.before.means[name], self.after.means[name]))
        values = both[~np.isnan(both)]
        spread = float(values.std()) if len(values) else 0.0
        return spread if spread > 1e-12 else np.nan

    def _kind_change(self, address: Address) -> str:
        if address not in self.kind_changes:
            return ""
        one, two = (", ".join(names) or "no kind" for names in self.kind_changes[address])
        return f"was {one}, is {two}"


MeansAndErrors = tuple[Float[np.ndarray, " h"], Float[np.ndarray, " h"]]
Sums = tuple[Float[Tensor, "b h"], Float[Tensor, "b h"]]


@dataclass(slots=True, eq=False)
class _TallyByText(MeasureSums):
    """A tally that also keeps the sums and counts of each text."""

    texts: dict[tuple[Block, str], Sums] = field(default_factory=dict)

    def add(
        self, block: Block, name: str, values: Float[Tensor, "n h"], groups: SequenceGroups
    ) -> None:
        MeasureSums.add(self, block, name, values, groups)
        valid = torch.ones_like(values, dtype=torch.bool)
        if groups.valid is not None:
            valid = groups.valid if groups.valid.dim() == 2 else groups.valid[:, None]
            valid = valid.expand_as(values)
        x = torch.where(valid, values.double(), 0.0)
        # Left on the device: fetching them one by one would synchronise each time.
        self.texts[block, name] = (
            sum_by_sequence(x, groups),
            sum_by_sequence(valid.double(), groups),
        )

    def add_columns(
        self,
        block: Block,
        names: Sequence[str],
        values: Float[Tensor, "n h columns"],
        groups: SequenceGroups,
    ) -> None:
        assert groups.valid is not None, "each measure counts for queries of its own"
        for name, column, valid in zip(
            names, values.unbind(2), groups.valid.unbind(1), strict=True
        ):
            self.add(block, name, column, replace(groups, valid=valid))


@dataclass(slots=True, eq=False)
class StatisticsByText:
    """Sums and counts of every measure, text by text, and perhaps the effect of ablation."""

    blocks: tuple[Block, ...]
    totals: StatisticsTotals = field(default_factory=StatisticsTotals)
    batches: list[tuple[int, dict[tuple[Block, str], Sums]]] = field(default_factory=list)
    passed: PassSummary = PassSummary(0, 0, complete=False)
    loss_change: MeansAndErrors | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All measures, and "loss_change" if the effect of ablation is known."""
        ablated = () if self.loss_change is None else ("loss_change",)
        largest = (LARGEST,) if self.totals.logits else ()
        return sort_measures((*self.totals.sums.names, *largest, *ablated))

    def measured(self, name: str) -> MeansAndErrors:
        """Means and standard errors over texts, or over the queries of a single text.

        They are NaN for a measure that this model lacks.
        """
        if name == "loss_change" and self.loss_change is not None:
            return self.loss_change
        sums, several = self.totals.sums, self.passed.texts > 1
        errors = sums.errors(self.blocks, name, over_sequences=several)
        if name == LARGEST:
            return self.totals.largest_logits(self.blocks), errors
        return sums.means(self.blocks, name), errors

    def residuals(self, name: str) -> Float[np.ndarray, "b h"]:
        """The residual of each text in the ratio estimator of the mean, (S_b - m N_b) / N.

        The sum of their squares is the variance of the mean.
        """
        batches = []
        for texts, sums in self.batches:
            device = next(iter(sums.values()))[0].device
            none = torch.zeros(texts, 1, dtype=torch.float64, device=device)
            parts = [
                sums.get((block, name), (none.expand(-1, block.heads),) * 2)
                for block in self.blocks
            ]
            joined = [torch.cat(side, dim=1) for side in zip(*parts, strict=True)]
            batches.append(torch.stack(joined).cpu())
        sums, numbers = torch.cat(batches, dim=1)
        total = numbers.sum(0)
        return np.asarray(((sums - sums.sum(0) / total * numbers) / total).numpy())


def measure_by_text(
    model: Model,
    inputs: ModelInputs,
    *,
    classes: token_classes.TokenClasses = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> StatisticsByText:
    """All statistics, separately for each text."""
    plan = make_plan(model, classes)
    statistics = StatisticsByText(blocks_of(model))

    def visit(batch: ModelInputs, numbers: list[int]) -> None:
        tally = _TallyByText()
        watcher = StatisticsWatcher(plan, ids_by_stack(model, batch), numbers, tally)
        with torch.inference_mode():
            model.run_hidden(batch, watcher)
        statistics.totals.add(watcher)
        statistics.batches.append((len(batch), tally.texts))

    statistics.passed = for_each_batch(
        model, inputs, visit, label="measuring", batch_tokens=batch_tokens, progress=progress
    )
    return statistics


@wrapping_models
def compare(
    before: Model,
    after: Model,
    texts: Inputs,
    *,
    origins: Mapping[Address, Address] | None = None,
    targets: Targets | None = None,
    classes: token_classes.TokenClasses = None,
    compare_kinds: bool = True,
    replace_with: Replacement | None = None,
    loss_below: float = dead_heads.LOSS_BELOW,
    entropy_above: float = dead_heads.ENTROPY_ABOVE,
    norm_below: float = dead_heads.NORM_BELOW,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare two models head by head, by every statistic.

    Both read the same texts, tokenized by the first model's tokenizer. Changes are paired by text,
    so that their errors are those of the change alone; for a single text the errors are over
    queries and unpaired, and with fewer than eight texts there are no z-scores. Heads are matched
    by address; where the second model has fewer heads in a layer, by their weights, or by `origins`
    (see `manyheads.surgery.origins`). Both models must have the same shape otherwise.

    A head died if it is dead in the second model only, by entropy and norm (see `dead_heads`) and,
    with `replace_with="zero"`, by ablation of every head. `compare_kinds` also reports heads whose
    kinds changed (see `kinds`). The loss is that of next tokens, or of `targets`.

    >>> from manyheads.models.build import build
    >>> one = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> comparison = compare(one, one, [[1, 2, 3, 4], [5, 6, 7]], compare_kinds=False)
    >>> comparison.losses.change, float(abs(comparison.change.means["entropy"]).max())
    (0.0, 0.0)
    """
    match = match_heads(before, after, origins)
    inputs = read_inputs(before, texts)
    shared: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    sides = [measure_by_text(model, inputs, classes=classes, **shared) for model in (before, after)]
    if replace_with is not None:
        shared |= {"replace_with": replace_with, "targets": targets}
        for model, side in zip((before, after), sides, strict=True):
            side.loss_change = _loss_changes(model, inputs, side.blocks, **shared)
    one, two, change = _side_by_side(sides[0], sides[1], match)
    thresholds = {
        "loss_below": loss_below,
        "entropy_above": entropy_above,
        "norm_below": norm_below,
    }
    dead_then, dead_now = (
        dead_heads.dead_by_statistics(side, **thresholds).reasons for side in (one, two)
    )
    complete = all(side.passed.complete for side in sides)
    return Comparison(
        before=one,
        after=two,
        change=change,
        weights=weight_changes(before, after, match),
        addresses_after=match.after,
        losses=_losses(before, after, inputs, targets, progress),
        died={head: why for head, why in dead_now.items() if head not in dead_then},
        revived={
            head: why
            for head, why in dead_then.items()
            if head not in dead_now and match.after[head] is not None
        },
        kind_changes=_kind_changes(before, after, inputs, match, progress) if compare_kinds else {},
        metadata=one.metadata | thresholds | {"replace_with": replace_with, "complete": complete},
    )


def _loss_changes(
    model: Model, inputs: ModelInputs, blocks: tuple[Block, ...], **options: Any
) -> MeansAndErrors:
    """The effect of ablating each head."""
    values: dict[Address, tuple[float, float]] = {}
    for stack, sublayer in dict.fromkeys((block.stack, block.sublayer) for block in blocks):
        ablation = ablate(model, inputs, stack=stack, sublayer=sublayer, **options)
        column = ablation["change"]
        pairs = zip(column.means.tolist(), column.errors.tolist(), strict=True)
        values |= dict(zip(ablation.addresses, pairs, strict=True))
    means, errors = np.array([values[head] for block in blocks for head in block.addresses]).T
    return means, errors


def _side_by_side(
    one: StatisticsByText, two: StatisticsByText, match: HeadMatch
) -> tuple[ByHead, ByHead, ByHead]:
    """Both models by the heads of the first, and the changes with their errors."""
    names = sort_measures({*one.names, *two.names})
    texts = min(one.passed.texts, two.passed.texts)
    metadata = {"texts": texts, "tokens": one.passed.tokens, "complete": True}

    def by_head(kind: str, measured: dict[str, MeansAndErrors]) -> ByHead:
        means, errors = ({name: measured[name][side] for name in names} for side in (0, 1))
        return ByHead(kind=kind, blocks=match.blocks, means=means, errors=errors, metadata=metadata)

    def error(name: str) -> Float[np.ndarray, " h"]:
        """The standard error of a change, paired by text."""
        if texts < 2 or name in ("loss_change", LARGEST):
            return np.hypot(before.errors[name], after.errors[name])
        if name not in one.names or name not in two.names:
            return np.full(len(match.after), np.nan)
        ours, rows = (side.residuals(name)[:texts] for side in (one, two))
        moved = np.array([match.rearranged(row, two.blocks) for row in rows]) - ours
        return np.asarray(np.sqrt(np.square(moved).sum(0) * texts / (texts - 1)))

    before = by_head("before", {name: one.measured(name) for name in names})
    in_order = {}
    for name in names:
        means, errors = (match.rearranged(values, two.blocks) for values in two.measured(name))
        in_order[name] = means, errors
    after = by_head("after", in_order)
    changes = {name: (after.means[name] - before.means[name], error(name)) for name in names}
    return before, after, by_head("change", changes)


def _losses(
    before: Model, after: Model, inputs: ModelInputs, targets: Targets | None, progress: bool
) -> Losses | None:
    if targets is None and not before.predicts_next_token:
        return None
    one, two = (
        Evaluation.of(model, inputs, targets=targets, progress=progress).measure(())
        for model in (before, after)
    )
    change, error = metrics.weighted_mean(two.baseline - one.baseline, one.weights)
    known_error = None if bool(error.isnan()) else float(error)
    return Losses(one.baseline_mean[0], two.baseline_mean[0], float(change), known_error)


def _kind_changes(
    before: Model, after: Model, inputs: ModelInputs, match: HeadMatch, progress: bool
) -> dict[Address, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Heads whose kinds differ, with the kinds before and after."""
    one, two = (kinds(model, inputs, progress=progress) for model in (before, after))
    changes = {}
    for head, other in match.after.items():
        if other is not None:
            then, now = (
                tuple(dict.fromkeys(label.kind for label in labels))
                for labels in (one.of(head), two.of(other))
            )
            if set(then) != set(now):
                changes[head] = (then, now)
    return changes
