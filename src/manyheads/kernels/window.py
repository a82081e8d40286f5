"""CUDA: self-attention over packed sequences in a Triton kernel that rotates queries and keys.

It reads only what is in reach: windows with gradients, and in inference any band of the pattern.
"""

from torch.compiler import is_compiling

from manyheads.devices import HAS_TRITON
from manyheads.kernels import contract, fused
from manyheads.parts.masks import exact_band
from manyheads.ragged import Lengths

# Channels of a head, which the blocks of the kernel are cut for.
SIZES = (32, 64, 128)


def cannot(request: contract.Request, facts: contract.TensorFacts) -> str | None:
    if facts.device != "cuda":
        return f"window runs on CUDA, not on {facts.device}"
    if not HAS_TRITON:
        return "triton is not installed"
    if facts.dtype not in fused.HALF:
        return f"window supports float16 and bfloat16, not {facts.dtype}"
    if request.want.pattern:
        return "a fused kernel does not form the pattern"
    if exact_band(request.mask) is None:
        return "the mask is not a band around the diagonal"
    if request.bias is not None:
        return "window takes no bias"
    if request.sink is not None and facts.grad:
        return "its log-sum-exp, which a sink needs, carries no gradient"
    if request.dropout:
        return "window has no dropout"
    if facts.size != facts.value_size or facts.size not in SIZES:
        return f"head sizes {facts.size} and {facts.value_size} are not both 32, 64 or 128"
    if not request.keys.tight:
        return "the cache has free slots between sequences"
    if not _same(request.queries, request.keys):
        return "window needs a query for every key"
    return None


def _same(queries: Lengths, keys: Lengths) -> bool:
    # Reading each length would specialize compiled code to this batch.
    return queries is keys or (not is_compiling() and queries.each == keys.each)


def rotates(request: contract.Request, size: int) -> bool:
    """Whether the kernel itself rotates the queries and keys of heads of this size."""
    return request.rotation is not None and request.rotation.covers(size)


def attend(
    q: contract.Queries, k: contract.Keys, v: contract.Keys, request: contract.Request
) -> contract.AttentionResult:
    # Importing it loads the compiler, which takes seconds.
    from manyheads.kernels.triton_window import UNLIMITED, window_attention

    band = exact_band(request.mask)
    assert band is not None
    cos = sin = None
    if request.rotation is not None and rotates(request, q.shape[2]):
        cos, sin = request.rotation.cos, request.rotation.sin
    lengths = request.queries
    output, lse = window_attention(
        *(q, k, v, cos, sin, lengths.sequence_of_token, lengths.offsets),
        *(int(min(side, UNLIMITED)) for side in (band.before, band.after)),
        request.scale,
    )
    return fused.result_of(output, lse.T, request)
