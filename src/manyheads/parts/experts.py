"""Mixture of experts: a router sends each token to a few of many feed-forward layers."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.devices import has_triton_kernels, runs_triton
from manyheads.errors import ConfigError
from manyheads.parts.feedforward import FeedForward, SwiGLU
from manyheads.ragged import Ragged
from manyheads.taps import WatchContext

# Rows of the grouped kernel are aligned to 16 bytes in half precision.
ALIGNMENT = 8
# Visits of experts that a kernel of our own serves: those of a step of generation.
FEW_ROWS = 1024


def grouped_matmul(
    x: Float[Tensor, "n c"], weights: Float[Tensor, "e c f"], ends: Int[Tensor, " e"]
) -> Float[Tensor, "n f"]:
    """Rows up to `ends[0]` times the first matrix, from there to `ends[1]` times the second, ...

    On CUDA it is one kernel without synchronisation for a few rows without gradients, and in
    bfloat16; elsewhere one product per group, and also for sizes that are not a multiple of 8,
    whose rows the kernel for many cannot read.
    """
    few = x.shape[0] <= FEW_ROWS and not torch.is_grad_enabled()
    if few and has_triton_kernels(x):
        from manyheads.parts.triton_experts import few_grouped_matmul

        return few_grouped_matmul(x, weights, ends)
    if x.is_cuda and _aligned(x.dtype, *weights.shape[1:]):
        return F.grouped_mm(x, weights, offs=ends)
    return _each(x, weights, ends)


def _aligned(dtype: torch.dtype, *sizes: int) -> bool:
    return dtype == torch.bfloat16 and all(size % ALIGNMENT == 0 for size in sizes)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise((0, *ends.tolist())))


# Opaque to the compiler, which cannot know the sizes of the groups.
@torch.library.custom_op("manyheads::grouped_matmul", mutates_args=())
def _each(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    output = x.new_empty(x.shape[0], weights.shape[2])
    for (start, stop), weight in zip(_spans(ends), weights, strict=True):
        if stop > start:
            torch.mm(x[start:stop], weight, out=output[start:stop])
    return output


@_each.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    del ends
    return x.new_empty(x.shape[0], weights.shape[2])


@torch.library.custom_op("manyheads::grouped_outer", mutates_args=())
def _outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """For each group, the product of its transposed rows of x with its rows of y."""
    output = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    for index, (start, stop) in enumerate(_spans(ends)):
        if stop > start:
            torch.mm(x[start:stop].T, y[start:stop], out=output[index])
    return output


@_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    del output
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    x, weights, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    return _each(gradient, weights.transpose(1, 2), ends), _outer(x, gradient, ends), None


_each.register_autograd(_backward, setup_context=_keep)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (1 + input), both clamped to `limit`, as in gpt-oss."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: Tensor, passed: Tensor) -> Tensor:
        gate, passed = gate.clamp(max=self.limit), passed.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (1 + passed)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`count` SwiGLU experts of which each token visits the `top_k` most likely.

    The outputs are weighted by the softmax probabilities, made to sum to one if `renormalize`.
    `shared` is the hidden width of an additional expert for every token; 0 means none. Its gate, if
    any, is one number per token that scales its output. If `bias`, the router and the experts have
    biases.
    """

    width: PositiveInt
    hidden: PositiveInt
    count: int
    top_k: int
    shared: int = 0
    shared_gate: Literal["none", "sigmoid"] = "none"
    renormalize: bool = True
    bias: bool = False
    gating: Literal["swiglu"] | ClampedSwiGLU = "swiglu"

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count:
            raise ConfigError(f"top_k must be in 1 to count={self.count}, got {self.top_k}")
        if self.shared_gate != "none" and not self.shared:
            raise ConfigError(
                f"shared_gate={self.shared_gate!r} needs a shared expert",
                "set shared=, its hidden width",
            )


def grouped_at_once(config: Experts, dtype: torch.dtype) -> bool:
    """Whether one kernel serves the experts of any number of tokens on CUDA."""
    return _aligned(dtype, config.width, config.hidden)


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """Losses that training adds so that tokens are distributed evenly.

    `balance` is the Switch loss (arXiv 2101.03961) for `top_k` experts per token, 1 if even.
    `z` is the mean squared log-sum-exp of the router's logits (arXiv 2202.08906).
    """

    balance: Float[Tensor, ""]
    z: Float[Tensor, ""]

    def plus(self, other: "RouterLosses | None") -> "RouterLosses":
        """Those of two routers of a layer."""
        if other is None:
            return self
        return RouterLosses(self.balance + other.balance, self.z + other.z)


def router_losses(
    logits: Float[Tensor, "n e"], visits: Int[Tensor, " e"], top_k: int
) -> RouterLosses:
    """The losses of a router, given how many tokens visit each of what it chooses from."""
    tokens = max(logits.shape[0], 1)
    fraction = visits / (tokens * top_k)
    balance = logits.shape[1] * (fraction * logits.softmax(-1).sum(0) / tokens).sum()
    z = logits.logsumexp(-1).square().sum() / tokens
    return RouterLosses(balance=balance, z=z)


