"""Triton kernels that split a joint projection into rotated queries, rotated keys and values.

Importing this file needs triton: import it inside a function that runs on CUDA.

A compiler does the forward pass well. Its backward pass joins three gradients in one kernel that
computes all three for every number: 0.29 ms per layer of a masked-language step on an H200, eight
times what reading and writing take.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Numbers of one half of the heads per program.
PER_PROGRAM = 4096


@triton.jit
def _turn(
    joined_at,
    query_at,
    key_at,
    value_at,
    cos_at,
    sin_at,
    tokens,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    BACK: tl.constexpr,
):
    kind = joined_at.dtype.element_ty
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.arange(0, WIDE)[None, :, None]
    channel = tl.arange(0, HALF)[None, None, :]
    # A program computes one part. It names all three, masking the other two, because compilers see
    # which tensors are written from the pointers that are used, not from those that are selected.
    part = tl.program_id(1)
    in_batch = token < tokens
    as_query = in_batch & (head < HEADS) & (part == 0)
    as_key = in_batch & (head < KEYS) & (part == 1)
    as_value = in_batch & (head < KEYS) & (part == 2)
    inside = as_query | as_key | as_value
    before = tl.where(part == 0, 0, HEADS + (part - 1) * KEYS)
    joined = (token * (HEADS + 2 * KEYS) + before + head) * (2 * HALF) + channel
    query = (token * HEADS + head) * (2 * HALF) + channel
    key = (token * KEYS + head) * (2 * HALF) + channel
    if BACK:
        first = tl.load(query_at + query, mask=as_query, other=0.0).to(tl.float32)
        first += tl.load(key_at + key, mask=as_key, other=0.0).to(tl.float32)
        first += tl.load(value_at + key, mask=as_value, other=0.0).to(tl.float32)
        second = tl.load(query_at + query + HALF, mask=as_query, other=0.0).to(tl.float32)
        second += tl.load(key_at + key + HALF, mask=as_key, other=0.0).to(tl.float32)
        second += tl.load(value_at + key + HALF, mask=as_value, other=0.0).to(tl.float32)
    else:
        first = tl.load(joined_at + joined, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(joined_at + joined + HALF, mask=inside, other=0.0).to(tl.float32)
    # Values are not rotated.
    turns = in_batch & (part < 2)
    cos = tl.load(cos_at + token * HALF + channel, mask=turns, other=1.0)
    sin = tl.load(sin_at + token * HALF + channel, mask=turns, other=0.0)
    if BACK:
        sin = -sin
    left = (first * cos - second * sin).to(kind)
    right = (second * cos + first * sin).to(kind)
    if BACK:
        tl.store(joined_at + joined, left, mask=inside)
        tl.store(joined_at + joined + HALF, right, mask=inside)
    else:
        tl.store(query_at + query, left, mask=as_query)
        tl.store(query_at + query + HALF, right, mask=as_query)
        tl.store(key_at + key, left, mask=as_key)
        tl.store(key_at + key + HALF, right, mask=as_key)
        tl.store(value_at + key, left, mask=as_value)
        tl.store(value_at + key + HALF, right, mask=as_value)


@triton_op("manyheads::split_rotated", mutates_args=())
def split_rotated(
    joined: Tensor, cos: Tensor, sin: Tensor, heads: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries (n, heads, 2 half), rotated keys (n, keys, 2 half), and values as keys.

    `joined` is (n, rows), cosines and sines are (n, 1, half). torch parses these annotations and
    does not know those with shapes.
    """
    size = 2 * cos.shape[-1]
    query = joined.new_empty(joined.shape[0], heads, size)
    key, value = (joined.new_empty(joined.shape[0], keys, size) for _ in range(2))
    _launch(joined.contiguous(), (query, key, value), cos, sin, back=False)
    return query, key, value


@triton_op("manyheads::join_rotated", mutates_args=())
def _join_rotated(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The backward pass: rotated the other way, and joined."""
    parts = tuple(part.contiguous() for part in (query, key, value))
    rows = sum(part.shape[1] for part in parts) * query.shape[2]
    joined = query.new_empty(query.shape[0], rows)
    _launch(joined, parts, cos, sin, back=True)
    return joined


def _launch(
    joined: Tensor, parts: tuple[Tensor, ...], cos: Tensor, sin: Tensor, *, back: bool
) -> None:
    query, key, value = parts
    tokens, heads, size = query.shape
    wide = triton.next_power_of_2(max(heads, key.shape[1]))
    together = max(1, PER_PROGRAM // (wide * size // 2))
    wrap_triton(_turn)[(triton.cdiv(tokens, together), 3)](
        joined,
        query,
        key,
        value,
        cos,
        sin,
        tokens,
        HEADS=heads,
        KEYS=key.shape[1],
        HALF=size // 2,
        WIDE=wide,
        TOKENS=together,
        BACK=back,
        num_warps=8,
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    _, cos, sin, _, _ = inputs
    ctx.save_for_backward(cos, sin)


def _back(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
    return _join_rotated(query, key, value, *ctx.saved_tensors), None, None, None, None


torch.library.register_autograd("manyheads::split_rotated", _back, setup_context=_keep)
