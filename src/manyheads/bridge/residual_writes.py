"""How attentions of `transformers` write to the residual stream, and its norms as linear maps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import InputError

# Modules without children that ran in a layer, with what they received and returned.
Leaves = Sequence[tuple[nn.Module, Tensor, Tensor]]
EPSILONS = (1e-5, 1e-6)


@dataclass(frozen=True, slots=True, eq=False)
class ResidualWrite:
    """What happens to the output of a projection before it is added to the residual stream."""

    norm: nn.Module | None = None
    factor: float = 1.0


class ScaledNorm(nn.Module):
    """A norm whose output is multiplied, as before the tied readout of T5."""

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor

    def forward(self, x: Float[Tensor, "*n c"]) -> Float[Tensor, "*n c"]:
        normed: Tensor = self.norm(x)
        return normed * self.factor


def find_writes(
    entered: Tensor, left: Tensor, projected: Sequence[Tensor], leaves: Leaves, factor: float
) -> list[ResidualWrite] | None:
    """How each attention of a layer is added to what entered the layer, in the order of calls.

    None where the numbers of the probing forward show no such sums: norms on the stream itself,
    or a stream that is scaled. `factor` is the one that the config names.
    """
    if any(close(output, left) and not close(received, left) for _, received, output in leaves):
        return None
    writes: list[ResidualWrite] = []
    stream = entered
    for output in projected:
        for write, written in _candidates(output, leaves, factor):
            after = stream + written
            if _goes_on(after, left, leaves) or (
                len(projected) == 1 and _is_written(left - after, leaves, write.factor)
            ):
                writes.append(write)
                stream = after
                break
        else:
            return None
    return writes


def find_final_norm(hidden: Tensor | None, read: Tensor | None, leaves: Leaves) -> nn.Module | None:
    """What makes the input of the readout of the output of the last layer."""
    if hidden is None or read is None:
        return None
    if same(hidden, read):
        return nn.Identity()
    for module, received, output in leaves:
        if not same(received, hidden):
            continue
        if same(output, read):
            return module
        if output.shape == read.shape:
            factor = float((output * read).sum() / (output * output).sum())
            if close(output * factor, read):
                return ScaledNorm(module, factor)
    return None


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same memory."""
    return first.shape == second.shape and first.data_ptr() == second.data_ptr()


def _candidates(
    output: Tensor, leaves: Leaves, factor: float
) -> Iterator[tuple[ResidualWrite, Tensor]]:
    for scale in dict.fromkeys((1.0, factor)):
        yield ResidualWrite(None, scale), output * scale
        for module, received, result in leaves:
            if (
                same(received, output)
                and result.numel() == output.numel()
                and not close(result, output)
            ):
                yield ResidualWrite(module, scale), result.reshape(output.shape) * scale


def _goes_on(after: Tensor, left: Tensor, leaves: Leaves) -> bool:
    """Whether a module reads the stream with this write in it, and does not replace it."""
    for _, received, output in leaves:
        if close(received, after):
            replaced = output.numel() == left.numel() and _is_written(
                left - output.reshape(left.shape), leaves, 1.0
            )
            return _is_written(left - after, leaves, 1.0) or not replaced
    return False


def _is_written(rest: Tensor, leaves: Leaves, factor: float) -> bool:
    return any(close(output * factor, rest) for _, _, output in leaves)


def close(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal but for rounding, whatever their shapes."""
    if first.numel() != second.numel() or not first.is_floating_point():
        return False
    # Some models flatten their batch for a while.
    first, second = first.detach(), second.detach().reshape(first.shape)
    tolerance = 1e-4 if first.dtype in (torch.float32, torch.float64) else 2e-2
    return float((first - second).abs().max()) <= tolerance * max(1e-3, float(second.abs().max()))


@dataclass(frozen=True, slots=True, eq=False)
class FrozenNorm:
    """A norm with the divisors that it had: x * gain / divisor + bias, with the mean or without."""

    gain: Float[Tensor, " c"]
    divisor: Float[Tensor, "m 1"]
    centered: bool
    bias: Float[Tensor, " c"] | None

    @classmethod
    def of(cls, norm: nn.Module, at: Float[Tensor, "m c"]) -> "FrozenNorm":
        """The LayerNorm or RMSNorm that gives what `norm` gives for `at`."""
        factor = norm.factor if isinstance(norm, ScaledNorm) else 1.0
        inner = norm.norm if isinstance(norm, ScaledNorm) else norm
        own = next(iter(inner.parameters()), at)
        expected = inner(at.to(own.dtype)).double()
        weight, bias = (getattr(inner, name, None) for name in ("weight", "bias"))
        shift = bias.double() if isinstance(bias, Tensor) else None
        gains = [torch.ones_like(at[0])]
        if isinstance(weight, Tensor):
            gains = [weight.double(), weight.double() + 1]
        named = [getattr(inner, name, None) for name in ("eps", "variance_epsilon")]
        epsilons = [float(value) for value in named if isinstance(value, float)] or EPSILONS
        for centered, gain, eps in product((True, False), gains, epsilons):
            x = at - at.mean(-1, keepdim=True) if centered else at
            divisor = (x.square().mean(-1, keepdim=True) + eps).sqrt()
            normed = x / divisor * gain + (0 if shift is None else shift)
            if close(normed.to(own.dtype), expected.to(own.dtype)):
                shift = None if shift is None else shift * factor
                return cls(gain * factor, divisor, centered, shift)
        raise InputError(
            f"{type(inner).__name__} is no LayerNorm and no RMSNorm, so that it cannot be frozen",
            "use ablation, patching or integrated gradients",
        )

    def apply(self, x: Float[Tensor, "m c"]) -> Float[Tensor, "m c"]:
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        return x / self.divisor * self.gain + (0 if self.bias is None else self.bias)

    def pull(self, towards: Float[Tensor, "m c"]) -> Float[Tensor, "m c"]:
        """A direction behind the norm as a direction in front of it."""
        towards = towards * self.gain
        if self.centered:
            towards = towards - towards.mean(-1, keepdim=True)
        return towards / self.divisor
