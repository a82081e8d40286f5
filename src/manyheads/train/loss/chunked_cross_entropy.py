"""Cross-entropy from hidden states and the readout's weight, in chunks of tokens.

The logits of all tokens are the largest tensor of a training step, and they are not needed at once:
the logits of a chunk become its loss and its gradients, and are freed. So they are neither held in
float32 nor kept for the backward pass.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

# Logits held at once: a thousand tokens for a vocabulary of 50 thousand, 256 MB in float32. A GPU
# has more memory, a gigabyte in half precision, and is faster with larger matrix products.
MAX_LOGITS = {"cpu": 2**26, "cuda": 2**29}
# Half-precision products are fast on a GPU if rows start at multiples of 16 bytes.
PAD_TO = 64


def cross_entropy_sums(
    x: Float[Tensor, "m c"],
    weight: Float[Tensor, "v c"],
    bias: Float[Tensor, " v"] | None,
    labels: Int[Tensor, " m"],
    *,
    smoothing: float = 0.0,
    squares: bool = False,
    softcap: float | None = None,
    max_logits: int | None = None,
) -> Float[Tensor, " 2"]:
    """The sums over all tokens of the cross-entropy and of the squared log-sum-exp, in float32.

    `smoothing` is torch's `label_smoothing`. Logits are bent to softcap * tanh(logits / softcap) if
    there is a `softcap`. With `squares` both sums have a gradient, and the logits are computed
    again in the backward pass; without, only the first has one, computed in the forward pass.
    """
    limit = MAX_LOGITS.get(x.device.type, MAX_LOGITS["cpu"]) if max_logits is None else max_logits
    # Not compiled: unrolled over all chunks it would take minutes to compile.
    losses = _uncompiled if torch.compiler.is_compiling() else _sums
    return losses(squares, smoothing, softcap, limit, x, weight, bias, labels)


@dataclass(frozen=True, slots=True)
class _Chunking:
    """The number of chunks, whether each is one Triton kernel, and how logits are computed."""

    smoothing: float
    softcap: float | None
    count: int
    fused: bool
    dtype: torch.dtype


def _sums(
    squares: bool, smoothing: float, softcap: float | None, max_logits: int, *tensors: Any
) -> Tensor:
    x, weight, *_ = tensors
    # A power of two, so that a compiled step sees few different numbers.
    count = 1
    while x.shape[0] * weight.shape[0] > max_logits * count:
        count *= 2
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    fused = x.is_cuda and find_spec("triton") is not None
    chunking = _Chunking(smoothing, softcap, count, fused, dtype)
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    with torch.autocast(kind, enabled=False):
        if not learns:
            return _accumulate(chunking, None, *tensors)[0]
        losses: Tensor = _CrossEntropySums.apply(squares, chunking, *tensors)  # type: ignore[no-untyped-call]
        return losses


# torch.compiler.disable without loading the compiler.
_uncompiled = _disable_dynamo(_sums)


class _CrossEntropySums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, squares: bool, chunking: _Chunking, *tensors: Any) -> Tensor:
        ctx.squares, ctx.chunking = squares, chunking
        if squares:
            ctx.save_for_backward(*tensors)
            return _accumulate(chunking, None, *tensors)[0]
        # The gradient of the first sum alone; made on the device, since a copy would wait.
        wide, device = _at_least_float32(chunking.dtype), tensors[1].device
        grad_sums = torch.arange(1, -1, -1, dtype=wide, device=device)
        sums, gradients = _accumulate(chunking, grad_sums, *tensors)
        ctx.save_for_backward(*gradients)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.squares:
            _, gradients = _accumulate(ctx.chunking, grad_sums, *ctx.saved_tensors)
        else:
            gradients = tuple(
                None if tensor is None else tensor * grad_sums[0].to(tensor.dtype)
                for tensor in ctx.saved_tensors
            )
        return (None, None, *gradients, None)


def _accumulate(
    chunking: _Chunking, grad_sums: Tensor | None, *tensors: Any
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Both sums, and their gradients with `grad_sums`, the gradient of the output."""
    x, weight, bias, labels = tensors
    dtype, wide = chunking.dtype, _at_least_float32(chunking.dtype)
    size, vocabulary, narrow = -(-x.shape[0] // chunking.count), weight.shape[0], weight.to(dtype)
    padding = -vocabulary % PAD_TO if x.device.type == "cuda" else 0
    if padding:
        narrow = torch.cat((narrow, narrow.new_zeros(padding, narrow.shape[1])))
    sums = weight.new_zeros(2, dtype=wide)
    grad_x = torch.empty_like(x, dtype=dtype)
    grad_weight: Tensor | None = None
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
    for index in range(chunking.count):
        rows = slice(index * size, (index + 1) * size)
        part = x[rows].to(dtype)
        logits, added_bias, slope = part @ narrow.T, bias, None
        if chunking.softcap is not None:
            if bias is not None:
                logits = logits + F.pad(bias.to(logits.dtype), (0, padding))
            # Its slope is 1 - tanh^2.
            logits = (logits / chunking.softcap).tanh()
            added_bias, slope = None, 1 - logits.square()
            logits = logits * chunking.softcap
        added, grad_logits = (_kernel if chunking.fused else _chunk)(
            logits, added_bias, labels[rows], grad_sums, chunking.smoothing, vocabulary
        )
        sums += added
        if grad_logits is None:
            continue
        if slope is not None:
            grad_logits = grad_logits * slope
        if grad_bias is not None:
            grad_bias += grad_logits[:, :vocabulary].sum(0, dtype=wide)
        grad_logits = grad_logits.to(dtype)
        grad_x[rows] = grad_logits @ narrow
        product = (grad_logits.T @ part)[:vocabulary]
        grad_weight = product.to(wide) if grad_weight is None else grad_weight.add_(product)
    if grad_weight is None:
        return sums, (None, None, None)
    bias_gradient = None if grad_bias is None else grad_bias.to(bias.dtype)
    return sums, (grad_x.to(x.dtype), grad_weight.to(weight.dtype), bias_gradient)


def _chunk(
    logits: Float[Tensor, "m w"],
    bias: Float[Tensor, " v"] | None,
    labels: Int[Tensor, " m"],
    grad_sums: Float[Tensor, " 2"] | None,
    smoothing: float,
    vocabulary: int,
) -> tuple[Float[Tensor, " 2"], Float[Tensor, "m w"] | None]:
    """The sums of a chunk and the gradient of its logits, which overwrites the logits.

    Columns past `vocabulary` are padding: they get a gradient of zero.
    """
    padding = logits.shape[1] - vocabulary
    logits = logits[:, :vocabulary].to(_at_least_float32(logits.dtype))
    if bias is not None:
        logits = logits.add_(bias.to(logits.dtype))
    expected = logits.gather(1, labels[:, None]).squeeze(1)
    if smoothing:
        expected = (1 - smoothing) * expected + smoothing * logits.mean(1)
    highest = logits.amax(1, keepdim=True)
    exponentials = logits.sub_(highest).exp_()
    total_exp = exponentials.sum(1, keepdim=True)
    lse = (highest + total_exp.log()).squeeze(1)
    sums = torch.stack(((lse - expected).sum(), lse.square().sum()))
    if grad_sums is None:
        return sums, None
    factor = (grad_sums[0] + 2 * grad_sums[1] * lse)[:, None] / total_exp
    grad_logits = exponentials.mul_(factor)
    if smoothing:
        grad_logits = grad_logits.sub_(grad_sums[0] * smoothing / logits.shape[1])
    correct = (grad_sums[0] * (smoothing - 1)).expand(labels.shape[0], 1)
    grad_logits = grad_logits.scatter_add_(1, labels[:, None], correct)
    return sums, F.pad(grad_logits, (0, padding)) if padding else grad_logits


def _kernel(logits: Tensor, *arguments: Any) -> tuple[Float[Tensor, " 2"], Tensor | None]:
    """The same as `_chunk` in Triton, which reads the logits twice and writes them once."""
    from manyheads.train.loss.triton_cross_entropy import cross_entropy_rows

    _, _, grad_sums, *_ = arguments
    # Triton starts kernels on the current device.
    with torch.cuda.device_of(logits):
        sums = cross_entropy_rows(logits, *arguments)
    return sums, None if grad_sums is None else logits


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
