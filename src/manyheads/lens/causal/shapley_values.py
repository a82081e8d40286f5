"""Shapley values of heads: what each adds to the metric, averaged over the orders of all heads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError, check_int
from manyheads.formatting import plain_table, standard_error
from manyheads.lens.causal.ablation import AblationSteps, HeadAblation
from manyheads.lens.causal.replacements import Replacement
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.inputs.texts import Inputs, Targets, announce_long_text
from manyheads.lens.results import addresses, tables
from manyheads.models import build
from manyheads.progress import Progress
from manyheads.taps import Head, Sublayer

VALUE = "shapley"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Shapley(tables.ByHead):
    """The Shapley value of each head ("shapley"), and its standard error over permutations.

    Together they are the metric with all heads minus that without any of them. Heads that were not
    requested have NaN; they are always present.
    """

    @property
    def full(self) -> float:
        """The metric of the model with all heads."""
        return float(self.metadata["full"])

    @property
    def ablated(self) -> float:
        """The metric without any of the heads."""
        return float(self.metadata["ablated"])

    @property
    def permutations(self) -> int:
        """How many permutations were measured."""
        return int(self.metadata["permutations"])

    @property
    def complete(self) -> bool:
        """False if the measurement was interrupted before the last permutation."""
        return bool(self.metadata["complete"])

    def ranked(self) -> list[tuple[addresses.Address, float]]:
        """The measured heads and their values, the one that helps most first."""
        return self[VALUE].ranked(smallest=self.metadata["better"] == "lower")

    def ranking(self) -> Any:
        """A rich table of `ranked`."""
        column = self[VALUE]
        rows = [
            [str(head), f"{value:+.4f}", standard_error(column.error_of(head))]
            for head, value in self.ranked()
        ]
        return plain_table(["head"], [f"share of the {self.metadata['metric']}", "±"], rows)

    def _lines(self) -> Iterator[str]:
        yield (
            f"Shapley values of {len(self.ranked())} heads over {self.permutations} permutations; "
            f"{self.metadata['metric']} {self.full:.4f} with them, {self.ablated:.4f} without"
        )
        column = self[VALUE]
        for head, value in self.ranked()[:10]:
            yield f"  {head}  {tables.format_change(value, column.error_of(head))}"
        if not self.complete:
            yield "  interrupted before the last permutation"


@wrapping_models
def shapley(
    model: build.Model,
    texts: Inputs,
    heads: addresses.Heads = "all",
    replace_with: Replacement = "zero",
    metric: metrics.Metric = "loss",
    *,
    permutations: int = 20,
    antithetic: bool = True,
    truncate: float = 0.0,
    targets: Targets | None = None,
    stack: cached_run.StackName | None = None,
    sublayer: Sublayer | None = None,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Shapley:
    """Shapley values of heads, by sampling permutations (Castro et al. 2009).

    All heads are ablated, and put back one after another in a random order; the value of a head is
    the mean change of the metric when it is put back. So a head that lowers the loss has a negative
    value, and all values together are the metric with all heads minus that without any.

    With `antithetic` every other permutation is the reverse of the one before it, which lowers the
    error; errors are then over pairs. Errors are those of the sample of permutations, for these
    texts. With `truncate` (as in arXiv 1904.02868) a permutation ends once the metric is that close
    to that of the full model, and the heads that are left share the rest. Other arguments are those
    of `ablate`. Only the layers from the first that changes run. Ctrl-C keeps the permutations so
    far.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = shapley(model, [[1, 2, 3, 4], [5, 6, 7]], permutations=4)
    >>> bool(np.isclose(result["shapley"].means.sum(), result.full - result.ablated))
    True
    """
    check_int("permutations", permutations, minimum=1)
    if antithetic and permutations % 2:
        raise InputError(
            f"permutations={permutations} do not form pairs",
            f"use {permutations + 1}, or antithetic=False",
        )
    if truncate < 0:
        raise InputError(f"truncate must be at least 0, got {truncate}", "use 0 for no limit")
    ablation = HeadAblation.of(
        model,
        texts,
        heads,
        replace_with=replace_with,
        metric=metric,
        targets=targets,
        stack=stack,
        sublayer=sublayer,
        seed=seed,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    # The same permutations in whatever order the heads are named.
    ablation = replace(ablation, heads=tuple(sorted(ablation.heads)))
    orders = sample_orders(len(ablation.heads), permutations, seed, antithetic=antithetic)
    games = _Games(ablation, truncate)
    values, complete = games.play(orders)
    # What each head added in each permutation.
    order = np.array(orders[: len(values)])
    added: Float[np.ndarray, "p h"] = np.empty(order.shape)
    np.put_along_axis(added, order, np.diff(values, axis=1), axis=1)
    if antithetic:
        paired = len(added) // 2 * 2
        added = (added[0:paired:2] + added[1:paired:2]) / 2
    count = len(added)
    deviation = added.std(0, ddof=1) if count > 1 else np.nan
    columns = np.full((2, len(ablation.scope.heads)), np.nan)
    indices = {head: index for index, head in enumerate(ablation.scope.heads)}
    chosen = [indices[head] for head in ablation.heads]
    columns[0, chosen], columns[1, chosen] = added.mean(0), deviation / np.sqrt(count)
    return Shapley(
        kind=VALUE,
        blocks=ablation.scope.blocks,
        means={VALUE: columns[0]},
        errors={VALUE: columns[1]},
        metadata={
            "replace_with": replace_with,
            "metric": metrics.metric_name(metric),
            "better": metrics.better_direction(metric),
            "full": float(values[0, -1]),
            "ablated": float(values[0, 0]),
            "permutations": count * (2 if antithetic else 1),
            "antithetic": antithetic,
            "truncate": truncate,
            "texts": len(ablation.evaluation.inputs),
            "seed": seed,
            "complete": complete,
        },
    )


def sample_orders(heads: int, count: int, seed: int, *, antithetic: bool) -> list[list[int]]:
    """Random orders of heads; if `antithetic`, every other one is the reverse of the one before.

    >>> one, reverse = sample_orders(4, 2, seed=0, antithetic=True)
    >>> sorted(one), one[::-1] == reverse
    ([0, 1, 2, 3], True)
    """
    generator = torch.Generator().manual_seed(seed)
    orders: list[list[int]] = []
    while len(orders) < count:
        order = torch.randperm(heads, generator=generator).tolist()
        orders += [order, order[::-1]] if antithetic else [order]
    return orders


@dataclass(frozen=True, slots=True, eq=False)
class _Games:
    """The metric while heads are put back in some orders, all texts together."""

    ablation: HeadAblation
    truncate: float

    def play(self, orders: Sequence[Sequence[int]]) -> tuple[Float[np.ndarray, "p k"], bool]:
        """The metric after 0, 1, ... heads of each order, and whether all orders were measured.

        Orders run side by side where the texts are short. Ctrl-C keeps the finished groups.
        """
        evaluation, heads = self.ablation.evaluation, len(self.ablation.heads)
        batches = evaluation.batches
        tokens = max(sum(evaluation.sizes[text] for text in batch) for batch in batches)
        copies = max(2, evaluation.batch_tokens // max(1, tokens) // 2 * 2)
        # Examples of a wrapped model run one at a time.
        copies = 1 if evaluation.inputs.examples else copies
        groups = [orders[start : start + copies] for start in range(0, len(orders), copies)]
        results: list[Float[Tensor, "p k"]] = []
        total = len(orders) * len(batches) * heads
        bar = Progress("putting heads back", total=total, unit="runs", enabled=evaluation.progress)
        with bar, torch.no_grad(), self.ablation.running(len(orders) * heads):
            announce_long_text(bar, evaluation.sizes)
            try:
                for group in groups:
                    summed, weight = torch.zeros(len(group), heads + 1, dtype=torch.float64), 0.0
                    for batch in batches:
                        values, own = self._play_batch(batch, group)
                        # A text without targets has the value 0 and no weight.
                        summed, weight = summed + values * own, weight + own
                        bar.advance(len(group) * heads)
                    results.append(summed / weight)
            except KeyboardInterrupt:
                if sum(map(len, results)) < 2:
                    raise
        return torch.cat(results).numpy(), len(results) == len(groups)

    def _play_batch(
        self, texts: range, orders: Sequence[Sequence[int]]
    ) -> tuple[Float[Tensor, "p k"], float]:
        """The mean metric of a batch after 0, 1, ... heads of each order, and its weight."""
        heads, copies = self.ablation.heads, len(orders)
        steps = AblationSteps(self.ablation, texts, heads, copies)
        weights = steps.metric.weights.double().cpu()

        def mean(hidden: Any, number: int) -> Float[Tensor, " number"]:
            values = steps.metric(hidden, number).double().cpu()
            return metrics.weighted_mean(values.T, weights)[0]

        if not bool(weights.sum()):
            return torch.zeros(copies, len(heads) + 1, dtype=torch.float64), 0.0
        values = mean(steps.cached.hidden, 1).repeat(copies, len(heads) + 1)
        full = values[:, -1].clone()
        removed: list[tuple[Head, ...]] = [heads] * copies
        values[:, 0] = mean(steps.run(removed, min(head.layer for head in heads)), copies)
        # The last head gives the full model, which is known.
        for step in range(1, len(heads)):
            if bool(((values[:, step - 1] - full).abs() < self.truncate).all()):
                rest = torch.linspace(0, 1, len(heads) - step + 2, dtype=torch.float64)
                values[:, step - 1 :] = torch.lerp(values[:, [step - 1]], full[:, None], rest)
                break
            added = [heads[order[step - 1]] for order in orders]
            removed = [
                tuple(head for head in own if head != new)
                for own, new in zip(removed, added, strict=True)
            ]
            values[:, step] = mean(steps.run(removed, min(head.layer for head in added)), copies)
        return values, float(weights.sum())
