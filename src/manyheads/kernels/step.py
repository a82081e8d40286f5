"""One query per sequence over a cache of which only the device knows how much is filled.

So a decoding step always has the same shape, and a CUDA graph can record and replay it."""

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from manyheads.devices import runs_triton
from manyheads.kernels import contract, fused
from manyheads.parts.masks import exact_band
from manyheads.parts.positions import disentangled, relative

# Channels of a head that the kernel of `triton_one_query` takes.
SIZES = (16, 32, 64, 128, 256)


def cannot(request: contract.Request, facts: contract.TensorFacts) -> str | None:
    if request.keys.filled is None:
        return "the lengths of the keys are known on the host"
    if request.want.pattern:
        return "a step does not form the pattern"
    if facts.grad or request.dropout:
        return "a step has no gradients and no dropout"
    if isinstance(request.bias, relative.ShawBias) and request.bias.values is not None:
        return "Shaw's value vectors need the pattern"
    if isinstance(request.bias, disentangled.DisentangledBias):
        return "the cache keeps no scores of keys with distances"
    return None


def attend(
    q: contract.Queries, k: contract.Keys, v: contract.Values, request: contract.Request
) -> contract.AttentionResult:
    reach = _reach(request)
    # PyTorch's flash attention reads a head by one program. On an H200, with heads of 64 and 128
    # channels and 256 to 8,192 keys, it is at most 5 % faster, and up to 18 times slower.
    if reach is not None and _triton_can(q, k, v, request):
        return _by_triton(q, k, v, request)
    flash = q.is_cuda and q.dtype in fused.HALF and request.bias is None and request.softcap is None
    sizes = q.shape[2] == v.shape[2] and q.shape[2] <= fused.LARGEST_HEAD and q.shape[2] % 8 == 0
    flash = flash and sizes and reach is not None
    output, lse = (_flash if flash else _plain)(q, k, v, request)
    return fused.result_of(output, lse, request)


def _reach(request: contract.Request) -> int | None:
    """How many keys a query sees at most, if they are a band up to its own."""
    band = exact_band(request.mask)
    return None if band is None else int(min(band.before + 1, request.keys.longest))


def _triton_can(
    q: contract.Queries, k: contract.Keys, v: contract.Values, request: contract.Request
) -> bool:
    # The kernel multiplies float32 by three products of tensor cores, and the formula is exact.
    if not runs_triton(q) or q.dtype not in fused.HALF or request.bias is not None:
        return False
    return q.dtype == k.dtype == v.dtype and q.shape[2] == v.shape[2] and q.shape[2] in SIZES


def _by_triton(
    q: contract.Queries, k: contract.Keys, v: contract.Keys, request: contract.Request
) -> contract.AttentionResult:
    from manyheads.kernels.triton_one_query import one_query

    reach, filled = _reach(request), request.keys.filled
    assert reach is not None
    assert filled is not None
    scale, softcap = request.scale, request.softcap
    output, lse = one_query(
        q, k, v, filled, reach=reach, scale=scale, softcap=softcap, sink=request.sink
    )
    return contract.AttentionResult(output, lse if request.want.lse else None)


def _flash(
    q: contract.Queries, k: contract.Keys, v: contract.Keys, request: contract.Request
) -> tuple[Float[Tensor, "n h d"], Float[Tensor, "n h"]]:
    band, keys = exact_band(request.mask), request.keys
    assert band is not None
    before = -1 if band.before >= keys.longest - 1 else int(band.before)
    packed = (q, k, v, request.queries.offsets, keys.offsets, 1, keys.longest)
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        *packed,
        0.0,
        False,
        False,
        scale=request.scale,
        window_size_left=before,
        window_size_right=-1 if before < 0 else 0,
        seqused_k=keys.filled,
    )
    return output, lse.T


def _plain(
    q: contract.Queries, k: contract.Keys, v: contract.Values, request: contract.Request
) -> tuple[Float[Tensor, "n h e"], Float[Tensor, "n h"]]:
    """By the formula: with one query per sequence the pattern is no larger than the keys."""
    batch, heads = q.shape[0], k.shape[1]
    query = rearrange(q, "b (g r) d -> b g r d", g=heads)
    key, value = (rearrange(x, "(b s) g d -> b s g d", b=batch) for x in (k, v))
    scores = einsum(query.float() * request.scale, key.float(), "b g r d, b s g d -> b g r s")
    scores = rearrange(scores, "b g r s -> b (g r) s")
    if request.softcap is not None:
        scores = request.softcap * (scores / request.softcap).tanh()
    position = torch.arange(key.shape[1], device=q.device)
    assert request.keys.filled is not None
    last = request.keys.filled.long()[:, None] - 1
    if request.bias is not None:
        row = torch.arange(batch, device=q.device)[:, None, None]
        head = torch.arange(q.shape[1], device=q.device)[:, None]
        scores = scores + request.bias.score(head, row, last[:, None], position)
    visible = (position <= last) & request.mask.allows(last, position[None], last + 1)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    weights = rearrange(weights, "b (g r) s -> b g r s", g=heads)
    read = einsum(weights, value.float(), "b g r s, b s g e -> b g r e")
    return rearrange(read, "b g r e -> b (g r) e").to(q.dtype), lse
