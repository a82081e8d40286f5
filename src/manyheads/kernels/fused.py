"""PyTorch's fused attention, one call for all sequences of the same length.

On the CPU the flash kernel also takes a mask or bias as a tensor, in chunks of queries so that
memory stays linear. On CUDA it takes full and causal masks and uses cuDNN, flash or
memory-efficient attention.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from manyheads.kernels.contract import AttentionResult, Keys, Queries, Request, TensorFacts, Values
from manyheads.kernels.reference import in_chunks, rows_per_chunk
from manyheads.parts.masks import simple_form, visible
from manyheads.parts.positions.relative import ShawBias

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
# cuDNN is fastest but plans every new shape, which does not pay off for single decoding steps.
CUDNN_FROM = 128

# Queries, and keys and values, of sequences of one length; their outputs and log-sum-exps.
EqualQueries = Float[Tensor, "b h t d"]
EqualKeys = Float[Tensor, "b g s d"]
Equal = tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t"]]


def cannot(request: Request, facts: TensorFacts) -> str | None:
    if request.want.pattern:
        return "a fused kernel does not form the pattern"
    if facts.device not in ("cpu", "cuda"):
        return f"no fused kernel gives the log-sum-exp on {facts.device}"
    if request.sink is not None and facts.grad:
        return "the fused log-sum-exp that a sink needs carries no gradient"
    if request.bias is not None and request.bias.requires_grad and facts.grad:
        return "the fused kernel gives no gradient for a learned bias"
    if isinstance(request.bias, ShawBias) and request.bias.values is not None:
        return "Shaw's value vectors need the pattern"
    if facts.device == "cpu":
        return "the CPU's fused kernel has no dropout" if request.dropout else None
    if request.bias is not None:
        return "on CUDA the fused kernels take no bias here"
    if any(simple_form(request.mask, *shape) == "other" for shape in request.shapes):
        return "on CUDA the fused kernels take only full and causal masks here"
    if facts.dtype not in (*HALF, torch.float32):
        return f"no fused kernel on CUDA supports {facts.dtype}"
    if facts.dtype in HALF and max(facts.size, facts.value_size) > LARGEST_HEAD:
        return f"flash attention supports heads of at most {LARGEST_HEAD} channels"
    if request.dropout and request.needs_lse:
        return "with dropout there is no log-sum-exp"
    return None


def attend(q: Queries, k: Keys, v: Values, request: Request) -> AttentionResult:
    # Fused kernels need one size for all three, on CUDA a multiple of 8; zeros add nothing.
    size = max(q.shape[2], v.shape[2])
    size += -size % 8 if q.is_cuda else 0
    query, key, value = (
        x if x.shape[2] == size else F.pad(x, (0, size - x.shape[2])) for x in (q, k, v)
    )
    output, lse = _by_length(query, key, value, request)
    output = output[..., : v.shape[2]]
    return result_of(output, lse, request)


def scale_by_sink(
    output: Float[Tensor, "n h e"], lse: Float[Tensor, "n h"], sink: Float[Tensor, " h"]
) -> tuple[Float[Tensor, "n h e"], Float[Tensor, "n h"]]:
    """A softmax with one more key that has no value is the softmax without it, scaled down.

    A mass of exp(lse) stays with the keys and exp(sink) goes to the sink.
    """
    fraction = torch.sigmoid(lse - sink.float()).unsqueeze(-1)
    return (output * fraction).to(output.dtype), torch.logaddexp(lse, sink.float())


def result_of(
    output: Float[Tensor, "n h e"], lse: Float[Tensor, "n h"], request: Request
) -> AttentionResult:
    """What the request wants of heads that were computed without its sink."""
    if request.sink is not None:
        output, lse = scale_by_sink(output, lse, request.sink)
    return AttentionResult(output, lse if request.want.lse else None)


def _by_length(
    q: Queries, k: Keys, v: Keys, request: Request
) -> tuple[Float[Tensor, "n h d"], Float[Tensor, "n h"]]:
    batch = request.queries.count
    if request.uniform and request.keys.tight and batch:
        queries, keys = request.queries.longest, request.keys.longest
        together = (
            q.unflatten(0, (batch, queries)),
            k.unflatten(0, (batch, keys)),
            v.unflatten(0, (batch, keys)),
        )
        output, lse = _equal(*together, request, range(batch))
        return output.flatten(0, 1), lse.flatten(0, 1)
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for sequence, shape in enumerate(zip(request.queries.each, request.keys.each, strict=True)):
        groups[shape].append(sequence)
    empty = q.new_zeros(0, q.shape[1]).float()
    pieces: dict[int, tuple[Tensor, Tensor]] = {}
    for (queries, keys), sequences in groups.items():
        if queries == 0:
            continue
        group = (
            _gather(q, request.queries.starts, sequences, queries),
            _gather(k, request.keys.starts, sequences, keys),
            _gather(v, request.keys.starts, sequences, keys),
        )
        output, lse = _equal(*group, request, sequences)
        if _adjacent(request.queries.starts, sequences, queries):
            pieces[sequences[0]] = output.flatten(0, 1), lse.flatten(0, 1)
        else:
            pieces |= dict(zip(sequences, zip(output, lse, strict=True), strict=True))
    outputs, lses = zip((q[:0], empty), *(pieces[index] for index in sorted(pieces)), strict=True)
    return torch.cat(outputs), torch.cat(lses)


def _gather(
    x: Float[Tensor, "n h d"], starts: tuple[int, ...], sequences: list[int], length: int
) -> Float[Tensor, "b t h d"]:
    if _adjacent(starts, sequences, length):
        start = starts[sequences[0]]
        return x[start : start + len(sequences) * length].unflatten(0, (len(sequences), length))
    return torch.stack([x[starts[sequence] : starts[sequence] + length] for sequence in sequences])


def _adjacent(starts: tuple[int, ...], sequences: list[int], length: int) -> bool:
    """Whether sequences of one length are adjacent, as in batches sorted by length."""
    return starts[sequences[-1]] - starts[sequences[0]] == (len(sequences) - 1) * length


def _equal(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g d"],
    request: Request,
    sequences: Sequence[int],
) -> tuple[Float[Tensor, "b t h d"], Float[Tensor, "b t h"]]:
    """Attention of sequences that all have t queries and s keys."""
    if q.shape[0] == 0 or q.shape[1] == 0 or k.shape[1] == 0:
        # No keys: zeros that still belong to the graph.
        nothing = q * 0.0
        return nothing, nothing.sum(-1).float() - torch.inf
    query, key, value = (rearrange(x, "b t h d -> b h t d") for x in (q, k, v))
    form = simple_form(request.mask, q.shape[1], k.shape[1])
    if form == "other" or request.bias is not None:
        output, lse = _rendered(query, key, value, request, sequences)
    elif q.device.type == "cpu":
        output, lse = flash_cpu(query, key, value, form == "causal", None, request.scale)
    else:
        output, lse = _cuda(query, key, value, form == "causal", request)
    return rearrange(output, "b h t d -> b t h d"), rearrange(lse, "b h t -> b t h")


def _rendered(
    q: EqualQueries, k: EqualKeys, v: EqualKeys, request: Request, sequences: Sequence[int]
) -> Equal:
    """With the mask and bias of a few queries at a time as tensors."""
    queries, keys, device = q.shape[2], k.shape[2], q.device
    planes = q.shape[1] * q.shape[0] if request.bias is not None else 1
    step = rows_per_chunk(planes, keys)

    def attend_rows(rows: slice) -> Equal:
        seen = visible(request.mask, range(rows.start, rows.stop), queries, keys, device)
        added = torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf)[None, None]
        if request.bias is not None:
            row = torch.arange(rows.start, rows.stop, device=device)[:, None]
            starts = torch.tensor([request.queries.starts[i] for i in sequences], device=device)
            bias = request.bias.score(
                torch.arange(q.shape[1], device=device)[:, None, None],
                starts[:, None, None, None] + row,
                row + (keys - queries),
                torch.arange(keys, device=device),
            )
            added = added + bias.expand(len(sequences), -1, -1, -1)
        output, lse = flash_cpu(q[:, :, rows], k, v, False, added, request.scale)
        return output, lse.masked_fill(~seen.any(-1), -torch.inf)

    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    pieces = in_chunks(attend_rows, queries, step, recompute=grad and step < queries, rng=False)
    outputs, lses = zip(*pieces, strict=True)
    return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


def flash_cpu(
    q: EqualQueries,
    k: EqualKeys,
    v: EqualKeys,
    causal: bool,
    added: Float[Tensor, "#b #h t s"] | None,
    scale: float,
) -> Equal:
    """The flash kernel, which unlike `F.scaled_dot_product_attention` returns the log-sum-exp."""
    if added is not None:
        added = added.to(torch.promote_types(q.dtype, torch.float32))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=added, scale=scale
    )
    return output, lse


def _cuda(q: EqualQueries, k: EqualKeys, v: EqualKeys, causal: bool, request: Request) -> Equal:
    ops = torch.ops.aten
    drop, scale = request.dropout, request.scale
    # The backward pass needs the log-sum-exp, and so may the caller.
    lse_too = torch.is_grad_enabled() or request.needs_lse
    if q.dtype in HALF and q.shape[2] >= CUDNN_FROM and q.shape[3] <= 128 and not drop:
        result = ops._scaled_dot_product_cudnn_attention(
            q, k, v, None, lse_too, drop, causal, False, scale=scale
        )
    elif q.dtype in HALF:
        result = ops._scaled_dot_product_flash_attention(q, k, v, drop, causal, False, scale=scale)
    else:
        # It does not support key heads shared by query heads.
        shared = q.shape[1] // k.shape[1]
        key, value = (x if shared == 1 else x.repeat_interleave(shared, dim=1) for x in (k, v))
        result = ops._scaled_dot_product_efficient_attention(
            q, key, value, None, lse_too, drop, causal, scale=scale
        )
    output, lse = result[0], result[1]
    if not lse_too:
        return output, q.new_zeros(()).expand(q.shape[:3]).float()
    return output, lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]]
