"""CUDA flex attention: biases, global tokens, blocks and trainable sinks in one compiled kernel."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from manyheads.kernels import contract, fused
from manyheads.parts.masks import Mask
from manyheads.parts.positions import disentangled, relative
from manyheads.ragged import Lengths

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

SMALLEST_HEAD = 16
BLOCK = 128
# Pairs of tokens that are checked at once while a block mask is made.
LARGEST_STRIP = 2**23
# Each kind of mask, bias and dtype is compiled once; beyond the limit torch would form n x n.
MAX_VARIANTS = 256
# A bias from a table takes shared memory that larger tiles would need.
SMALL_TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}


def cannot(request: contract.Request, facts: contract.TensorFacts) -> str | None:
    if facts.device != "cuda":
        return f"flex runs on CUDA, not on {facts.device}"
    if request.want.pattern:
        return "a fused kernel does not form the pattern"
    if request.dropout:
        return "flex has no dropout"
    if isinstance(request.bias, relative.ShawBias) and request.bias.values is not None:
        return "Shaw's value vectors need the pattern"
    if isinstance(request.bias, disentangled.DisentangledBias):
        return "flex has no scores of keys with distances"
    if facts.size < SMALLEST_HEAD or facts.value_size < SMALLEST_HEAD:
        return f"flex needs heads of at least {SMALLEST_HEAD} channels"
    if not request.keys.tight:
        return "the cache has free slots between sequences"
    if request.queries.longest == 0 or request.keys.longest == 0:
        return "there are no tokens"
    if request.queries.positions.shape[0] < BLOCK:
        # torch has another kernel for few queries, which fails for some head counts.
        return f"fewer than {BLOCK} queries are not worth a compiled kernel"
    return None


def attend(
    q: contract.Queries, k: contract.Keys, v: contract.Values, request: contract.Request
) -> contract.AttentionResult:
    output, aux = _flex(
        *(rearrange(x, "n h d -> 1 h n d") for x in (q, k, v)),
        score_mod=_score_mod(request),
        block_mask=_block_mask(request),
        scale=request.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=SMALL_TILES if request.bias is not None else None,
        return_aux=flex.AuxRequest(lse=True),
    )
    output, lse = rearrange(output, "1 h n e -> n h e"), rearrange(aux.lse, "1 h n -> n h")
    return fused.result_of(output, lse, request)


def _flex(*tensors: Tensor, **settings: Any) -> Any:
    run: Callable[..., Any] = flex.flex_attention
    if torch.compiler.is_compiling():
        return run(*tensors, **settings)
    # The numbers of a mask or bias are compiled in; only lengths may change without a new kernel.
    many = torch._dynamo.config.patch(recompile_limit=MAX_VARIANTS, specialize_int=True)
    # Donated buffers would forbid a second backward pass through the same graph.
    with many, torch._functorch.config.patch(donated_buffer=False):
        return _compiled(run)(*tensors, **settings)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _query_positions(queries: Lengths, keys: Lengths) -> Int[Tensor, " n"]:
    """The position of each query among its keys."""
    shift = keys.offsets.diff() - queries.offsets.diff()
    return queries.positions + shift[queries.sequence_of_token]


def _block_mask(request: contract.Request) -> BlockMask:
    """Computed once for all layers with the same mask and lengths."""
    if torch.compiler.is_compiling():
        return _make_block_mask(request.mask, request.queries, request.keys)
    queries, keys = request.queries, request.keys
    return _cached_block_mask(request.mask, queries.each, keys.each, keys.offsets.device)


@lru_cache(maxsize=16)
def _cached_block_mask(
    mask: Mask, queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device
) -> BlockMask:
    # It is cached for later batches, which may need gradients.
    with torch.inference_mode(False):
        return _make_block_mask(mask, Lengths.of(queries, device), Lengths.of(keys, device))


def _make_block_mask(mask: Mask, queries: Lengths, keys: Lengths) -> BlockMask:
    tokens, others = queries.positions.shape[0], keys.positions.shape[0]
    may_see = _mask_mod(mask, queries, keys)
    met = _pairs_per_block(may_see, tokens, others, keys.offsets.device)
    full = met == BLOCK * BLOCK
    return BlockMask.from_kv_blocks(
        *_set_blocks((met > 0) & ~full),
        *_set_blocks(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=may_see,
        seq_lengths=(tokens, others),
    )


def _pairs_per_block(
    may_see: MaskMod, tokens: int, others: int, device: torch.device
) -> Int[Tensor, "query_blocks key_blocks"]:
    """The number of visible pairs in each block, in strips so that memory stays linear.

    torch 2.11 cannot compile its own `create_block_mask` with gradients where lengths change.
    """
    nothing = torch.zeros((), dtype=torch.long, device=device)
    queries, keys = _blocks(tokens, device), _blocks(others, device)
    key = keys[None, :, None, :]

    def count(queries: Int[Tensor, "t i"]) -> Int[Tensor, "t s"]:
        query = queries[:, None, :, None]
        met = may_see(nothing, nothing, query.clamp(max=tokens - 1), key.clamp(max=others - 1))
        return (met & (query < tokens) & (key < others)).sum((2, 3), dtype=torch.int)

    if torch.compiler.is_compiling():
        # A loop over strips would be compiled for one length. At once, Longformer's mask takes two
        # bytes per pair on an H200.
        return count(queries)
    at_once = max(1, LARGEST_STRIP // (others * BLOCK))
    return torch.cat([count(strip) for strip in queries.split(at_once)])


def _blocks(tokens: int, device: torch.device) -> Int[Tensor, "blocks tokens"]:
    """The numbers of the tokens by block; the last block goes on beyond them."""
    count = (tokens + BLOCK - 1) // BLOCK
    return torch.arange(count * BLOCK, device=device).view(count, BLOCK)


def _set_blocks(blocks: Bool[Tensor, "t s"]) -> tuple[Int[Tensor, "1 1 t"], Int[Tensor, "1 1 t s"]]:
    """For each row of blocks, how many are set and which, the set ones first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int)[None, None], order.int()[None, None]


def _mask_mod(mask: Mask, queries: Lengths, keys: Lengths) -> MaskMod:
    query_sequence, key_sequence = queries.sequence_of_token, keys.sequence_of_token
    query_position, key_position = _query_positions(queries, keys), keys.positions
    lengths = keys.offsets.diff().long()

    def may_see(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        sequence = query_sequence[query]
        allowed = mask.allows(query_position[query], key_position[key], lengths[sequence])
        return allowed & (sequence == key_sequence[key])

    return may_see


def _score_mod(request: contract.Request) -> Callable[..., Tensor] | None:
    bias = request.bias
    if bias is None:
        return None
    query_position = _query_positions(request.queries, request.keys)
    key_position = request.keys.positions

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return score + bias.score(head, query, query_position[query], key_position[key])

    return add_bias
