"""Which kernel runs, and why not a faster one."""

from dataclasses import replace

import pytest
import torch

from manyheads.errors import KernelError
from manyheads.kernels import window
from manyheads.kernels.choose import KERNELS, Choice, attend, choose
from manyheads.kernels.contract import Request, TensorFacts, Want
from manyheads.parts.masks import Blocks, Causal, Full, GlobalTokens, Mask, RandomBlocks, Window
from manyheads.parts.positions.alibi import Alibi
from manyheads.parts.positions.disentangled import DisentangledBias
from manyheads.parts.positions.relative import Bias, BucketBias, ShawBias, T5Buckets
from manyheads.ragged import Lengths
from tests.messages import refuses

CPU = TensorFacts(
    device="cpu",
    dtype=torch.float32,
    heads=8,
    kv_heads=8,
    size=64,
    value_size=64,
    grad=True,
)
CUDA = replace(CPU, device="cuda", dtype=torch.bfloat16)

MIXED = Lengths.of([1000, 17, 300])
EQUAL = Lengths.of([300, 300])
SHORT = Lengths.of([128, 17, 30])

ALIBI = Alibi().bias(8, torch.device("cpu"))
T5 = BucketBias(T5Buckets(), torch.zeros(32, 8, requires_grad=True))
T5_FIXED = BucketBias(T5Buckets(), torch.zeros(32, 8))
DEBERTA = DisentangledBias(
    torch.zeros(1317, 8, 4), None, torch.zeros(1999, dtype=torch.long), torch.zeros(1317).long()
)
SHAW_VALUES = ShawBias(1, torch.zeros(1317, 8, 3), torch.zeros(3, 64))


def request_for(
    mask: Mask,
    lengths: Lengths = MIXED,
    *,
    bias: Bias | None = None,
    sink: bool = False,
    dropout: float = 0.0,
    pattern: bool = False,
) -> Request:
    return Request(
        queries=lengths,
        keys=lengths,
        mask=mask,
        scale=0.125,
        bias=bias,
        sink=torch.zeros(8) if sink else None,
        dropout=dropout,
        want=Want(pattern=pattern),
    )


@pytest.fixture(autouse=True)
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "HAS_TRITON", True)


@pytest.mark.parametrize(
    ("request_", "facts", "kernel"),
    [
        (request_for(Full()), CPU, "fused"),
        (request_for(Full(), SHORT), CPU, "batched"),
        (request_for(Full(), SHORT), replace(CPU, grad=False), "fused"),
        (request_for(Full(), Lengths.of([17, 17])), CPU, "fused"),
        (request_for(Causal()), CPU, "fused"),
        (request_for(Blocks(64) | RandomBlocks(64) | GlobalTokens()), CPU, "fused"),
        (request_for(Window(64, 64)), CPU, "banded"),
        (request_for(Window(128) & Blocks(16)), CPU, "banded"),
        (request_for(Window(64, 64), bias=ALIBI), CPU, "banded"),
        (request_for(Window(600)), CPU, "fused"),
        (request_for(Window(64, 64), EQUAL, sink=True), replace(CPU, grad=False), "banded"),
        (request_for(Window(64, 64), sink=True), CPU, "batched"),
        (request_for(Full(), bias=T5), CPU, "batched"),
        (request_for(Full(), bias=DEBERTA), replace(CPU, grad=False), "fused"),
        (request_for(Full(), bias=DEBERTA), CUDA, "batched"),
        (request_for(Full(), bias=T5), replace(CPU, grad=False), "fused"),
        (request_for(Full(), bias=T5_FIXED), CPU, "fused"),
        (request_for(Full(), bias=SHAW_VALUES), replace(CPU, grad=False), "batched"),
        (request_for(Causal(), dropout=0.1), CPU, "batched"),
        (request_for(Window(64), pattern=True), CPU, "reference"),
        (request_for(Window(64)), replace(CPU, value_size=32), "fused"),
        (request_for(Causal()), CUDA, "varlen"),
        (request_for(Window(64, 64)), CUDA, "window"),
        (request_for(Window(64, 64)), replace(CUDA, size=80, value_size=80), "varlen"),
        (request_for(Window(64) & Causal()), replace(CUDA, dtype=torch.float16), "window"),
        (request_for(Window(600)), CUDA, "varlen"),
        (request_for(Causal()), replace(CUDA, grad=False), "window"),
        (request_for(Causal(), EQUAL), CUDA, "fused"),
        (request_for(Window(64), EQUAL), CUDA, "window"),
        (request_for(Window(300), EQUAL), CUDA, "fused"),
        (request_for(Window(64), sink=True), CUDA, "flex"),
        (request_for(Window(64), sink=True), replace(CUDA, grad=False), "window"),
        (request_for(Window(64), dropout=0.1), CUDA, "batched"),
        (request_for(Causal(), bias=ALIBI), CUDA, "flex"),
        (request_for(Causal(), sink=True), CUDA, "flex"),
        (request_for(Window(64) | GlobalTokens()), CUDA, "flex"),
        (request_for(Causal(), dropout=0.1), CUDA, "fused"),
        (request_for(Full(), bias=SHAW_VALUES), CUDA, "batched"),
        (request_for(Causal(), pattern=True), CUDA, "reference"),
        (request_for(Full()), replace(CPU, device="mps"), "batched"),
    ],
)
def test_the_fastest_kernel_that_can_is_chosen(
    request_: Request, facts: TensorFacts, kernel: str
) -> None:
    choice = choose(request_, facts)
    assert choice.kernel == kernel
    assert kernel not in dict(choice.skipped)


