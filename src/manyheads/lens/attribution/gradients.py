"""Attribution by gradients: integrated gradients of tokens and heads, gradient times attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import ConvergenceError, InputError, ShapeError
from manyheads.formatting import pluralise
from manyheads.lens.inputs import cached_run
from manyheads.lens.inputs.metrics import Metric, bind_metric, weighted_mean
from manyheads.lens.inputs.texts import Inputs, Targets, read_inputs
from manyheads.lens.results.files import Result
from manyheads.lens.results.tables import ByHead
from manyheads.models.build import Model, eval_mode
from manyheads.models.model_interface import ModelInputs
from manyheads.models.vision import VisionConfig
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Sublayer, Tap

POWER = 4
TOLERANCE = 1e-3
# Random tokens whose mean is the baseline.
BASELINE_TOKENS = 32
# Gradients per piece of a path, gradients in all, and the width below which a piece is a jump.
PIECE_STEPS = 8
MAX_GRADIENTS = 1024
MIN_WIDTH = 2.0**-24
# Quadrature points are eigenvalues of a matrix of this size.
MAX_STEPS = 4096


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PathAttribution(Result):
    """What some parts add to the metric of each text along a path of `steps` steps.

    `expected` is what they should sum to.
    """

    expected: Float[Tensor, " b"]
    steps: int

    @property
    def sums(self) -> Float[Tensor, " b"]:
        """The sum over the parts of each text."""
        raise NotImplementedError

    @property
    def completeness(self) -> float:
        """The largest difference between the sum over parts and the expected one."""
        return float((self.sums - self.expected).abs().max())

    @property
    def converged(self) -> bool:
        """Whether the integration ended within its tolerance."""
        return is_converged(self.completeness, self.expected.tolist())

    def __str__(self) -> str:
        parts = "token" if isinstance(self, TokenAttribution) else "head"
        texts, steps = pluralise(len(self.expected), "text"), pluralise(self.steps, "step")
        failed = "" if self.converged else "not converged: "
        return (
            f"integrated gradients by {parts} of {texts} in {steps}, {failed}they are off by "
            f"{self.completeness:.2g}"
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenAttribution(PathAttribution):
    """What each token adds to the metric of its text.

    >>> tokens = Ragged.from_list([torch.tensor([1.0, 2.0])])
    >>> print(TokenAttribution(tokens=tokens, expected=torch.tensor([3.1]), steps=512))
    integrated gradients by token of 1 text in 512 steps, not converged: they are off by 0.1
    """

    tokens: Ragged

    def of(self, text: int) -> Float[Tensor, " _"]:
        return self.tokens.of(text)

    @property
    def sums(self) -> Float[Tensor, " b"]:
        zeros = self.expected.new_zeros(len(self.tokens))
        return zeros.index_add(
            0, self.tokens.lengths.sequence_of_token, self.tokens.values.to(zeros)
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadAttribution(PathAttribution):
    """What each head adds to the metric of each text; `heads` has the means over texts."""

    heads: ByHead
    by_head: Float[Tensor, "b heads"]

    @property
    def sums(self) -> Float[Tensor, " b"]:
        return self.by_head.sum(1)


def is_converged(completeness: float, expected: Sequence[float]) -> bool:
    """Whether parts sum to the expected values within 0.001, or 0.1 % of a larger one."""
    return completeness <= TOLERANCE * max(1.0, *map(abs, expected))


AnyPath = TypeVar("AnyPath", bound=PathAttribution)


@wrapping_models
def integrate_inputs(
    model: Model,
    texts: Inputs,
    metric: Metric = "loss",
    *,
    baseline: Literal["mean", "zero"] | Ragged = "mean",
    steps: int | None = None,
    targets: Targets | None = None,
    stack: cached_run.StackName | None = None,
    progress: bool = True,
) -> TokenAttribution:
    """Integrated gradients (arXiv 1703.01365) from a baseline to what enters the first layer.

    The baseline is the mean of random tokens at the same positions, zero, or a Ragged with the
    lengths of the texts. Near zero the norms of a deep model magnify the smallest change, so that
    hardly any number of steps is enough; images start there. By default the path is divided
    where the metric bends, until the tokens sum to its difference within 0.001 or 0.1 % of it on
    every piece together; a path that needs more than 1,024 steps, as one over the jumps of an
    expert router does, is refused with `ConvergenceError`. With a number of `steps` the result is
    what they give: `completeness` has the error, and `converged` says whether it is small.
    """
    _check_steps(steps)
    scope, inputs = cached_run.head_scope(model, stack, headless=True), read_inputs(model, texts)
    start = Site(-1, Tap.EMBEDDINGS, stack=scope.stack_name)
    bound_metric = bind_metric(model, inputs, range(len(inputs)), metric, targets)
    with eval_mode(model):
        with torch.no_grad():
            cached = cached_run.CachedRun(scope, inputs, layers=(), record=[start])
            end = cached[start]
            start_values = torch.zeros_like(end.values)
            if baseline == "mean" and not model.reads_images and inputs.ids is not None:
                start_values = _mean_of_random_tokens(scope, inputs, start)
            if isinstance(baseline, Ragged):
                start_values, lengths = baseline.values.to(end.values), baseline.lengths.each
                if lengths != end.lengths.each:
                    raise ShapeError(
                        f"the baseline has lengths {lengths}, the texts {end.lengths.each}",
                        "give a baseline with the lengths of the texts",
                    )
            at_start = bound_metric(cached.continue_from(end.with_values(start_values), 0))[0]
            expected = (bound_metric(cached.hidden)[0] - at_start).double()
        difference = end.values - start_values

        def metric_at(x: Tensor) -> Tensor:
            return bound_metric(cached.continue_from(end.with_values(x), 0))

        def gradient(point: float) -> Tensor:
            x = (start_values + point * difference).requires_grad_()
            value = metric_at(x).sum()
            return (torch.autograd.grad(value, x)[0].double() * difference.double()).sum(-1)

        def value(point: float) -> Tensor:
            with torch.no_grad():
                return metric_at(start_values + point * difference)[0].double()

        def result(tokens: Tensor, count: int) -> TokenAttribution:
            return TokenAttribution(tokens=end.with_values(tokens), expected=expected, steps=count)

        return _integrate(gradient, value, result, steps, progress)


def _mean_of_random_tokens(scope: cached_run.HeadScope, inputs: ModelInputs, start: Site) -> Tensor:
    """The mean of what enters the first layer with random tokens in the place of a text."""
    encodes = scope.stack_name == "encoder"
    ids, config = inputs.source if encodes else inputs.ids, scope.model.config
    assert ids is not None, "these texts are tokens"
    assert not isinstance(config, VisionConfig), "images start from zero"
    vocabulary = config.embedding.vocabulary
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), device=ids.device)
    for _ in range(BASELINE_TOKENS):
        drawn = torch.randint(vocabulary, ids.values.shape, generator=generator).to(ids.values)
        record = Record([start])
        texts = ids.with_values(drawn)
        others = replace(inputs, source=texts) if encodes else replace(inputs, ids=texts)
        last = start if scope.model.native else None
        cached_run.run_until(partial(scope.model.run_hidden, others), record, last)
        value = record[start]
        assert isinstance(value, Ragged), "no pattern enters a layer"
        total = total + value.values / BASELINE_TOKENS
    return total


@wrapping_models
def integrate_heads(
    model: Model,
    texts: Inputs,
    metric: Metric = "loss",
    *,
    layers: Sequence[int] | None = None,
    steps: int | None = None,
    targets: Targets | None = None,
    stack: cached_run.StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    progress: bool = True,
) -> HeadAttribution:
    """Integrated gradients of gates that open all heads of some layers from 0 to 1 together.

    The gates are the mask of arXiv 1905.10650 and the path that of arXiv 1703.01365. Attributions
    sum to the metric of the model minus that without any of these heads. For `steps` see
    `integrate_inputs`.
    """
    _check_steps(steps)
    scope, inputs = cached_run.head_scope(model, stack, sublayer), read_inputs(model, texts)
    chosen = scope.layers if layers is None else tuple(layers)
    if not set(chosen) <= set(scope.layers):
        raise InputError(f"layers {chosen} do not all have heads", f"use layers of {scope.layers}")
    bound_metric = bind_metric(model, inputs, range(len(inputs)), metric, targets)
    with eval_mode(model):
        with torch.no_grad():
            cached = cached_run.CachedRun(scope, inputs, layers=chosen)

        def gated(opened: float) -> tuple[Float[Tensor, " b"], list[Float[Tensor, "b h"]]]:
            """The metric with the gates at this number, and the gates of each layer."""
            gates, edits = [], {}
            for layer in chosen:
                outputs = cached.head_outputs(layer)
                gate = outputs.values.new_full((len(outputs), outputs.values.shape[1]), opened)
                gates.append(gate.requires_grad_())
                spread = gate[outputs.lengths.sequence_of_token].unsqueeze(-1)
                edits[scope.site(layer, Tap.HEAD_OUTPUT)] = spread.mul
            hidden = cached.resume(min(chosen), cached_run.ActivationEditor(edits))
            return bound_metric(hidden)[0], gates

        def gradient(opened: float) -> Float[Tensor, "b heads"]:
            value, gates = gated(opened)
            return torch.cat(torch.autograd.grad(value.sum(), gates), dim=1).double()

        def value(opened: float) -> Float[Tensor, " b"]:
            with torch.no_grad():
                return gated(opened)[0].double().cpu()

        expected = value(1.0) - value(0.0)

        def result(summed: Tensor, count: int) -> HeadAttribution:
            by_head = summed.cpu()
            means, errors = weighted_mean(by_head, bound_metric.weights.cpu())
            heads = ByHead(
                kind="integrated gradients",
                blocks=tuple(block for block in scope.blocks if block.layer in chosen),
                means={"attribution": means.numpy()},
                errors={"attribution": errors.numpy()},
                metadata={"texts": len(by_head)},
            )
            return HeadAttribution(heads=heads, by_head=by_head, expected=expected, steps=count)

        return _integrate(gradient, value, result, steps, progress)


@wrapping_models
def gradient_times_attention(
    model: Model,
    texts: Inputs,
    metric: Metric = "loss",
    *,
    layers: Sequence[int] | None = None,
    targets: Targets | None = None,
    stack: cached_run.StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
) -> dict[int, Patterns]:
    """Each attention weight times the gradient of its text's metric, by layer.

    This is the first-order effect of removing a single weight (arXiv 1902.10186 compares it with
    attention). It forms the patterns, n x n per head; those of mixers are signed.
    """
    scope, inputs = cached_run.head_scope(model, stack, sublayer), read_inputs(model, texts)
    chosen = scope.layers if layers is None else tuple(layers)
    scope.check_patterns(chosen)
    bound_metric = bind_metric(model, inputs, range(len(inputs)), metric, targets)
    sites = {layer: scope.site(layer, Tap.PATTERN) for layer in chosen}
    final = "decoder" if scope.stack_name == "encoder" else scope.stack_name
    watch = _Tracked([*sites.values(), Site(-1, Tap.FINAL, stack=final)])
    with eval_mode(model), torch.enable_grad():
        model.run_inputs(inputs, watch)
        hidden = watch[Site(-1, Tap.FINAL, stack=final)]
        assert isinstance(hidden, Ragged)
        by_layer = {layer: watch.patterns(site) for layer, site in sites.items()}
        flat = [weights for patterns in by_layer.values() for weights in patterns]
        gradients = torch.autograd.grad(bound_metric(hidden).sum(), flat, allow_unused=True)
    read = [gradient for gradient in gradients if gradient is not None]
    if len(read) < len(gradients):
        raise InputError(
            f"no gradient reaches the attention weights of this {type(model).__name__}, because "
            "it returns them after it has used them",
            "use lens.importance or lens.integrate_inputs",
        )
    products = (weights * gradient for weights, gradient in zip(flat, read, strict=True))
    return {
        layer: Patterns(tuple(next(products).detach() for _ in patterns))
        for layer, patterns in by_layer.items()
    }


class _Tracked(Record):
    """Records values and tracks their gradients."""

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns:  # type: ignore[override]
        if isinstance(value, Patterns):
            for weights in value.each:
                if not weights.requires_grad:
                    weights.requires_grad_()
        super().see(site, value)
        return value

    def patterns(self, site: Site) -> tuple[Tensor, ...]:
        value = self[site]
        assert isinstance(value, Patterns)
        return value.each


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A piece of a path from `start` to `stop`: what the parts add there, and how far it is off."""

    start: float
    stop: float
    parts: Tensor
    error: float


