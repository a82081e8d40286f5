"""Activation patching: how much of a clean run one activation restores in a corrupted run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.causal.evaluate import default_batch_tokens, group_by
from manyheads.lens.inputs import aligned_pairs, cached_run, metrics
from manyheads.lens.inputs.texts import Inputs, Targets, read_inputs
from manyheads.lens.results.tables import Tabular
from manyheads.models.build import Model, eval_mode
from manyheads.progress import Progress
from manyheads.ragged import Lengths
from manyheads.taps import Head, Site, Sublayer, Tap

Component = Literal["head", "residual", "attention", "cross", "feedforward"]
# Of all tokens at once, of each in turn, or of those at some positions in turn.
Positions = Literal["all", "each"] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Patch:
    """An activation of the clean run: a component of a layer, of one or all heads and positions."""

    component: Component
    layer: int
    head: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        where = str(Head(self.layer, self.head)) if self.head is not None else f"L{self.layer}"
        at = "" if self.position is None else f" at {self.position}"
        return f"{self.component} {where}{at}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Patching(Tabular):
    """The fraction of the metric that each patch recovers: 1 restores the clean run.

    That is (metric - corrupted) / (clean - corrupted); `errors` are its standard errors over texts.
    """

    clean: float
    corrupted: float
    recovered: dict[Patch, float]
    errors: dict[Patch, float] = field(default_factory=dict)
    complete: bool = True

    def __getitem__(self, patch: Patch) -> float:
        return self.recovered[patch]

    def ranked(self, top_k: int | None = None) -> list[tuple[Patch, float]]:
        """Patches by what they recover, largest first."""
        return sorted(self.recovered.items(), key=lambda pair: -pair[1])[:top_k]

    def rows(self) -> list[dict[str, Any]]:
        return [
            asdict(patch)
            | {"recovered": recovered, "recovered_error": self.errors.get(patch, float("nan"))}
            for patch, recovered in self.recovered.items()
        ]

    def __str__(self) -> str:
        first = f"clean {self.clean:.4f}, corrupted {self.corrupted:.4f}; best patches:"
        best = (f"  {patch}  {fraction:.3f}" for patch, fraction in self.ranked(10))
        return "\n".join((first, *best))

    __repr__ = __str__


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunPair:
    """A clean and a corrupted run of the same lengths, and the metric of each text in both."""

    scope: cached_run.HeadScope
    clean: cached_run.CachedRun
    corrupted: cached_run.CachedRun
    bound_metric: metrics.BoundMetric
    ends: tuple[Float[Tensor, " b"], Float[Tensor, " b"]]
    batch_tokens: int

    @classmethod
    def of(
        cls,
        scope: cached_run.HeadScope,
        clean: Inputs,
        corrupted: Inputs,
        metric: metrics.Metric,
        targets: Targets | None = None,
        *,
        keep: Sequence[Site] = (),
        batch_tokens: int | None = None,
    ) -> "RunPair":
        model = scope.model
        inputs = [read_inputs(model, texts) for texts in (clean, corrupted)]
        aligned_pairs.check_aligned(model, *inputs)
        layers = range(len(scope.stack.layers))
        sites = [*keep, *(site for layer in layers for site in _sites(scope, layer).values())]
        bound_metric = metrics.bind_metric(model, inputs[0], range(len(inputs[0])), metric, targets)
        runs = [cached_run.CachedRun(scope, texts, layers=layers, record=sites) for texts in inputs]
        ends = [bound_metric(run.hidden)[0].double().cpu() for run in runs]
        return cls(
            scope=scope,
            clean=runs[0],
            corrupted=runs[1],
            bound_metric=bound_metric,
            ends=(ends[0], ends[1]),
            batch_tokens=default_batch_tokens(model) if batch_tokens is None else batch_tokens,
        )

    def recovered(
        self, values: Float[Tensor, " b"], base: Literal["corrupted", "clean"] = "corrupted"
    ) -> tuple[float, float]:
        """How far the metric has moved from the base run to the other (0 to 1), and its error."""
        clean, corrupted = self.ends
        start, end = (corrupted, clean) if base == "corrupted" else (clean, corrupted)
        weights = self.bound_metric.weights.double().cpu()
        full = metrics.weighted_mean(end - start, weights)[0]
        moved, error = metrics.weighted_mean(values - start, weights)
        return float(moved / full), float((error / full).abs())

    @property
    def lengths(self) -> Lengths:
        site = cached_run.layer_input_site(self.scope.stack, self.scope.layers[0])
        return self.corrupted[site].lengths

    @property
    def copies(self) -> int:
        return max(1, self.batch_tokens // max(1, self.lengths.total))


@wrapping_models
def patch(
    model: Model,
    clean: Inputs,
    corrupted: Inputs,
    metric: metrics.Metric = "loss",
    *,
    components: Sequence[Component] = ("head",),
    positions: Positions = "all",
    layers: Sequence[int] | None = None,
    targets: Targets | None = None,
    stack: cached_run.StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Patching:
    """Activation patching: one component of one layer at a time, at all positions or one by one.

    "head" is a head's output; "attention", "cross" and "feedforward" are what the sublayer adds to
    the residual stream; "residual" is the stream that enters a layer. `layers` are those to patch,
    by default all, and `positions` may be a list. Metric and targets are those of the clean run.
    Ctrl-C keeps the results so far.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = patch(model, [[1, 2, 3]], [[4, 2, 3]], components=("residual",), positions="each")
    >>> round(result[Patch("residual", layer=0, position=0)], 5)
    1.0
    """
    scope = cached_run.head_scope(model, stack, sublayer)
    with eval_mode(model), torch.no_grad():
        runs = RunPair.of(scope, clean, corrupted, metric, targets, batch_tokens=batch_tokens)
        patches = list(_patches(runs, components, positions, layers))
        return _measure(runs, patches, progress)


def _measure(runs: RunPair, patches: list[Patch], progress: bool) -> Patching:
    clean, corrupted = runs.ends
    if torch.equal(clean, corrupted):
        raise InputError(
            f"the metric is {float(clean.mean()):.4g} in both the clean and the corrupted run",
            "corrupt a token that the answer depends on",
        )
    weights = runs.bound_metric.weights.double().cpu()
    recovered, errors, complete = {}, {}, True
    with Progress("patching", total=len(patches), unit="patches", enabled=progress) as bar:
        try:
            for group in group_by(attrgetter("component", "layer"), patches, runs.copies):
                for patch, values in zip(group, _run(runs, group).double().cpu(), strict=True):
                    recovered[patch], errors[patch] = runs.recovered(values)
                bar.advance(len(group))
        except KeyboardInterrupt:
            if not recovered:
                raise
            complete = False
    return Patching(
        clean=float(metrics.weighted_mean(clean, weights)[0]),
        corrupted=float(metrics.weighted_mean(corrupted, weights)[0]),
        recovered=recovered,
        errors=errors,
        complete=complete,
    )


def _run(runs: RunPair, group: list[Patch]) -> Float[Tensor, "copies b"]:
    """The metric under patches of one component of one layer, one copy of the batch per patch."""
    component, layer = group[0].component, group[0].layer
    site = _sites(runs.scope, layer)[component]
    clean, positions = runs.clean[site].values, runs.lengths.positions

    def change(values: Tensor) -> Tensor:
        copies = values.unflatten(0, (len(group), -1)).clone()
        for copy, patch in zip(copies, group, strict=True):
            rows: Any = slice(None) if patch.position is None else positions == patch.position
            if patch.head is None:
                copy[rows] = clean[rows]
            else:
                copy[rows, patch.head] = clean[rows, patch.head]
        return copies.flatten(0, 1)

    hidden = runs.corrupted.resume(layer, cached_run.ActivationEditor({site: change}), len(group))
    return runs.bound_metric(hidden, len(group))


def _sites(scope: cached_run.HeadScope, layer: int) -> dict[Component, Site]:
    """The site of each component that the layer has."""
    config, name = scope.stack.config.layers[layer], scope.stack_name
    sites: dict[Component, Site] = {"residual": cached_run.layer_input_site(scope.stack, layer)}
    if scope.heads_of(layer):
        sites["head"] = scope.site(layer, Tap.HEAD_OUTPUT)
    if config.attention is not None or config.mixer is not None:
        sites["attention"] = Site(layer, Tap.OUTPUT, Sublayer.ATTENTION, name)
    if config.cross is not None:
        sites["cross"] = Site(layer, Tap.OUTPUT, Sublayer.CROSS, name)
    if config.feedforward is not None:
        sites["feedforward"] = Site(layer, Tap.OUTPUT, Sublayer.FEEDFORWARD, name)
    return sites


def _patches(
    runs: RunPair,
    components: Sequence[Component],
    positions: Positions,
    layers: Sequence[int] | None,
) -> Iterator[Patch]:
    chosen: Sequence[int] | tuple[None] = (None,)
    if positions != "all":
        chosen = range(runs.lengths.longest) if positions == "each" else list(positions)
        for position in chosen:
            if not 0 <= position < runs.lengths.longest:
                raise InputError(
                    f"there is no position {position}", f"use 0 to {runs.lengths.longest - 1}"
                )
    depth = len(runs.scope.stack.layers)
    for layer in layers or ():
        if not 0 <= layer < depth:
            raise InputError(f"there is no layer {layer}", f"use 0 to {depth - 1}")
    for component in components:
        own = [
            layer
            for layer in (range(depth) if layers is None else layers)
            if component in _sites(runs.scope, layer)
        ]
        if not own:
            raise InputError(
                f"no layer has a component {component!r}",
                'use "head", "residual", "attention", "cross" or "feedforward"',
            )
        for layer in own:
            heads = range(runs.scope.heads_of(layer)) if component == "head" else (None,)
            yield from (Patch(component, layer, head, at) for head in heads for at in chosen)
