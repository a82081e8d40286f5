"""The interface of every kernel: its request and its result."""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.parts.masks import Mask
from manyheads.parts.positions.relative import Bias
from manyheads.parts.positions.rotary import Rotation
from manyheads.ragged import Lengths
from manyheads.taps import Patterns

# n queries of h heads, and m keys of g heads, each of which may serve several heads of queries.
Queries = Float[Tensor, "n h d"]
Keys = Float[Tensor, "m g d"]
Values = Float[Tensor, "m g e"]


@dataclass(frozen=True, slots=True)
class Want:
    """What is returned besides the output."""

    lse: bool = False
    pattern: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """One attention: the lengths of queries and keys, the mask, the bias.

    Queries are aligned to the END of their keys, so that a step with a cache is the same request.
    `sink` is an additional score per head in the softmax, without a value. `softcap` bends scaled
    scores s to softcap * tanh(s / softcap), before bias and mask. `groups` is how many query heads
    each key head serves, if not all serve the same number. A `rotation` turns queries and keys
    first: kernels that do not rotate themselves receive them rotated.
    """

    queries: Lengths
    keys: Lengths
    mask: Mask
    scale: float
    bias: Bias | None = None
    sink: Float[Tensor, " h"] | None = None
    softcap: float | None = None
    dropout: float = 0.0
    groups: tuple[int, ...] | None = None
    rotation: Rotation | None = None
    want: Want = Want()

    @property
    def uniform(self) -> bool:
        """Whether all sequences have the same number of queries and the same number of keys."""
        return self.queries.uniform and self.keys.uniform

    @property
    def needs_lse(self) -> bool:
        """Whether a kernel computes the log-sum-exp: it is wanted, or a sink needs it."""
        return self.want.lse or self.sink is not None

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """The distinct pairs of query and key lengths."""
        if self.uniform:
            return {(self.queries.longest, self.keys.longest)}
        return set(zip(self.queries.each, self.keys.each, strict=True))


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The properties of the tensors that decide which kernel runs."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    value_size: int
    grad: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, request: Request) -> "TensorFacts":
        tensors = [q, k, v] + ([request.sink] if request.sink is not None else [])
        grad = any(tensor.requires_grad for tensor in tensors)
        if request.bias is not None:
            grad = grad or request.bias.requires_grad
        return cls(
            device=q.device.type,
            dtype=q.dtype,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            size=q.shape[2],
            value_size=v.shape[2],
            grad=grad and torch.is_grad_enabled(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionResult:
    """The output and what was wanted besides: log-sum-exp in float32, patterns per sequence.

    Only the log-sum-exp of reference, batched and flex carries gradients.
    """

    output: Float[Tensor, "n h e"]
    lse: Float[Tensor, "n h"] | None = None
    patterns: Patterns | None = None


class Kernel(Protocol):
    """A way to compute attention."""

    def cannot(self, request: Request, facts: TensorFacts) -> str | None:
        """Why the kernel does not support this request; None if it does."""
        ...

    def attend(self, q: Queries, k: Keys, v: Values, request: Request) -> AttentionResult: ...
