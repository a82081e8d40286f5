"""Key heads that serve different numbers of queries: every kernel says what the reference says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.attention import AttentionConfig
from manyheads.errors import ConfigError
from manyheads.kernels import fused
from manyheads.kernels.choose import attend
from manyheads.kernels.contract import AttentionResult, Request, Want
from manyheads.kernels.uneven_groups import attend_by_group, attend_repeated
from manyheads.parts.masks import Causal, Window
from manyheads.parts.positions import Alibi, Rotary
from manyheads.parts.positions.relative import BucketBias, ShawBias, T5Buckets
from manyheads.ragged import Lengths

GROUPS = (3, 1, 3, 2)
LENGTHS = Lengths.of((5, 70, 1))


def tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(LENGTHS.total, heads, 8, generator=generator).requires_grad_()
        for heads in (sum(GROUPS), len(GROUPS), len(GROUPS))
    )


def request(**changes: Any) -> Request:
    query = Request(
        queries=LENGTHS, keys=LENGTHS, mask=Causal(), scale=0.4, groups=GROUPS, want=Want(lse=True)
    )
    return replace(query, **changes)


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(torch.tensor(GROUPS), dim=1)


BIASES = {
    "none": None,
    "alibi": Alibi(indices=(0, 1, 3, 4, 5, 6, 8, 10, 11), total=12).bias(9, torch.device("cpu")),
    "buckets": BucketBias(
        T5Buckets(buckets=8, reach=10), torch.linspace(-1, 1, 72).view(8, 9).contiguous()
    ),
    "shaw": ShawBias(3, torch.linspace(-1, 1, LENGTHS.total * 63).view(-1, 9, 7), None),
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("kernel", ["reference", "fused", "banded"])
def test_every_kernel_agrees_with_keys_that_are_repeated(kernel: str, bias: str) -> None:
    mask = Window(4, 3) if kernel == "banded" else Causal()
    query = request(mask=mask, bias=BIASES[bias])
    mine, peer = tensors(), tensors()
    result = attend(*mine, query, kernel)
    q, k, v = peer
    wanted = attend(q, repeated(k), repeated(v), replace(query, groups=None), "reference")
    torch.testing.assert_close(result.output, wanted.output, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(result.lse, wanted.lse, atol=1e-5, rtol=1e-4)
    for answer in (result, wanted):
        answer.output.square().sum().backward()
    for one, other in zip(mine, peer, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)


def test_sinks_are_each_heads_own() -> None:
    sink = torch.linspace(-2, 2, sum(GROUPS))
    q, k, v = (each.detach() for each in tensors())
    query = request(sink=sink)
    result = attend(q, k, v, query, "fused")
    wanted = attend(q, repeated(k), repeated(v), replace(query, groups=None), "reference")
    torch.testing.assert_close(result.output, wanted.output, atol=1e-5, rtol=1e-4)


def test_a_step_of_fixed_shape_agrees() -> None:
    generator = torch.Generator().manual_seed(1)
    filled = torch.tensor([3, 6], dtype=torch.int32)
    keys = replace(Lengths.of((6, 6)), filled=filled)
    q = torch.randn(2, sum(GROUPS), 8, generator=generator)
    k, v = (torch.randn(12, len(GROUPS), 8, generator=generator) for _ in range(2))
    query = request(queries=Lengths.of((1, 1)), keys=keys, mask=Causal())
    result = attend(q, k, v, query)
    wanted = attend(q, repeated(k), repeated(v), replace(query, groups=None))
    torch.testing.assert_close(result.output, wanted.output)


@pytest.mark.parametrize("bias", BIASES)
def test_one_call_with_copies_of_keys_agrees(bias: str) -> None:
    query = request(bias=BIASES[bias])
    mine, peer = tensors(), tensors()
    result, wanted = attend_repeated(fused.attend, *mine, query), attend(*peer, query, "reference")
    torch.testing.assert_close(result.output, wanted.output)
    torch.testing.assert_close(result.lse, wanted.lse)
    pull = torch.randn_like(result.output)
    for one, other in zip(
        torch.autograd.grad(result.output, mine, pull),
        torch.autograd.grad(wanted.output, peer, pull),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_equal_groups_become_their_number() -> None:
    one = AttentionConfig(width=64, heads=8, kv_heads=(4, 4))
    assert one == AttentionConfig(width=64, heads=8, kv_heads=2)
    assert one.groups is None
    uneven = AttentionConfig(width=64, heads=7, head_size=8, kv_heads=(4, 3))
    assert uneven.groups == (4, 3)
    assert uneven.key_heads == 2
    assert uneven.owners == (0, 0, 0, 0, 1, 1, 1)
    for wrong, match in (((4, 4), "must sum to heads=7"), ((7, 0), "at least 1")):
        with pytest.raises(ConfigError, match=match):
            AttentionConfig(width=64, heads=7, head_size=8, kv_heads=wrong)


@pytest.mark.parametrize("unevenly", [attend_repeated, attend_by_group])
def test_a_kernel_receives_the_rotation(unevenly: Any) -> None:
    rotation = Rotary().rotation(LENGTHS.positions, 8)
    seen = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, query: Request) -> AttentionResult:
        seen.append(query.rotation)
        return fused.attend(q, k, v, query)

    unevenly(kernel, *tensors(), request(rotation=rotation))
    assert set(map(id, seen)) == {id(rotation)}
