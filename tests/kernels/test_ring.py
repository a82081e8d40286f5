"""Texts shared by processes: outputs and gradients are those of one process, by the definition."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyheads.errors import KernelError
from manyheads.kernels import choose, ring
from manyheads.kernels.contract import Request
from manyheads.parts import masks
from manyheads.parts.masks import Causal, Full, GlobalTokens, Window
from manyheads.parts.positions.alibi import Alibi
from manyheads.parts.positions.relative import BucketTable, T5Buckets
from manyheads.ragged import ContextShard, Lengths, Ragged, Span
from tests.processes import in_processes

# Longer ones are divided; a short one and an empty one are not.
EACH = (150, 3, 0, 97, 264)
HEADS, KEY_HEADS, SIZE = 4, 2, 8


class Case(NamedTuple):
    mask: masks.Mask
    softcap: float | None = None
    sink: bool = False
    alibi: bool = False
    groups: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32


CASES = [
    Case(Causal()),
    Case(Full()),
    Case(Window(20), sink=True),
    Case(Window(9, 30), softcap=5.0),
    Case(Window(200)),
    Case(Causal(), sink=True, alibi=True),
    Case(Full(), sink=True, alibi=True),
    Case(Window(30, 4), alibi=True),
    Case(masks.Prefix(33)),
    Case(Window(8, 8) | GlobalTokens((0, -1))),
    Case(masks.Blocks(16), alibi=True),
    Case(masks.RandomBlocks(8)),
    Case(Causal(), softcap=3.0, groups=(3, 1)),
    Case(Causal(), dtype=torch.bfloat16),
    Case(Causal(), dtype=torch.float64),
]


def tensors(case: Case) -> list[Tensor]:
    """Queries, keys, values, the gradient of the output, and a sink."""
    draw = torch.Generator().manual_seed(1)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    shapes = [(sum(EACH), count, SIZE) for count in heads]
    wide = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [*(x.to(case.dtype) for x in wide), torch.randn(HEADS, generator=draw)]


Attend = Callable[[Tensor, Tensor, Tensor, Request], Tensor]


def gradients(case: Case, lengths: Lengths, inputs: list[Tensor], attend: Attend) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and the sink."""
    *inputs, grad, sink = inputs
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, sink)]
    request = Request(
        queries=lengths,
        keys=lengths,
        mask=case.mask,
        scale=0.3,
        softcap=case.softcap,
        sink=leaves[3] if case.sink else None,
        bias=Alibi().bias(HEADS, torch.device("cpu")) if case.alibi else None,
        groups=case.groups,
    )
    output = attend(*leaves[:3], request)
    used = leaves if case.sink else leaves[:3]
    return [output.detach(), *torch.autograd.grad(output, used, grad)]


def alone(case: Case) -> list[Tensor]:
    return gradients(
        case,
        Lengths.of(EACH),
        tensors(case),
        lambda q, k, v, request: choose.attend(q, k, v, request, "reference").output,
    )


def check_all(expected: list[list[Tensor]]) -> None:
    shard = ContextShard.in_group(EACH)
    for case, whole in zip(CASES, expected, strict=True):
        *by_token, sink = tensors(case)
        inputs = [*map(shard.take, by_token), sink]
        result = gradients(
            case,
            Lengths.of_shard(shard),
            inputs,
            lambda q, k, v, request: ring.attend(q, k, v, request).output,
        )
        if case.sink:
            result[4] = shard.reduce(result[4])
            torch.testing.assert_close(result.pop(), whole[4], atol=1e-4, rtol=1e-4)
        tolerance = 5e-2 if case.dtype is torch.bfloat16 else 1e-5
        for value, other in zip(result, whole, strict=False):
            torch.testing.assert_close(value, shard.take(other), atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def expected() -> list[list[Tensor]]:
    return [alone(case) for case in CASES]


@pytest.mark.parametrize("count", [2, 4])
def test_outputs_and_gradients_are_those_of_one_process(
    expected: list[list[Tensor]], count: int
) -> None:
    assert in_processes(count, lambda: check_all(expected))


@given(st.lists(st.integers(0, 400), max_size=5), st.integers(1, 5))
def test_every_token_has_one_process(each: list[int], size: int) -> None:
    shards = [ContextShard.of(each, size=size, rank=rank) for rank in range(size)]
    rows = torch.cat([shard.rows() for shard in shards])
    assert rows.sort().values.tolist() == list(range(sum(each)))
    for shard in shards:
        lengths = Lengths.of_shard(shard)
        assert lengths.each == shard.local_lengths
        assert len(lengths) == len(each)
        whole = Ragged(torch.arange(sum(each)), Lengths.of(each))
        assert whole.shard(shard).values.tolist() == shard.rows().tolist()


def work(shard: ContextShard, mask: masks.Mask) -> int:
    """The visible pairs of queries and keys of a process."""
    pairs = 0
    for turn in ring.turns_of(shard, mask):
        assert turn.source != shard.rank or turn.pairs
    for span in shard.own:
        query, key = torch.arange(span.start, span.stop), torch.arange(shard.lengths[span.text])
        length = torch.full((1, 1), shard.lengths[span.text])
        pairs += int(mask.allows(query[:, None], key[None], length).sum())
    return pairs


@pytest.mark.parametrize("mask", [Causal(), Full(), Window(50)])
def test_work_is_even(mask: masks.Mask) -> None:
    shards = [ContextShard.of((4000, 1000), size=4, rank=rank) for rank in range(4)]
    counts = [work(shard, mask) for shard in shards]
    assert max(counts) < 1.05 * min(counts)


def test_only_keys_that_a_query_sees_travel() -> None:
    shards = [ContextShard.of((800,), size=4, rank=rank) for rank in range(4)]
    # Process 1 holds 100 to 200 and 600 to 700; its first queries see 10 tokens of process 0.
    assert ring.visible_spans(shards[1], Window(10), reader=1, holder=0) == (Span(0, 90, 100),)
    assert ring.visible_spans(shards[1], Window(10), reader=1, holder=3) == ()
    sent = [sum(map(len, turn.sent)) for turn in ring.turns_of(shards[1], Window(10))]
    assert sent == [200, 10, 0, 10]


def test_what_needs_whole_texts_is_refused() -> None:
    lengths = Lengths.of_shard(ContextShard.of((64,), size=1, rank=0))
    q = torch.zeros(64, 2, 4)
    bias = BucketTable(T5Buckets(), 2).bias()
    request = Request(queries=lengths, keys=lengths, mask=Full(), scale=1.0, bias=bias)
    with pytest.raises(KernelError, match="BucketBias"):
        ring.attend(q, q, q, request)