class MixtureOfExperts(nn.Module):
    """Tokens are grouped by expert, and each expert computes only its own.

    How many share a product depends on all tokens, which may change the last bits of the others.
    The few visits of a step on CUDA are computed one by one. Among experts of equal probability
    these go to the first, and grouped ones to any.
    """

    def __init__(self, config: Experts) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.count, bias=config.bias)
        self.expand = nn.Parameter(torch.empty(config.count, config.width, 2 * config.hidden))
        self.contract = nn.Parameter(torch.empty(config.count, config.hidden, config.width))
        self.expand_bias: nn.Parameter | None = None
        self.contract_bias: nn.Parameter | None = None
        if config.bias:
            self.expand_bias = nn.Parameter(torch.zeros(config.count, 2 * config.hidden))
            self.contract_bias = nn.Parameter(torch.zeros(config.count, config.width))
        for weight in (self.expand, self.contract):
            nn.init.normal_(weight, std=0.02)
        self.shared = (
            FeedForward(SwiGLU(width=config.width, hidden=config.shared)) if config.shared else None
        )
        gated = config.shared_gate != "none"
        self.shared_gate = nn.Linear(config.width, 1, bias=False) if gated else None

    def forward(
        self, x: Float[Tensor, "n c"], like: Ragged, context: WatchContext | None = None
    ) -> tuple[Float[Tensor, "n c"], RouterLosses | None]:
        logits = self.router(x)
        if self._few_visits(x):
            return self._add_shared(self._visit_few(x, logits), x, like, context), None
        logits = logits.float()
        probabilities = logits.softmax(-1)
        weights, experts = probabilities.topk(self.config.top_k, dim=-1)
        if self.config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        visits = torch.zeros_like(logits, dtype=torch.int).scatter(1, experts, 1).sum(0)
        output = self._visit(x, weights, experts, visits)
        output = self._add_shared(output, x, like, context)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # Nothing is learned, and a step of generation would compute them for nobody.
            return output, None
        return output, router_losses(logits, visits, self.config.top_k)

    def _add_shared(
        self,
        output: Float[Tensor, "n c"],
        x: Float[Tensor, "n c"],
        like: Ragged,
        context: WatchContext | None,
    ) -> Float[Tensor, "n c"]:
        if self.shared is None:
            return output
        shared = self.shared(x, like, context)
        if self.shared_gate is not None:
            shared = self.shared_gate(x).sigmoid() * shared
        return output + shared

    def _few_visits(self, x: Float[Tensor, "n c"]) -> bool:
        """Whether tokens are so few that most of their visits are to different experts."""
        if not runs_triton(x) or not torch.is_inference_mode_enabled():
            return False
        few = 0 < x.shape[0] * self.config.top_k <= self.config.count
        return few and x.dtype == self.expand.dtype and not torch.is_autocast_enabled("cuda")

    def _visit_few(
        self, x: Float[Tensor, "n c"], logits: Float[Tensor, "n e"]
    ) -> Float[Tensor, "n c"]:
        from manyheads.parts.triton_few_experts import route, visit_experts

        weights, experts = route(logits, self.config.top_k, self.config.renormalize)
        kind = self.config.gating
        clamped = None if kind == "swiglu" else (kind.alpha, kind.limit)
        expand, contract = (self.expand, self.expand_bias), (self.contract, self.contract_bias)
        return visit_experts(x, weights, experts, expand, contract, clamped)

    def _visit(
        self,
        x: Float[Tensor, "n c"],
        weights: Float[Tensor, "n k"],
        experts: Int[Tensor, "n k"],
        visits: Int[Tensor, " e"],
    ) -> Float[Tensor, "n c"]:
        """Sort the tokens by expert, apply each expert, and restore the order."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        order = experts.flatten().argsort(stable=True)
        token = order // self.config.top_k
        ends = visits.cumsum(0).int()
        expanded = grouped_matmul(x[token], self.expand.to(x.dtype), ends)
        visited = experts.flatten()[order]
        if self.expand_bias is not None:
            expanded = expanded + self.expand_bias.to(x.dtype)[visited]
        inside = self.activate(*expanded.chunk(2, -1))
        written = grouped_matmul(inside, self.contract.to(x.dtype), ends)
        if self.contract_bias is not None:
            written = written + self.contract_bias.to(x.dtype)[visited]
        written = written * weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, written)

    def activate(
        self, gate: Float[Tensor, "n f"], passed: Float[Tensor, "n f"]
    ) -> Float[Tensor, "n f"]:
        """The hidden layer of an expert."""
        kind = self.config.gating
        return F.silu(gate) * passed if kind == "swiglu" else kind(gate, passed)