def test_a_choice_has_the_reason_of_each_skipped_kernel() -> None:
    assert str(choose(request_for(Causal(), dropout=0.1), CPU)) == (
        "batched (not banded: the mask is not limited on both sides; "
        "not fused: the CPU's fused kernel has no dropout)"
    )
    assert str(choose(request_for(Window(400)), CPU)) == "banded"
    assert str(Choice("varlen", ())) == "varlen"


def test_without_triton_flash_attention_serves_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "HAS_TRITON", False)
    choice = choose(request_for(Window(64, 64)), CUDA)
    assert choice.kernel == "varlen"
    assert dict(choice.skipped)["window"] == "triton is not installed"


def test_a_cached_step_has_fewer_queries_than_the_kernel_for_windows_needs() -> None:
    request_ = replace(request_for(Window(64)), queries=Lengths.of([3, 1, 2]))
    assert choose(request_, CUDA).kernel == "varlen"
    same = replace(request_for(Window(64)), queries=Lengths.of(MIXED.each))
    assert choose(same, CUDA).kernel == "window"


def test_a_window_that_saves_nothing_is_no_reason_for_bands() -> None:
    lengths = Lengths.of([257])
    assert choose(request_for(Window(64, 63), lengths), CPU).kernel == "banded"
    choice = choose(request_for(Window(64, 64), lengths), CPU)
    assert choice.kernel == "fused"
    assert dict(choice.skipped)["banded"] == (
        "the window saves nothing on sequences of at most 257 tokens"
    )


def test_auto_and_every_able_kernel_by_name_give_one_answer() -> None:
    lengths = Lengths.of([40, 0, 1])
    q, k, v = torch.randn(3, 41, 4, 8).unbind()
    request = Request(queries=lengths, keys=lengths, mask=Window(5, 2), scale=0.3)
    expected = attend(q, k, v, request, "reference").output
    for kernel in ("auto", "fused", "banded", "batched"):
        torch.testing.assert_close(attend(q, k, v, request, kernel).output, expected)


def test_a_kernel_requested_by_name_that_cannot_serve_names_those_that_can() -> None:
    q = torch.randn(5, 2, 8)
    request = request_for(Full(), Lengths.of([5]))
    with refuses(
        KernelError,
        "the mask is not limited on both sides: use auto, reference, fused, batched.",
    ):
        attend(q, q, q, request, "banded")


def test_an_unknown_kernel_is_an_error_that_lists_the_known() -> None:
    q = torch.randn(5, 2, 8)
    with refuses(
        KernelError,
        "there is no kernel 'flash': "
        "use auto, reference, fused, banded, batched, window, varlen, flex, step.",
    ):
        attend(q, q, q, request_for(Full(), Lengths.of([5])), "flash")


def test_facts_need_gradients_where_anything_learns() -> None:
    q = torch.randn(5, 2, 8)
    learns = q.clone().requires_grad_()
    lengths = Lengths.of([5])
    plain = request_for(Full(), lengths)
    assert not TensorFacts.of(q, q, q, plain).grad
    assert TensorFacts.of(q, q, learns, plain).grad
    assert TensorFacts.of(q, q, q, request_for(Full(), lengths, bias=T5)).grad
    assert TensorFacts.of(q, q, q, replace(plain, sink=torch.zeros(2, requires_grad=True))).grad
    with torch.no_grad():
        assert not TensorFacts.of(learns, learns, learns, plain).grad


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_kernels_of_the_gpu_refuse_the_cpu(kernel: str) -> None:
    assert KERNELS[kernel].cannot(request_for(Causal()), CPU) == (
        f"{kernel} runs on CUDA, not on cpu"
    )


@pytest.mark.parametrize(
    ("queries", "keys", "shapes"),
    [
        ([4], [9], {(4, 9)}),
        ([4, 4], [9, 9], {(4, 9)}),
        ([4, 4], [9, 8], {(4, 9), (4, 8)}),
        ([4, 0, 4], [9, 9, 9], {(4, 9), (0, 9)}),
    ],
)
def test_a_batch_is_uniform_where_one_call_serves_it(
    queries: list[int], keys: list[int], shapes: set[tuple[int, int]]
) -> None:
    request = Request(queries=Lengths.of(queries), keys=Lengths.of(keys), mask=Full(), scale=1.0)
    assert request.shapes == shapes
    assert request.uniform == (len(shapes) == 1)


def test_on_cuda_few_lengths_are_not_worth_compiling() -> None:
    for each, kernel in (([30, 40], "fused"), (range(100, 1000, 100), "flex")):
        lengths = Lengths.of(list(each))
        request = Request(queries=lengths, keys=lengths, mask=Causal(), scale=1.0)
        assert choose(request, replace(CUDA, dtype=torch.float32)).kernel == kernel
