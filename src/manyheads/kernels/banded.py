"""Windows on the CPU in O(n * window): blocks of queries against the strip of keys they can see."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.kernels.contract import Attended, Facts, Request
from manyheads.kernels.fused import cannot as fused_cannot
from manyheads.kernels.fused import flash_cpu, scale_by_sink

__all__ = ["attend", "cannot"]

SMALLEST_BLOCK = 64


def cannot(request: Request, facts: Facts) -> str | None:
    reach = request.mask.reach
    if facts.device != "cpu":
        return f"banded runs on the CPU and this is {facts.device}"
    if not reach.before + reach.after < float("inf"):
        return "the mask has no limit on both sides"
    if not (request.keys.tight and request.queries.each == request.keys.each):
        return "queries and keys are not the same tokens"
    if facts.size != facts.value_size:
        return f"values of size {facts.value_size} meet keys of size {facts.size}"
    return fused_cannot(request, facts)


def attend(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n g d"],
    v: Float[Tensor, "n g d"],
    request: Request,
) -> Attended:
    """The whole packed batch at once: a block may hold several sequences, the mask parts them."""
    tokens = q.shape[0]
    if tokens == 0:
        return Attended(q, q.new_zeros(0, q.shape[1]).float() if request.want.lse else None)
    before, after = int(request.mask.reach.before), int(request.mask.reach.after)
    before, after = min(before, tokens), min(after, tokens)
    block = block_size(before + after)
    blocks = -(-tokens // block)
    spare = blocks * block - tokens
    queries = rearrange(F.pad(q, (0, 0, 0, 0, 0, spare)), "(b t) h d -> b h t d", t=block)
    keys, values = (_strips(x, block, before, after + spare, before + after) for x in (k, v))
    row, column, seen = _table(request, tokens, blocks, block, before, after)
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    if request.bias is not None:
        positions = request.queries.positions
        bias = request.bias.score(
            torch.arange(q.shape[1])[:, None, None],
            row[:, None, :, None],
            positions[row][:, None, :, None],
            positions[column][:, None, None, :],
        )
        added = added + bias
    output, lse = flash_cpu(queries, keys, values, False, added, request.scale)
    lse = lse.masked_fill(~seen.any(-1), -torch.inf)
    output = rearrange(output, "b h t d -> (b t) h d")[:tokens]
    lse = rearrange(lse, "b h t -> (b t) h")[:tokens]
    if request.sink is not None:
        output, lse = scale_by_sink(output, lse, request.sink)
    return Attended(output, lse if request.want.lse else None)


def block_size(width: int) -> int:
    """Half the window, so that a strip is three blocks long: measured best on two cores."""
    return max(SMALLEST_BLOCK, -(-width // 128) * 64)


def _strips(
    x: Float[Tensor, "n g d"], block: int, before: int, after: int, width: int
) -> Float[Tensor, "b g s d"]:
    """Overlapping views of the keys each block can see; nothing but the ends is copied."""
    padded = F.pad(x, (0, 0, 0, 0, before, after))
    return rearrange(padded.unfold(0, block + width, block), "b g d s -> b g s d")


def _table(
    request: Request, tokens: int, blocks: int, block: int, before: int, after: int
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b s"], Bool[Tensor, "b 1 t s"]]:
    """Packed index of every query and key of every block, and which of them meet."""
    start = torch.arange(blocks)[:, None] * block
    row = start + torch.arange(block)
    column = start + torch.arange(-before, block + after)
    inside = (column >= 0) & (column < tokens)
    row, column = row.clamp(max=tokens - 1), column.clamp(0, tokens - 1)
    sequence, position = request.queries.sequence_of_token, request.queries.positions
    each = torch.tensor(request.queries.each)
    allowed = request.mask.allows(
        position[row][:, :, None], position[column][:, None, :], each[sequence[row]][:, :, None]
    )
    same = sequence[row][:, :, None] == sequence[column][:, None, :]
    return row, column, (allowed & same & inside[:, None, :]).unsqueeze(1)
