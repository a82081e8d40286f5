"""What the kernel for windows supports; on CUDA tests/gpu/test_window_kernels.py runs it."""

from dataclasses import replace

import pytest
import torch

from manyheads.kernels import window
from manyheads.kernels.choose import attend
from manyheads.kernels.contract import Request, TensorFacts, Want
from manyheads.parts.masks import Blocks, Causal, Full, GlobalTokens, Window
from manyheads.parts.positions.alibi import Alibi
from manyheads.parts.positions.rotary import Rotary
from manyheads.ragged import Lengths

FACTS = TensorFacts(
    device="cuda",
    dtype=torch.bfloat16,
    heads=8,
    kv_heads=2,
    size=64,
    value_size=64,
    grad=True,
)
LENGTHS = Lengths.of([5, 0, 9])
REQUEST = Request(queries=LENGTHS, keys=LENGTHS, mask=Window(3, 2), scale=0.125)


@pytest.fixture(autouse=True)
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "HAS_TRITON", True)


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        replace(REQUEST, mask=Window(0)),
        replace(REQUEST, mask=Full()),
        replace(REQUEST, mask=Causal() & Window(2)),
        replace(REQUEST, want=Want(lse=True)),
        replace(REQUEST, queries=Lengths.of([5, 0, 9])),
        replace(REQUEST, rotation=Rotary().rotation(LENGTHS.positions, 64)),
    ],
)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_bands_of_whole_texts_are_supported(request_: Request, size: int) -> None:
    assert window.cannot(request_, replace(FACTS, size=size, value_size=size)) is None


@pytest.mark.parametrize(
    ("request_", "facts", "reason"),
    [
        (REQUEST, replace(FACTS, device="cpu"), "runs on CUDA"),
        (REQUEST, replace(FACTS, dtype=torch.float32), "float32"),
        (REQUEST, replace(FACTS, size=80, value_size=80), "80"),
        (REQUEST, replace(FACTS, value_size=32), "32"),
        (replace(REQUEST, mask=Blocks(4)), FACTS, "not a band"),
        (replace(REQUEST, mask=Window(3) | GlobalTokens()), FACTS, "not a band"),
        (replace(REQUEST, bias=Alibi().bias(8, torch.device("cpu"))), FACTS, "bias"),
        (replace(REQUEST, sink=torch.zeros(8)), FACTS, "sink"),
        (replace(REQUEST, dropout=0.1), FACTS, "dropout"),
        (replace(REQUEST, want=Want(pattern=True)), FACTS, "pattern"),
        (replace(REQUEST, queries=Lengths.of([1, 0, 1])), FACTS, "a query for every key"),
        (replace(REQUEST, keys=Lengths.with_capacity([5, 0, 9], 16, "cpu")), FACTS, "free slots"),
    ],
)
def test_what_it_cannot_do_has_a_reason(request_: Request, facts: TensorFacts, reason: str) -> None:
    answer = window.cannot(request_, facts)
    assert answer is not None
    assert reason in answer


def test_it_rotates_heads_of_which_all_channels_are_rotated() -> None:
    whole, half = (Rotary(fraction=share).rotation(LENGTHS.positions, 64) for share in (1.0, 0.5))
    assert window.rotates(replace(REQUEST, rotation=whole), 64)
    assert not window.rotates(replace(REQUEST, rotation=half), 64)
    assert not window.rotates(REQUEST, 64)


@pytest.mark.parametrize("kernel", ["auto", "reference", "banded", "batched"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_kernels_that_do_not_rotate_receive_rotated_queries_and_keys(
    kernel: str, fraction: float
) -> None:
    q, k, v = (torch.randn(14, heads, 64) for heads in (4, 2, 2))
    rotation = Rotary(fraction=fraction).rotation(LENGTHS.positions, 64)
    result = attend(q, k, v, replace(REQUEST, rotation=rotation), kernel)
    expected = attend(rotation(q), rotation(k), v, REQUEST, "reference")
    torch.testing.assert_close(result.output, expected.output)
