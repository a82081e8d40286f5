"""One query per sequence over a cache by our own kernel: what the formula gives.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_one_query_kernel.py --on cpu`.
"""

from dataclasses import replace

import pytest
import torch

from manyheads.kernels import step
from manyheads.kernels.contract import Request, Want
from manyheads.parts.masks import Causal, Mask, Window
from manyheads.ragged import Lengths

# Query heads, key heads, channels.
HEADS = {
    "each": (3, 3, 32),
    "shared": (6, 2, 64),
    "one": (20, 1, 128),
    "small": (4, 2, 16),
    "wide": (4, 2, 256),
}
MASKS = {"causal": Causal(), "window": Window(30), "itself": Window(0)}


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", HEADS)
# The longer one is shared by several programs.
@pytest.mark.parametrize("capacity", [150, 700])
def test_output_and_log_sum_exp(
    capacity: int, heads: str, mask: str, softcap: float | None, sink: bool, device: str
) -> None:
    query_heads, key_heads, size = HEADS[heads]
    filled = (7, 1, capacity, 131)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    request = request_for(filled, capacity, MASKS[mask], query_heads, softcap, sink, device)
    draw = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(len(filled), query_heads, size, generator=draw)
    k, v = torch.randn(2, len(filled) * capacity, key_heads, size, generator=draw)
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    result = step._by_triton(q, k, v, request)
    wide = replace(request, sink=None if request.sink is None else request.sink.double())
    output, lse = step._plain(q.double(), k.double(), v.double(), wide)
    expected = step.fused.result_of(output, lse, wide)
    limit = 1e-5 if device == "cpu" else 1e-2
    assert expected.lse is not None
    assert (result.output - expected.output).norm() < limit * expected.output.norm()
    assert (result.lse - expected.lse).norm() < limit * expected.lse.norm()


def request_for(
    filled: tuple[int, ...],
    capacity: int,
    mask: Mask,
    heads: int,
    softcap: float | None,
    sink: bool,
    device: str,
) -> Request:
    slots = Lengths.of([capacity] * len(filled), device)
    return Request(
        queries=Lengths.of([1] * len(filled), device),
        keys=replace(slots, filled=torch.tensor(filled, dtype=torch.int32, device=device)),
        mask=mask,
        scale=0.3,
        softcap=softcap,
        sink=torch.linspace(-2, 3, heads, device=device) if sink else None,
        want=Want(lse=True),
    )


@pytest.mark.parametrize("mask", [Causal(), Window(5000)])
@pytest.mark.parametrize(("capacity", "size"), [(4096, 64), (20_000, 64), (20_000, 256)])
def test_a_long_cache_is_shared_by_programs(
    capacity: int, size: int, mask: Mask, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = (capacity, 1, capacity - 7)
    request = request_for(filled, capacity, mask, 8, None, False, device)
    draw = torch.Generator().manual_seed(0)
    half = {"device": device, "dtype": torch.float16}
    q = torch.randn(len(filled), 8, size, generator=draw).to(**half)
    k, v = torch.randn(2, len(filled) * capacity, 2, size, generator=draw).to(**half)
    monkeypatch.setattr(step, "runs_triton", lambda _: True)
    monkeypatch.setattr(step, "_flash", None)
    result = step.attend(q, k, v, request)
    output, lse = step._plain(q.double(), k.double(), v.double(), request)
    assert (result.output.double() - output).norm() < 1e-2 * output.norm()
    assert (result.lse - lse).norm() < 1e-2 * lse.norm()


def test_a_sink_far_above_the_scores_keeps_small_outputs(device: str) -> None:
    request = request_for((40,), 64, Causal(), 2, None, False, device)
    request = replace(request, sink=torch.full((2,), 16.0, device=device))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 2, 32, generator=draw).to(device).half() for rows in (1, 64, 64))
    expected = step._plain(q.double(), k.double(), v.double(), replace(request, sink=None))
    expected = step.fused.result_of(*expected, replace(request, sink=request.sink.double()))
    result = step._by_triton(q, k, v, request)
    assert (result.output - expected.output).norm() < 1e-2 * expected.output.norm()


def test_no_sequence_at_all(device: str) -> None:
    request = request_for((), 8, Causal(), 2, None, False, device)
    empty = torch.empty(0, 2, 32, device=device)
    result = step._by_triton(empty, empty, empty, request)
    assert result.output.shape == (0, 2, 32)


def test_sequences_without_keys_give_zeros(device: str) -> None:
    request = request_for((0, 3), 8, Causal(), 2, None, False, device)
    q, k, v = (torch.randn(rows, 2, 32, device=device) for rows in (2, 16, 16))
    result = step._by_triton(q, k, v, request)
    assert result.lse is not None
    assert not result.output[0].any()
    assert (result.lse[0] == -torch.inf).all()
    assert result.output[1].isfinite().all()
