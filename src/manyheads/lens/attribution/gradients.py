"""Attribution by gradients: integrated along a path to tokens or heads, and times attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError, ShapeError
from manyheads.lens.inputs.cached_run import Change, Edits, Part, StackName, Trunk, part_of
from manyheads.lens.inputs.metrics import Judge, Metric, judge, weighed
from manyheads.lens.inputs.texts import Targets, read, run
from manyheads.lens.results.by_head import ByHead
from manyheads.lens.results.files import Result
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Sublayer, Tap

POWER = 4
FEW_TO_MANY = (32, 64, 128, 256, 512)
ENOUGH = 1e-3
# The points of a path are found in a matrix of so many rows.
MOST_STEPS = 4096


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ByToken(Result):
    """What each token adds to the metric of its text, and what all should add up to."""

    tokens: Ragged
    expected: Float[Tensor, " b"]
    steps: int

    def of(self, text: int) -> Float[Tensor, " _"]:
        return self.tokens.of(text)

    @property
    def completeness(self) -> float:
        """How far the tokens are from adding up to the difference of the metric, at worst."""
        lengths = self.tokens.lengths
        summed = self.expected.new_zeros(len(lengths))
        summed = summed.index_add(0, lengths.sequence_of_token, self.tokens.values)
        return float((summed - self.expected).abs().max())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadGradients(Result):
    """What each head adds to the metric of each text; `heads` has the means over texts."""

    heads: ByHead
    by_head: Float[Tensor, "b heads"]
    expected: Float[Tensor, " b"]
    steps: int

    @property
    def completeness(self) -> float:
        """How far the heads are from adding up to the difference of the metric, at worst."""
        return float((self.by_head.sum(1) - self.expected).abs().max())


Found = TypeVar("Found", ByToken, HeadGradients)


def integrate_inputs(
    model: Model,
    texts: Any,
    metric: Metric = "loss",
    *,
    baseline: Literal["zero"] | Ragged = "zero",
    steps: int | None = None,
    targets: Targets | None = None,
    stack: StackName | None = None,
    progress: bool = True,
) -> ByToken:
    """Integrated gradients (arXiv 1703.01365) from a baseline to what enters the first layer.

    The baseline is a stream of zeros, or one of your own, laid out as the texts. Without `steps`
    they are doubled until tokens add up to the difference within a thousandth, or to 512. Norms
    turn sharply near nothing, and routers of experts jump: `completeness` tells what that costs.
    """
    _check_steps(steps)
    part, given = part_of(model, stack), read(model, texts)
    start = Site(-1, Tap.EMBEDDINGS, stack=part.stack_name)
    judged = judge(model, given, range(len(given)), metric, targets)
    with resting(model):
        with torch.no_grad():
            trunk = Trunk(part, given, layers=(), keep=[start])
            end = trunk[start]
            begin = _begin(baseline, end)
            at_start = judged(trunk.go_on(end.with_values(begin), 0))[0]
            expected = (judged(trunk.hidden)[0] - at_start).double()
        far = end.values - begin

        def gradient(place: float) -> Tensor:
            x = (begin + place * far).requires_grad_()
            value = judged(trunk.go_on(end.with_values(x), 0)).sum()
            return (torch.autograd.grad(value, x)[0].double() * far.double()).sum(-1)

        def result(tokens: Tensor, taken: int) -> ByToken:
            return ByToken(tokens=end.with_values(tokens), expected=expected, steps=taken)

        return _integrate(gradient, result, steps, progress)


def integrate_heads(
    model: Model,
    texts: Any,
    metric: Metric = "loss",
    *,
    layers: Sequence[int] | None = None,
    steps: int | None = None,
    targets: Targets | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    progress: bool = True,
) -> HeadGradients:
    """Integrated gradients on gates that open all heads of some layers from 0 to 1 together.

    The gates are the mask of arXiv 1905.10650 and the path that of arXiv 1703.01365. Attributions
    add up to the metric of the model less that of one without any of these heads. Steps are as in
    `integrate_inputs`.
    """
    _check_steps(steps)
    part, given = part_of(model, stack, sublayer), read(model, texts)
    chosen = part.layers if layers is None else tuple(layers)
    if not set(chosen) <= set(part.layers):
        raise InputError(f"layers {chosen} do not all have heads", f"use some of {part.layers}")
    judged = judge(model, given, range(len(given)), metric, targets)
    with resting(model):
        with torch.no_grad():
            gates = _Gates(part, Trunk(part, given, layers=chosen), chosen, judged)
            expected = (gates.value(1.0) - gates.value(0.0)).double().cpu()

        def result(found: Tensor, taken: int) -> HeadGradients:
            return _by_head(part, chosen, found.cpu(), expected, taken, judged)

        return _integrate(gates.gradient, result, steps, progress)


def gradient_times_attention(
    model: Model,
    texts: Any,
    metric: Metric = "loss",
    *,
    layers: Sequence[int] | None = None,
    targets: Targets | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
) -> dict[int, Patterns]:
    """Each weight of attention times the gradient of its text's metric, by layer.

    This is the first-order effect of taking a single weight away (arXiv 1902.10186 compares it with
    attention). The patterns are formed, n x n a head.
    """
    part, given = part_of(model, stack, sublayer), read(model, texts)
    chosen = part.layers if layers is None else tuple(layers)
    judged = judge(model, given, range(len(given)), metric, targets)
    sites = {layer: part.site(layer, Tap.PATTERN) for layer in chosen}
    final = "decoder" if part.stack_name == "encoder" else part.stack_name
    watch = _Tracked([*sites.values(), Site(-1, Tap.FINAL, stack=final)])
    with resting(model), torch.enable_grad():
        run(model, given, watch)
        hidden = watch[Site(-1, Tap.FINAL, stack=final)]
        assert isinstance(hidden, Ragged)
        seen = {layer: watch[site] for layer, site in sites.items()}
        flat = [each for patterns in seen.values() for each in _patterns(patterns).each]
        slopes = torch.autograd.grad(judged(hidden).sum(), flat)
    products = iter(zip(flat, slopes, strict=True))
    found = {}
    for layer, patterns in seen.items():
        mine = [next(products) for _ in _patterns(patterns).each]
        found[layer] = Patterns(tuple((pattern * slope).detach() for pattern, slope in mine))
    return found


class _Tracked(Record):
    """Keeps what it sees, as something that has a gradient."""

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns:  # type: ignore[override]
        if isinstance(value, Patterns):
            value = Patterns(
                tuple(each if each.requires_grad else each.requires_grad_() for each in value.each)
            )
        super().see(site, value)
        return value


class _Gates:
    """The metric as a function of one number per head and text, by which outputs are multiplied."""

    def __init__(self, part: Part, trunk: Trunk, layers: Sequence[int], judged: Judge) -> None:
        self.part, self.trunk, self.layers, self.judged = part, trunk, tuple(layers), judged

    def value(self, opened: float) -> Float[Tensor, " b"]:
        return self._run([self._gate(layer, opened) for layer in self.layers])

    def gradient(self, opened: float) -> Float[Tensor, "b heads"]:
        gates = [self._gate(layer, opened).requires_grad_() for layer in self.layers]
        slopes = torch.autograd.grad(self._run(gates).sum(), gates)
        return torch.cat(slopes, dim=1).double()

    def _gate(self, layer: int, opened: float) -> Float[Tensor, "b h"]:
        spoken = self.trunk.head_outputs(layer)
        return spoken.values.new_full((len(spoken), spoken.values.shape[1]), opened)

    def _run(self, gates: list[Tensor]) -> Float[Tensor, " b"]:
        changes = {
            self.part.site(layer, Tap.HEAD_OUTPUT): self._times(layer, gate)
            for layer, gate in zip(self.layers, gates, strict=True)
        }
        return self.judged(self.trunk.resume(min(self.layers), Edits(changes)))[0]

    def _times(self, layer: int, gate: Float[Tensor, "b h"]) -> Change:
        owners = self.trunk.head_outputs(layer).lengths.sequence_of_token
        return lambda values: values * gate[owners].unsqueeze(-1)


def _by_head(
    part: Part,
    layers: Sequence[int],
    found: Float[Tensor, "b some"],
    expected: Float[Tensor, " b"],
    steps: int,
    judged: Judge,
) -> HeadGradients:
    blocks = tuple(block for block in part.blocks if block.layer in layers)
    means, errors = weighed(found, judged.weights.cpu())
    return HeadGradients(
        heads=ByHead(
            kind="integrated gradients",
            blocks=blocks,
            means={"attribution": means.numpy()},
            errors={"attribution": errors.numpy()},
            facts={"texts": len(found)},
        ),
        by_head=found,
        expected=expected,
        steps=steps,
    )


def _begin(baseline: Literal["zero"] | Ragged, end: Ragged) -> Float[Tensor, "n c"]:
    if isinstance(baseline, str):
        return torch.zeros_like(end.values)
    if baseline.lengths.each != end.lengths.each:
        raise ShapeError(
            f"the baseline has lengths {baseline.lengths.each}",
            f"give {end.lengths.each}, as the texts",
        )
    return baseline.values.to(end.values)


def _integrate(
    gradient: Callable[[float], Tensor],
    result: Callable[[Tensor, int], Found],
    steps: int | None,
    progress: bool,
) -> Found:
    """The integral by points of Gauss and Legendre, more and more until they are enough."""
    why = ""
    for count in FEW_TO_MANY if steps is None else (steps,):
        parts = []
        label = f"integrating in {count} steps{why}"
        with Progress(label, total=count, unit="steps", enabled=progress) as bar:
            for place, weight in _points(count):
                parts.append(weight * gradient(place))
                bar.advance()
        found = result(torch.stack(parts).sum(0), count)
        if found.completeness <= ENOUGH:
            break
        why = f", as {count} are off by {found.completeness:.1e}"
    return found


def _check_steps(steps: int | None) -> None:
    """Before the model is run in vain."""
    if steps is None:
        return
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps={steps} is no path", "use a whole number, 1 or more")
    if steps > MOST_STEPS:
        raise InputError(f"steps={steps} are more than help", f"use {MOST_STEPS} or fewer")


def _points(steps: int) -> list[tuple[float, float]]:
    """Places between 0 and 1 and their weights, which sum to 1.

    Norms turn sharply where a stream begins at nothing, so most places are near 0.

    >>> round(sum(weight for _, weight in _points(8)), 6)
    1.0
    """
    places, weights = np.polynomial.legendre.leggauss(steps)
    places, weights = (places + 1) / 2, weights / 2
    stretched = weights * POWER * places ** (POWER - 1)
    return list(zip((places**POWER).tolist(), stretched.tolist(), strict=True))


def _patterns(value: Ragged | Patterns) -> Patterns:
    assert isinstance(value, Patterns)
    return value
