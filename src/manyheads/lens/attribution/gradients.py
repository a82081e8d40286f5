"""Attribution by gradients: integrated gradients of tokens and heads, gradient times attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError, ShapeError
from manyheads.formatting import pluralise
from manyheads.lens.inputs import cached_run
from manyheads.lens.inputs.metrics import Metric, bind_metric, weighted_mean
from manyheads.lens.inputs.texts import Inputs, Targets, read_inputs
from manyheads.lens.results.files import Result
from manyheads.lens.results.tables import ByHead
from manyheads.models.build import Model, eval_mode
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Sublayer, Tap

POWER = 4
STEP_COUNTS = (32, 64, 128, 256, 512)
TOLERANCE = 1e-3
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
    baseline: Literal["zero"] | Ragged = "zero",
    steps: int | None = None,
    targets: Targets | None = None,
    stack: cached_run.StackName | None = None,
    progress: bool = True,
) -> TokenAttribution:
    """Integrated gradients (arXiv 1703.01365) from a baseline to what enters the first layer.

    The baseline is zero, or a Ragged with the lengths of the texts. By default the number of steps
    doubles until the tokens sum to the difference of the metric within 0.001, up to 512 steps.
    Norms change sharply near zero and expert routers jump: `completeness` has the error left, and
    `converged` says whether it is small.
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

        def gradient(point: float) -> Tensor:
            x = (start_values + point * difference).requires_grad_()
            value = bound_metric(cached.continue_from(end.with_values(x), 0)).sum()
            return (torch.autograd.grad(value, x)[0].double() * difference.double()).sum(-1)

        def result(tokens: Tensor, count: int) -> TokenAttribution:
            return TokenAttribution(tokens=end.with_values(tokens), expected=expected, steps=count)

        return _integrate(gradient, result, steps, progress)


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

        with torch.no_grad():
            expected = (gated(1.0)[0] - gated(0.0)[0]).double().cpu()

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

        return _integrate(gradient, result, steps, progress)


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


def _integrate(
    gradient: Callable[[float], Tensor],
    result: Callable[[Tensor, int], AnyPath],
    steps: int | None,
    progress: bool,
) -> AnyPath:
    """Gauss-Legendre quadrature, with more points until the error is below the tolerance."""
    reason = ""
    for count in STEP_COUNTS if steps is None else (steps,):
        parts = []
        label = f"integrating in {count} steps{reason}"
        with Progress(label, total=count, unit="steps", enabled=progress) as bar:
            for point, weight in _points(count):
                parts.append(weight * gradient(point))
                bar.advance()
        path = result(torch.stack(parts).sum(0), count)
        if path.completeness <= TOLERANCE:
            break
        reason = f", as {count} are off by {path.completeness:.1e}"
    return path


def _check_steps(steps: int | None) -> None:
    """Refuse a wrong number of steps before the model runs."""
    if steps is not None and (not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS):
        raise InputError(
            f"steps must be an integer from 1 to {MAX_STEPS}, got {steps}", f"use 1 to {MAX_STEPS}"
        )


def _points(steps: int) -> list[tuple[float, float]]:
    """Points between 0 and 1 and their weights, which sum to 1.

    Norms change sharply near zero activations, so most points are near 0.

    >>> round(sum(weight for _, weight in _points(8)), 6)
    1.0
    """
    points, weights = np.polynomial.legendre.leggauss(steps)
    points, weights = (points + 1) / 2, weights / 2
    stretched = weights * POWER * points ** (POWER - 1)
    return list(zip((points**POWER).tolist(), stretched.tolist(), strict=True))
