"""Cross-entropy from hidden states and the words' vectors, a chunk of tokens at a time.

The scores of all tokens for all words are the largest tensor of a training step, and nobody needs
them at once: a chunk's scores become its loss and its gradients, and go. So they are neither held
in float32 nor kept for the way back.
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

# Scores held at once: a thousand tokens for a vocabulary of 50 thousand, 256 MB in float32. A GPU
# has more room, a gigabyte in half precision, and loses less by larger products.
ROOM = {"cpu": 2**26, "cuda": 2**29}
# Products of half numbers are fast on a GPU where rows begin at multiples of 16 bytes.
ROUND = 64


def word_losses(
    x: Float[Tensor, "m c"],
    vectors: Float[Tensor, "v c"],
    bias: Float[Tensor, " v"] | None,
    answers: Int[Tensor, " m"],
    *,
    smoothing: float = 0.0,
    squares: bool = False,
    room: int | None = None,
) -> Float[Tensor, " 2"]:
    """The sums over all tokens of the cross-entropy and of the squared log-sum-exp, in float32.

    `smoothing` gives every word an equal share of the answer, as torch's `label_smoothing` does.
    With `squares` both sums have a gradient, for which the scores are computed once more on the way
    back; without, only the first has, and it is made on the way forth.
    """
    room = ROOM.get(x.device.type, ROOM["cpu"]) if room is None else room
    # A compiled step leaves it out: all chunks unrolled would take minutes to compile.
    losses = _apart if torch.compiler.is_compiling() else _losses
    return losses(x, vectors, bias, answers, smoothing, squares, room)


def _losses(
    x: Tensor,
    vectors: Tensor,
    bias: Tensor | None,
    answers: Tensor,
    smoothing: float,
    squares: bool,
    room: int,
) -> Tensor:
    fused = x.is_cuda and find_spec("triton") is not None
    how = _How(smoothing, _chunks(x.shape[0], vectors.shape[0], room), fused)
    learns = torch.is_grad_enabled() and (x.requires_grad or vectors.requires_grad)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        if not learns:
            return _walk(x, vectors, bias, answers, None, how, dtype)[0]
        losses: Tensor = _WordLosses.apply(  # type: ignore[no-untyped-call]
            x, vectors, bias, answers, squares, how, dtype
        )
        return losses


def _chunks(tokens: int, words: int, room: int) -> int:
    """A power of two, so that a compiled step meets few different numbers."""
    count = 1
    while tokens * words > room * count:
        count *= 2
    return count


# torch.compiler.disable, but for loading the compiler where nobody compiles.
_apart = _disable_dynamo(_losses)


@dataclass(frozen=True, slots=True)
class _How:
    """In how many chunks, and whether by one kernel each."""

    smoothing: float
    count: int
    fused: bool


class _WordLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        vectors: Tensor,
        bias: Tensor | None,
        answers: Tensor,
        squares: bool,
        how: "_How",
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.squares = squares
        if squares:
            ctx.how = (how, dtype)
            ctx.save_for_backward(x, vectors, bias, answers)
            sums, _ = _walk(x, vectors, bias, answers, None, how, dtype)
            return sums
        # All of the first and none of the second, made where it is used: to send it is to wait.
        pull = torch.arange(1, -1, -1, dtype=_wide(dtype), device=vectors.device)
        sums, gradients = _walk(x, vectors, bias, answers, pull, how, dtype)
        ctx.save_for_backward(*gradients)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.squares:
            x, vectors, bias, answers = ctx.saved_tensors
            _, gradients = _walk(x, vectors, bias, answers, pull, *ctx.how)
        else:
            gradients = tuple(
                None if each is None else each * pull[0].to(each.dtype)
                for each in ctx.saved_tensors
            )
        return (*gradients, None, None, None, None)


def _walk(
    x: Tensor,
    vectors: Tensor,
    bias: Tensor | None,
    answers: Tensor,
    pull: Tensor | None,
    how: _How,
    dtype: torch.dtype,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Both sums, and where `pull` says how much of each is wanted, their gradients."""
    wide, size = _wide(dtype), -(-x.shape[0] // how.count)
    words, narrow = vectors.shape[0], vectors.to(dtype)
    spare = -words % ROUND if x.device.type == "cuda" else 0
    if spare:
        narrow = torch.cat((narrow, narrow.new_zeros(spare, narrow.shape[1])))
    sums = vectors.new_zeros(2, dtype=wide)
    to_x = torch.empty_like(x, dtype=dtype)
    to_vectors: Tensor | None = None
    to_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
    for index in range(how.count):
        here = slice(index * size, (index + 1) * size)
        part = x[here].to(dtype)
        scores = part @ narrow.T
        added, push = (_kernel if how.fused else _chunk)(
            scores, bias, answers[here], pull, how.smoothing, words
        )
        sums += added
        if push is None:
            continue
        if to_bias is not None:
            to_bias += push[:, :words].sum(0, dtype=wide)
        push = push.to(dtype)
        to_x[here] = push @ narrow
        product = (push.T @ part)[:words]
        to_vectors = product.to(wide) if to_vectors is None else to_vectors.add_(product)
    if to_vectors is None:
        return sums, (None, None, None)
    given = None if bias is None or to_bias is None else to_bias.to(bias.dtype)
    return sums, (to_x.to(x.dtype), to_vectors.to(vectors.dtype), given)


def _kernel(
    scores: Float[Tensor, "m w"],
    bias: Float[Tensor, " v"] | None,
    answers: Int[Tensor, " m"],
    pull: Float[Tensor, " 2"] | None,
    smoothing: float,
    words: int,
) -> tuple[Float[Tensor, " 2"], Float[Tensor, "m w"] | None]:
    """The same as `_chunk`, reading the scores twice and writing them once."""
    from manyheads.train.loss.triton_cross_entropy import score_rows

    sums = score_rows(scores, bias, answers, pull, smoothing, words)
    return sums, None if pull is None else scores


def _chunk(
    scores: Float[Tensor, "m w"],
    bias: Float[Tensor, " v"] | None,
    answers: Int[Tensor, " m"],
    pull: Float[Tensor, " 2"] | None,
    smoothing: float,
    words: int,
) -> tuple[Float[Tensor, " 2"], Float[Tensor, "m w"] | None]:
    """A chunk's sums and the gradient of its scores, which take the place of the scores.

    Columns past `words` are spare: they get a gradient of zero.
    """
    spare = scores.shape[1] - words
    scores = scores[:, :words].to(_wide(scores.dtype))
    if bias is not None:
        scores = scores.add_(bias.to(scores.dtype))
    expected = scores.gather(1, answers[:, None]).squeeze(1)
    if smoothing:
        expected = (1 - smoothing) * expected + smoothing * scores.mean(1)
    highest = scores.amax(1, keepdim=True)
    shares = scores.sub_(highest).exp_()
    summed = shares.sum(1, keepdim=True)
    logarithms = (highest + summed.log()).squeeze(1)
    sums = torch.stack(((logarithms - expected).sum(), logarithms.square().sum()))
    if pull is None:
        return sums, None
    weight = (pull[0] + 2 * pull[1] * logarithms)[:, None] / summed
    push = shares.mul_(weight)
    if smoothing:
        push = push.sub_(pull[0] * smoothing / scores.shape[1])
    taken = (pull[0] * (smoothing - 1)).expand(answers.shape[0], 1)
    push = push.scatter_add_(1, answers[:, None], taken)
    return sums, F.pad(push, (0, spare)) if spare else push


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
