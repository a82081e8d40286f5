"""Two models side by side: which heads changed, by every statistic, and what became of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from manyheads.lens.ablation import ablate
from manyheads.lens.addresses import Address
from manyheads.lens.classes import TokenClasses
from manyheads.lens.comparison import Comparison, Losses
from manyheads.lens.dead import (
    ENTROPY_ABOVE,
    LOSS_BELOW,
    NORM_BELOW,
    dead_by_statistics,
    writes_next,
)
from manyheads.lens.effects import Evaluation
from manyheads.lens.given import Given, Targets
from manyheads.lens.kinds import kinds
from manyheads.lens.labels import Kinds
from manyheads.lens.matching import Match, match_heads, weight_changes
from manyheads.lens.measure_table import in_order
from manyheads.lens.metrics import weighed
from manyheads.lens.paired import ByText, measure_by_text
from manyheads.lens.passing import gather
from manyheads.lens.results import ByHead
from manyheads.lens.stand_ins import How
from manyheads.models.build import Model

__all__ = ["compare"]


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
