"""CUDA flash attention over packed sequences: full, causal and sliding windows, no padding."""

import math
from typing import Any

from manyheads.kernels import contract, fused
from manyheads.parts.masks import exact_band


def cannot(request: contract.Request, facts: contract.TensorFacts) -> str | None:
    if facts.device != "cuda":
        return f"varlen runs on CUDA, not on {facts.device}"
    if facts.dtype not in fused.HALF:
        return f"flash attention supports float16 and bfloat16, not {facts.dtype}"
    if request.want.pattern:
        return "a fused kernel does not form the pattern"
    if exact_band(request.mask) is None:
        return "the mask is not a band around the diagonal"
    if request.bias is not None:
        return "flash attention takes no bias"
    if request.sink is not None and facts.grad:
        return "the flash log-sum-exp that a sink needs carries no gradient"
    if request.dropout:
        return "varlen has no dropout"
    if facts.size != facts.value_size or facts.size > fused.LARGEST_HEAD or facts.size % 8:
        return f"head sizes {facts.size} and {facts.value_size} are not one multiple of 8 up to 256"
    if not request.keys.tight:
        return "the cache has free slots between sequences"
    if request.queries.longest == 0 or request.keys.longest == 0:
        return "there are no tokens"
    if request.queries.longest == 1 and not request.queries.uniform:
        return "flash decoding needs a query of every sequence"
    if 0 < request.mask.reach.after < math.inf and _more_queries(request):
        return "flash windows are wrong if a sequence has more queries than keys"
    return None


def _more_queries(request: contract.Request) -> bool:
    # Reading each length would specialize compiled code to this batch.
    same = request.queries is request.keys
    return not same and any(queries > keys for queries, keys in request.shapes)


def attend(
    q: contract.Queries, k: contract.Keys, v: contract.Keys, request: contract.Request
) -> contract.AttentionResult:
    # Importing it loads the compiler, which takes seconds.
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    band = exact_band(request.mask)
    assert band is not None
    # Older versions of torch share key heads by default, newer ones have an argument.
    has_argument = "enable_gqa" in (varlen_attn.__kwdefaults__ or {})
    sharing: dict[str, Any] = {"enable_gqa": True} if has_argument else {}
    queries, keys = request.queries, request.keys
    packed = (q, k, v, queries.offsets, keys.offsets, queries.longest, keys.longest)
    longest = max(queries.longest, keys.longest)
    before, after = (-1 if side >= longest - 1 else int(side) for side in (band.before, band.after))
    result = varlen_attn(
        *packed,
        return_aux=AuxRequest(lse=True),
        scale=request.scale,
        window_size=(before, after),
        **sharing,
    )
    # Flash gives +inf for a row without visible keys.
    output, lse = result[0], result[1].T
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    return fused.result_of(output, lse, request)
