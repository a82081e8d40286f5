"""Two models side by side: which heads changed, by every statistic, and what became of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.lens.causal.ablation import ablate
from manyheads.lens.causal.evaluate import Evaluation
from manyheads.lens.causal.replacement import How
from manyheads.lens.diff.comparison import Comparison, Losses
from manyheads.lens.diff.head_matching import Match, match_heads, weight_changes
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.head_kinds.labels import Kinds
from manyheads.lens.inputs.batches import Passed, gather, lead
from manyheads.lens.inputs.metrics import weighed
from manyheads.lens.inputs.texts import Given, Targets, climb
from manyheads.lens.inputs.token_classes import TokenClasses
from manyheads.lens.measure.measure_table import in_order
from manyheads.lens.measure.measures import Counted, Tally, summed_by
from manyheads.lens.measure.statistics import ids_by_stack, make_plan
from manyheads.lens.measure.watcher import Observer
from manyheads.lens.redundant.dead_heads import (
    ENTROPY_ABOVE,
    LOSS_BELOW,
    NORM_BELOW,
    dead_by_statistics,
    writes_next,
)
from manyheads.lens.results.addresses import Address, Block, blocks_of
from manyheads.lens.results.by_head import ByHead
from manyheads.models.build import Model

Sums = tuple[Float[Tensor, "b h"], Float[Tensor, "b h"]]


@dataclass(slots=True, eq=False)
class _TallyByText(Tally):
    """A tally that keeps the sums and numbers of each text besides."""

    texts: dict[tuple[Block, str], Sums] = field(default_factory=dict)

    def add(self, block: Block, name: str, values: Float[Tensor, "n h"], counted: Counted) -> None:
        Tally.add(self, block, name, values, counted)
        kept = torch.ones_like(values, dtype=torch.bool)
        if counted.kept is not None:
            kept = counted.kept if counted.kept.dim() == 2 else counted.kept[:, None]
            kept = kept.expand_as(values)
        x = torch.where(kept, values.double(), 0.0)
        # Left where they are: to fetch them one by one would wait for the device each time.
        self.texts[block, name] = summed_by(x, counted), summed_by(kept.double(), counted)


@dataclass(slots=True, eq=False)
class ByText:
    """Sums and numbers of every measure, text by text in the order they were read."""

    blocks: tuple[Block, ...]
    tally: Tally = field(default_factory=Tally)
    batches: list[tuple[int, dict[tuple[Block, str], Sums]]] = field(default_factory=list)
    passed: Passed = Passed(0, 0, complete=False)

    @property
    def names(self) -> tuple[str, ...]:
        return in_order(self.tally.names)

    def means(self, name: str) -> Float[np.ndarray, " h"]:
        return self.tally.means(self.blocks, name)

    def errors(self, name: str) -> Float[np.ndarray, " h"]:
        """Over texts, or over the queries of an only text."""
        return self.tally.errors(self.blocks, name, over_sequences=self.passed.texts > 1)

    def residuals(self, name: str) -> Float[np.ndarray, "b h"]:
        """What each text adds to the mean's departure from what it is expected to be.

        (S_b - m N_b) / N of the ratio estimator, whose squares add up to the variance of the mean.
        """
        each = []
        for texts, sums in self.batches:
            device = next(iter(sums.values()))[0].device
            none = torch.zeros(texts, 1, dtype=torch.float64, device=device)
            parts = [
                sums.get((block, name), (none.expand(-1, block.heads),) * 2)
                for block in self.blocks
            ]
            joined = [torch.cat(side, dim=1) for side in zip(*parts, strict=True)]
            each.append(torch.stack(joined).cpu())
        sums, numbers = torch.cat(each, dim=1)
        total = numbers.sum(0)
        return np.asarray(((sums - sums.sum(0) / total * numbers) / total).numpy())


def measure_by_text(
    model: Model,
    given: Given,
    *,
    classes: TokenClasses = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> ByText:
    """All statistics, each text's apart from the others'."""
    plan = make_plan(model, classes)
    found = ByText(blocks_of(model))

    def visit(some: Given, numbers: list[int]) -> None:
        tally = _TallyByText()
        observer: Any = Observer(plan, ids_by_stack(model, some), numbers)
        observer.tally = tally
        with torch.inference_mode():
            climb(model, some, observer)
        found.tally.merge(tally)
        found.batches.append((len(some), tally.texts))

    found.passed = lead(
        model, given, visit, label="measuring", batch_tokens=batch_tokens, progress=progress
    )
    return found


def compare(
    before: Model,
    after: Model,
    texts: Any,
    *,
    origins: Mapping[Address, Address] | None = None,
    targets: Targets | None = None,
    classes: TokenClasses = None,
    roles: Literal["kinds", "not"] = "kinds",
    how: How | Literal["not"] = "not",
    loss_below: float = LOSS_BELOW,
    entropy_above: float = ENTROPY_ABOVE,
    norm_below: float = NORM_BELOW,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Every statistic of every head in both models, and what changed beyond its error.

    Both read the same texts, token by token as the first one's tokenizer has them, and a change is
    compared text by text, so that its error is that of the change alone; of an only text the errors
    are over queries, as if the two had been measured apart. Heads are matched by address; where the
    second model has fewer in a layer, by their weights, or as `origins` say of a pruned one (see
    `manyheads.surgery.origins`). Models of other shapes are refused.

    A head died that is dead after and was not before, by entropy and norm (see `dead`), and with
    `how="zero"` by ablation too, which ablates every head of both. It has a new role where its
    kinds are others (see `kinds`, which tries both models on the texts; `roles="not"` leaves it
    out). The loss is that of next tokens, or of `targets`.

    >>> from manyheads.models.build import build
    >>> one = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> found = compare(one, one, [[1, 2, 3, 4], [5, 6, 7]], roles="not")
    >>> found.losses.change, float(abs(found.change.means["entropy"]).max())
    (0.0, 0.0)
    """
    match = match_heads(before, after, origins)
    given = gather(before, texts)
    sides = [
        _Side.of(
            model,
            given,
            targets,
            classes=classes,
            how=how,
            batch_tokens=batch_tokens,
            progress=progress,
        )
        for model in (before, after)
    ]
    one, two, change = _side_by_side(sides[0], sides[1], match)
    thresholds = {
        "loss_below": loss_below,
        "entropy_above": entropy_above,
        "norm_below": norm_below,
    }
    dead_then, dead_now = (dead_by_statistics(each, **thresholds).reasons for each in (one, two))
    complete = all(side.text.passed.complete for side in sides)
    return Comparison(
        before=one,
        after=two,
        change=change,
        weights=weight_changes(before, after, match),
        after_at=match.after,
        losses=_losses(before, after, given, targets, progress),
        died={head: why for head, why in dead_now.items() if head not in dead_then},
        revived={
            head: why
            for head, why in dead_then.items()
            if head not in dead_now and match.after[head] is not None
        },
        roles=_roles(before, after, given, match, progress) if roles == "kinds" else {},
        facts=one.facts | thresholds | {"how": how, "complete": complete},
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """What was measured of one model; ablation's changes by head, where they were asked for."""

    text: ByText
    loss_change: tuple[Float[np.ndarray, " h"], Float[np.ndarray, " h"]] | None

    @classmethod
    def of(
        cls,
        model: Model,
        given: Given,
        targets: Targets | None,
        *,
        classes: TokenClasses,
        how: How | Literal["not"],
        batch_tokens: int | None,
        progress: bool,
    ) -> "_Side":
        text = measure_by_text(
            model, given, classes=classes, batch_tokens=batch_tokens, progress=progress
        )
        if how == "not":
            return cls(text, None)
        values: dict[Address, tuple[float, float]] = {}
        for name, sublayer in dict.fromkeys((each.stack, each.sublayer) for each in text.blocks):
            found = ablate(
                model,
                given,
                replace_with=how,
                targets=targets,
                stack=name,  # type: ignore[arg-type]
                sublayer=sublayer,
                room=batch_tokens,
                shown=progress,
            )
            column = found["change"]
            pairs = zip(column.means.tolist(), column.errors.tolist(), strict=True)
            values |= dict(zip(found.addresses, pairs, strict=True))
        order = [values[head] for block in text.blocks for head in block.addresses]
        means, errors = np.array(order).T
        return cls(text, (means, errors))

    @property
    def names(self) -> tuple[str, ...]:
        return self.text.names if self.loss_change is None else ("loss_change", *self.text.names)

    def measured(self, name: str) -> tuple[Float[np.ndarray, " h"], Float[np.ndarray, " h"]]:
        """Means and errors; NaN for a measure that this model does not have."""
        if name == "loss_change" and self.loss_change is not None:
            return self.loss_change
        return self.text.means(name), self.text.errors(name)


def _side_by_side(one: _Side, two: _Side, match: Match) -> tuple[ByHead, ByHead, ByHead]:
    """Both models by the heads of the first, and the changes with their errors."""
    both = {*one.names, *two.names}
    names = [*(["loss_change"] if "loss_change" in both else [])]
    names += in_order(both - {"loss_change"})
    texts = min(one.text.passed.texts, two.text.passed.texts)
    facts = {"texts": texts, "tokens": one.text.passed.tokens, "complete": True}
    results = []
    for side, result in ((one, "before"), (two, "after")):
        means, errors = {}, {}
        for name in names:
            found = side.measured(name)
            if side is two:
                mean, error = (match.rearranged(each, two.text.blocks) for each in found)
            else:
                mean, error = found
            means[name], errors[name] = mean, error
        results.append(
            ByHead(kind=result, blocks=match.blocks, means=means, errors=errors, facts=facts)
        )
    first, second = results
    changes = {name: second.means[name] - first.means[name] for name in names}
    errors = {
        name: _error(one, two, match, name, texts)
        if texts > 1 and name != "loss_change"
        else np.hypot(first.errors[name], second.errors[name])
        for name in names
    }
    change = ByHead(kind="change", blocks=match.blocks, means=changes, errors=errors, facts=facts)
    return first, second, change


def _error(one: _Side, two: _Side, match: Match, name: str, texts: int) -> Float[np.ndarray, " h"]:
    """The standard error of a change, texts being compared with themselves."""
    missing = np.full(len(match.after), np.nan)
    if name not in one.names or name not in two.names:
        return missing
    ours = one.text.residuals(name)[:texts]
    theirs = np.array(
        [match.rearranged(row, two.text.blocks) for row in two.text.residuals(name)[:texts]]
    )
    return np.asarray(np.sqrt(np.square(theirs - ours).sum(0) * texts / (texts - 1)))


def _losses(
    before: Model, after: Model, given: Given, targets: Targets | None, progress: bool
) -> Losses | None:
    if targets is None and not writes_next(before):
        return None
    one, two = (
        Evaluation.of(model, given, targets=targets, progress=progress).measure(())
        for model in (before, after)
    )
    change, error = weighed(two.baseline - one.baseline, one.weights)
    told = None if bool(error.isnan()) else float(error)
    return Losses(one.whole[0], two.whole[0], float(change), told)


def _roles(
    before: Model, after: Model, given: Given, match: Match, progress: bool
) -> dict[Address, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Heads whose kinds differ, with the kinds before and after, best first."""
    one, two = (kinds(model, given, progress=progress) for model in (before, after))
    found = {}
    for head, other in match.after.items():
        if other is None:
            continue
        then, now = _kinds_of(one, head), _kinds_of(two, other)
        if set(then) != set(now):
            found[head] = (then, now)
    return found


def _kinds_of(found: Kinds, head: Address) -> tuple[str, ...]:
    return tuple(dict.fromkeys(label.kind for label in found.of(head)))