def _integrate(
    gradient: Callable[[float], Tensor],
    value: Callable[[float], Tensor],
    result: Callable[[Tensor, int], AnyPath],
    steps: int | None,
    progress: bool,
) -> AnyPath:
    """Gauss-Legendre quadrature: in `steps` steps, or in pieces whose error is known.

    On each piece the parts should sum to the difference of the metric at its ends. The piece that
    is off by most is halved until all together are within the tolerance.
    """
    total = MAX_GRADIENTS if steps is None else steps
    with Progress("integrating", total=total, unit="steps", enabled=progress) as bar:

        def integrate(start: float, stop: float, count: int, power: int = 1) -> Tensor:
            parts = []
            for point, weight in _points(count, power):
                parts.append((stop - start) * weight * gradient(start + (stop - start) * point))
                bar.advance()
            return torch.stack(parts).sum(0)

        if steps is not None:
            return result(integrate(0.0, 1.0, steps, POWER), steps)
        values = {point: value(point) for point in (0.0, 1.0)}

        def measure(start: float, stop: float) -> _Piece:
            parts = integrate(start, stop, PIECE_STEPS)
            off = result(parts, PIECE_STEPS).sums.cpu() - (values[stop] - values[start]).cpu()
            return _Piece(start, stop, parts, float(off.abs().max()))

        pieces = [measure(0.0, 1.0)]
        tolerance = TOLERANCE * max(1.0, float((values[1.0] - values[0.0]).abs().max()))
        while (error := sum(piece.error for piece in pieces)) > tolerance:
            worst = max(pieces, key=lambda piece: piece.error)
            middle = (worst.start + worst.stop) / 2
            if bar.done + 2 * PIECE_STEPS > total or worst.stop - worst.start < MIN_WIDTH:
                raise ConvergenceError(
                    f"integrated gradients are off by {error:.2g} after {bar.done:,.0f} steps, "
                    f"where {tolerance:.2g} is allowed",
                    "give another baseline, or steps for a result that states its error",
                )
            pieces.remove(worst)
            values[middle] = value(middle)
            pieces += [measure(worst.start, middle), measure(middle, worst.stop)]
    return result(torch.stack([piece.parts for piece in pieces]).sum(0), int(bar.done))


def _check_steps(steps: int | None) -> None:
    """Refuse a wrong number of steps before the model runs."""
    if steps is not None and (not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS):
        raise InputError(
            f"steps must be an integer from 1 to {MAX_STEPS}, got {steps}", f"use 1 to {MAX_STEPS}"
        )


def _points(steps: int, power: int = 1) -> list[tuple[float, float]]:
    """Points between 0 and 1 and their weights, which sum to 1.

    Norms change sharply near zero activations: with a `power` more points are near 0.

    >>> round(sum(weight for _, weight in _points(8, power=4)), 6)
    1.0
    """
    points, weights = np.polynomial.legendre.leggauss(steps)
    points, weights = (points + 1) / 2, weights / 2
    stretched = weights * power * points ** (power - 1)
    return list(zip((points**power).tolist(), stretched.tolist(), strict=True))
