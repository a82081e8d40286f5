"""Selection of heads to remove, and the cost of removing them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from sys import maxsize
from typing import ClassVar

from manyheads.bridge.automatic import native_models_only
from manyheads.lens.causal.ablation import HeadAblation
from manyheads.lens.causal.evaluate import Effects, Variant
from manyheads.lens.causal.gradient_importance import product_by_head
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.inputs.texts import Inputs, Targets
from manyheads.lens.redundant.heads import redundancy
from manyheads.lens.results.addresses import Address
from manyheads.models.build import Model
from manyheads.surgery.pruning import ReplaceWith, prune
from manyheads.surgery.selection import l0_selection, orders
from manyheads.surgery.selection.results import Candidate, Order, Selection, UnitName
from manyheads.taps import Head, Site, Sublayer, Tap


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HeadSelection(Selection[Address]):
    """Heads in the order of their removal."""

    unit: ClassVar[UnitName] = "heads"

    @property
    def heads(self) -> tuple[Address, ...]:
        """The selected heads, as `prune` takes them."""
        return self.order[: self.count]


@native_models_only
def select_heads(
    model: Model,
    texts: Inputs,
    by: Order = "ablation",
    *,
    fraction: float | None = None,
    budget: float | None = None,
    iterative: bool = False,
    replace_with: ReplaceWith = "zero",
    metric: metrics.Metric = "loss",
    targets: Targets | None = None,
    stack: cached_run.StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    l0: l0_selection.L0Config = l0_selection.DEFAULT_L0,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> HeadSelection:
    """Select heads to prune, with the curve of the cost and its standard errors.

    A `fraction` of the heads is selected, or as many as cost at most `budget` of the metric (nats
    per token of the loss); with both, the fraction must fit the budget, and with neither all heads
    that cost nothing are selected. `by` is exact "ablation" of each head, "gradient" importance
    (arXiv 1905.10650), "redundancy" (one of each pair of duplicates), "l0" (gates trained to close,
    arXiv 1905.09418), or "random", the control. `iterative` measures all heads that are left again
    after each removal, by ablation, gradient or redundancy. The curve is always exact. Harmful
    heads, without which the metric improves by more than a standard error, go first.
    `replace_with` is what replaces a head, as in `prune`; other options are as in `lens.ablate`.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> selection = select_heads(model, [[1, 2, 3, 4], [5, 6, 7]], fraction=0.5)
    >>> len(selection.heads), len(selection.curve), selection.met
    (2, 2, True)
    """
    request = orders.SelectionRequest("heads", by, fraction, budget, iterative)
    ablation = HeadAblation.of(
        model,
        texts,
        replace_with=replace_with,
        metric=metric,
        targets=targets,
        stack=stack,
        sublayer=sublayer,
        mixers=False,
        seed=seed,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    evaluation = ablation.evaluation
    unit = HeadUnit(
        evaluation=evaluation, ablation=ablation, replace_with=replace_with, l0=l0, seed=seed
    )
    return orders.select(unit, HeadSelection, request)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadUnit(orders.Unit[Address]):
    """The heads of one attention of every layer."""

    ablation: HeadAblation
    replace_with: ReplaceWith
    name: ClassVar[UnitName] = "heads"
    # Ablations share the layers below the head, so all suspects can be ablated.
    max_suspects: ClassVar[int] = maxsize

    @property
    def part(self) -> cached_run.HeadScope:
        return self.ablation.scope

    @property
    def units(self) -> list[Address]:
        return [address for block in self.part.blocks for address in block.addresses]

    def group(self, unit: Address) -> int | None:
        """The layer, if it must keep a head because it has a gate after the output projection.

        Without heads the gate would gate a bias, or the mean of the heads, which no bias can
        express.
        """
        config = self.part.attention(unit.head.layer).config
        writes = self.replace_with == "mean" or config.bias in ("output", "all")
        bound = any(
            gate.at == "final" and (writes or gate.operation == "add") for gate in config.gates
        )
        return unit.head.layer if bound else None

    def without(self, removed: Sequence[Address]) -> Variant:
        return Variant(self.evaluation.model, self.ablation.changes(_heads(removed)))

    def measure(self, sets: Sequence[Sequence[Address]], fixed: Sequence[Address] = ()) -> Effects:
        return self.ablation.measure([_heads(heads) for heads in sets], _heads(fixed))

    def measure_in_order(self, order: Sequence[Address], counts: Sequence[int]) -> Effects:
        if list(counts) == list(range(1, len(order) + 1)):
            return self.ablation.measure_in_order(_heads(order))
        return self.measure([order[:count] for count in counts])

    def gradient_scores(self, removed: Sequence[Address]) -> dict[Address, orders.GradientScore]:
        sites = [self.part.site(layer, Tap.HEAD_OUTPUT) for layer in self.part.layers]
        changes = self.ablation.changes(_heads(removed))
        scores = self.evaluation.gradient_scores(sites, product_by_head, changes=changes)
        by_head = orders.scores_by_unit(self.units, scores)
        return {head: by_head[head] for head in self.remaining(removed)}

    def redundant(self, removed: Sequence[Address]) -> list[Candidate[Address]]:
        """The less important head of each pair of duplicates, the most similar first."""
        remaining = self.remaining(removed)
        if not remaining:
            return []
        model = self.evaluation.model
        if removed:
            model = prune(model, removed, self.replace_with, self.evaluation.inputs)
        pairs = redundancy(
            model,
            self.evaluation.inputs,
            stack=self.part.stack_name,
            sublayer=self.part.sublayer,
            progress=self.evaluation.progress,
        ).duplicates
        # The smaller model numbers the remaining heads in the same order.
        blocks = replace(self.part, model=model).blocks
        counted = [address for block in blocks for address in block.addresses]
        names = dict(zip(counted, remaining, strict=True))
        worth = self.importance(removed)
        candidates: dict[Address, Candidate[Address]] = {}
        for pair in pairs:
            # A head of a mixer has no name here, since it cannot be cut out.
            heads = [names[head] for head in (pair.one, pair.other) if head in names]
            if len(heads) < 2 or any(head in candidates for head in heads):
                continue
            stays, goes = sorted(heads, key=lambda head: -worth[head])
            similarity = min(pair.patterns, pair.outputs)
            reason = f"duplicate of {stays}, similarity {similarity:.2f}"
            candidates[goes] = Candidate(goes, reason, -similarity)
        return list(candidates.values())

    def gate_probability(self) -> dict[Address, float]:
        gates = self.train_gates()
        sites = [Site(u.head.layer, Tap.HEAD_OUTPUT, u.sublayer, u.stack) for u in self.units]
        pairs = zip(self.units, sites, strict=True)
        return {unit: float(gates[site][unit.head.head]) for unit, site in pairs}


def _heads(addresses: Sequence[Address]) -> tuple[Head, ...]:
    return tuple(address.head for address in addresses)
