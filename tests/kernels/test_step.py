"""One query a sequence over rooms that only the device knows the filling of."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from manyheads.errors import KernelError
from manyheads.kernels import reference, step
from manyheads.kernels.choose import attend, choose
from manyheads.kernels.contract import Request, TensorFacts, Want
from manyheads.parts.masks import Causal, GlobalTokens, Mask, Window
from manyheads.parts.positions import Alibi, Shaw, T5Buckets
from manyheads.parts.positions.relative import Bias, BucketTable, ShawTable
from manyheads.ragged import Lengths
from tests.messages import refuses

FILLED, ROOM = (7, 1, 4), 9
HEADS, KV_HEADS, SIZE = 4, 2, 8


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bias_of(name: str, q: Tensor) -> Bias | None:
    if name == "alibi":
        return Alibi().bias(HEADS, q.device)
    if name == "t5":
        return BucketTable(T5Buckets(buckets=8, bidirectional=False), HEADS).bias()
    if name == "shaw":
        return ShawTable(Shaw(reach=2), SIZE).bias(q, SIZE**-0.5)
    return None


def request_for(mask: Mask, bias: Bias | None, sink: bool = False) -> Request:
    rooms = Lengths.of([ROOM] * len(FILLED))
    return Request(
        queries=Lengths.of([1] * len(FILLED)),
        keys=replace(rooms, filled=torch.tensor(FILLED, dtype=torch.int32)),
        mask=mask,
        scale=SIZE**-0.5,
        bias=bias,
        sink=drawn(HEADS, seed=5) if sink else None,
        want=Want(lse=True),
    )


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("bias", ["none", "alibi", "t5", "shaw"])
@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(2),
        Causal() & (Window(1) | GlobalTokens((0,))),
        Window(9) & GlobalTokens((5,)),
    ],
    ids=str,
)
@torch.no_grad()
def test_it_equals_the_reference_over_what_is_filled(mask: Mask, bias: str, sink: bool) -> None:
    q = drawn(len(FILLED), HEADS, SIZE)
    k, v = (drawn(len(FILLED) * ROOM, KV_HEADS, SIZE, seed=seed) for seed in (1, 2))
    request = request_for(mask, bias_of(bias, q), sink)
    result = attend(q, k, v, request)
    kept = [k.view(-1, ROOM, KV_HEADS, SIZE)[i, :length] for i, length in enumerate(FILLED)]
    read = [v.view(-1, ROOM, KV_HEADS, SIZE)[i, :length] for i, length in enumerate(FILLED)]
    plain = replace(request, keys=Lengths.of(FILLED))
    expected = reference.attend(q, torch.cat(kept), torch.cat(read), plain)
    torch.testing.assert_close(result.output, expected.output)
    torch.testing.assert_close(result.lse, expected.lse)


def test_what_lies_behind_the_filling_is_never_read() -> None:
    q = drawn(len(FILLED), HEADS, SIZE)
    k, v = (drawn(len(FILLED) * ROOM, KV_HEADS, SIZE, seed=seed) for seed in (1, 2))
    request = request_for(Causal(), None)
    before = attend(q, k, v, request).output
    for index, length in enumerate(FILLED):
        k.view(-1, ROOM, KV_HEADS, SIZE)[index, length:] = 1e4
        v.view(-1, ROOM, KV_HEADS, SIZE)[index, length:] = 1e4
    assert torch.equal(before, attend(q, k, v, request).output)


def test_only_it_serves_such_keys_and_it_serves_no_others() -> None:
    q, k = drawn(len(FILLED), HEADS, SIZE), drawn(len(FILLED) * ROOM, KV_HEADS, SIZE)
    request = request_for(Causal(), None)
    facts = TensorFacts.of(q, k, k, request)
    assert choose(request, facts).kernel == "step"
    plain = replace(request, keys=Lengths.of([ROOM] * len(FILLED)))
    assert "known on the host" in str(step.cannot(plain, facts))
    with refuses(
        KernelError,
        "a step does not form the pattern: use DynamicCache().",
    ):
        attend(q, k, k, replace(request, want=Want(pattern=True)))
