"""Every CUDA kernel gives the output, log-sum-exp and gradients of the reference."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from kernel_cases import (
    BIASES,
    DTYPES,
    LAYOUTS,
    MASKS,
    Case,
    Inputs,
    distance,
    flex_cases,
    refusal,
)
from torch import Tensor

from manyheads.errors import KernelError
from manyheads.kernels import choose, flex
from manyheads.kernels.contract import Request, TensorFacts, Want
from manyheads.parts.masks import Causal, Mask, Window
from manyheads.ragged import Lengths, Ragged

if TYPE_CHECKING:
    from ledger import Ledger

# Past its limit of recompilations torch would quietly form the n x n pattern.
pytestmark = pytest.mark.filterwarnings("error:flex_attention called without torch.compile")

UNCOMPILED = ("fused", "window", "varlen", "batched", "reference")
BANDS = ("all", "causal", "window before", "window both")
SHARED = ("mha", "gqa", "mqa")


@pytest.fixture(autouse=True)
def many_variants() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000):
        yield


def check(cases: Iterable[Case], device: str, ledger: "Ledger") -> None:
    """Runs the cases that the kernel will do; the rest it must refuse with a reason."""
    faults = []
    for case in cases:
        if reason := refusal(case, device):
            ledger.refusals[case.kernel, reason] += 1
            inputs = Inputs(case, device, exact=False)
            with pytest.raises(KernelError):
                choose.attend(inputs.q, inputs.k, inputs.v, inputs.request(case), case.kernel)
            continue
        result = distance(case, device)
        ledger.closeness[case.kernel, case.mask, case.dtype].add(result.output, result.gradient)
        faults += [f"{case}: {fault}" for fault in result.faults]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", UNCOMPILED)
def test_every_mask_with_every_bias_and_head_count(
    kernel: str, mask: str, dtype: str, device: str, ledger: "Ledger"
) -> None:
    matrix = itertools.product(BIASES, SHARED)
    cases = (
        Case(kernel=kernel, mask=mask, dtype=dtype, bias=bias, heads=heads)
        for bias, heads in matrix
    )
    check(cases, device, ledger)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ragged"])
@pytest.mark.parametrize("kernel", UNCOMPILED)
def test_queries_stand_at_the_end_of_their_keys(
    kernel: str, layout: str, dtype: str, device: str, ledger: "Ledger"
) -> None:
    matrix = itertools.product(BANDS, SHARED)
    cases = (
        Case(kernel=kernel, mask=mask, dtype=dtype, heads=heads, layout=layout)
        for mask, heads in matrix
    )
    check(cases, device, ledger)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", UNCOMPILED)
def test_a_sink_takes_its_share(kernel: str, dtype: str, device: str, ledger: "Ledger") -> None:
    matrix = itertools.product(("causal", "window both"), LAYOUTS, (False, True))
    cases = (
        Case(kernel=kernel, mask=mask, dtype=dtype, layout=layout, sink=True, grad=grad)
        for mask, layout, grad in matrix
    )
    check(cases, device, ledger)


@pytest.mark.parametrize("size", [8, 20, 36, 96, 128, 160, 256, 264])
@pytest.mark.parametrize("kernel", ["fused", "varlen"])
def test_heads_of_any_size(kernel: str, size: int, device: str, ledger: "Ledger") -> None:
    matrix = itertools.product(DTYPES, ("ragged", "long"), (0, 8))
    cases = (
        Case(
            kernel=kernel,
            mask="causal",
            dtype=dtype,
            layout=layout,
            size=size,
            value_size=size + more,
        )
        for dtype, layout, more in matrix
    )
    check(cases, device, ledger)


@pytest.mark.parametrize("case", flex_cases(), ids=str)
def test_flex(case: Case, device: str, ledger: "Ledger") -> None:
    check([case], device, ledger)


def must_do(reason: str | None, device: str) -> None:
    """What a CUDA kernel refuses on CUDA is a fault; on the CPU only the tests are tried."""
    if reason is not None and device == "cuda":
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


def isolated(kernel: str) -> list[Case]:
    masks = {
        "flex": ("longformer",),
        "fused": ("all", "causal"),
    }.get(kernel, BANDS)
    bias = "alibi" if kernel == "flex" else "none"
    dtype = "float16" if kernel != "reference" else "float32"
    return [Case(kernel=kernel, mask=mask, dtype=dtype, bias=bias) for mask in masks]


@pytest.mark.parametrize(
    "case", [one for name in (*UNCOMPILED, "flex") for one in isolated(name)], ids=str
)
def test_two_sequences_of_a_batch_never_meet(case: Case, device: str) -> None:
    must_do(refusal(case, device), device)
    before = Inputs(case, device, exact=False).attend(case, case.kernel)
    for place in Lengths.of(LAYOUTS[case.layout][0]).slices():
        # A compiled backward pass runs once, so every sequence asks anew.
        inputs = Inputs(case, device, exact=False)
        output = inputs.attend(case, case.kernel).output
        leaves = (inputs.q, inputs.k, inputs.v)
        loss = (output[place].float() * inputs.cotangent[place]).sum()
        for gradient in torch.autograd.grad(loss, leaves):
            assert not outside(gradient, place).any(), f"gradients leave {place}"
        others = Inputs(case, device, exact=False)
        with torch.no_grad():
            for leaf, kept in zip((others.q, others.k, others.v), leaves, strict=True):
                leaf.copy_(torch.randn_like(leaf) * 3)
                leaf[place] = kept[place]
        after = others.attend(case, case.kernel)
        assert torch.equal(before.output[place], after.output[place]), f"{place} changed"
        assert torch.equal(lse(before)[place], lse(after)[place]), f"{place} changed"


def outside(x: Tensor, place: slice) -> Tensor:
    return torch.cat((x[: place.start], x[place.stop :]))


def lse(answer: object) -> Tensor:
    result = getattr(answer, "lse", None)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("case", [isolated(name)[-1] for name in (*UNCOMPILED, "flex")], ids=str)
def test_a_permuted_batch_gives_the_permuted_answer(case: Case, device: str) -> None:
    must_do(refusal(case, device), device)
    inputs = Inputs(replace(case, grad=False), device, exact=False)
    request, order = inputs.request(case), [3, 1, 4, 0, 2]
    batch = [Ragged(x, request.queries) for x in (inputs.q, inputs.k, inputs.v)]
    moved = [one.select(order) for one in batch]
    lengths = moved[0].lengths
    straight = choose.KERNELS[case.kernel].attend(*(one.values for one in batch), request)
    turned = choose.KERNELS[case.kernel].attend(
        *(one.values for one in moved), replace(request, queries=lengths, keys=lengths)
    )
    expected = Ragged(straight.output, request.queries).select(order).values
    assert torch.allclose(turned.output.float(), expected.float(), rtol=1e-3, atol=2e-3)


def test_a_batch_seen_in_inference_can_be_trained_on(device: str) -> None:
    case = Case(kernel="flex", mask="longformer", dtype="bfloat16")
    must_do(refusal(case, device), device)
    flex._cached_block_mask.cache_clear()
    with torch.inference_mode():
        Inputs(case, device, exact=False).attend(case, "flex")
    assert distance(case, device).faults == ()


@pytest.mark.parametrize(
    ("each", "mask", "dtype", "kernel"),
    [
        ((512, 512), Causal(), "bfloat16", "fused"),
        ((512, 300), Causal(), "bfloat16", "window"),
        ((512, 512), Window(9, 9), "bfloat16", "window"),
        ((512, 300), Window(99), "float16", "window"),
        ((5000, 300), Window(4096), "bfloat16", "window"),
        ((512, 300), MASKS["longformer"], "bfloat16", "flex"),
        ((512, 300), Causal(), "float32", "fused"),
        (tuple(range(100, 1000, 100)), Causal(), "float32", "flex"),
    ],
)
def test_the_fastest_kernel_is_chosen(
    each: tuple[int, ...], mask: Mask, dtype: str, kernel: str, device: str
) -> None:
    must_do(None if device == "cuda" else "speaks of CUDA", device)
    lengths = Lengths.of(each, device)
    request = Request(queries=lengths, keys=lengths, mask=mask, scale=0.125)
    x = torch.zeros(lengths.total, 4, 64, device=device, dtype=DTYPES[dtype])
    assert choose.choose(request, TensorFacts.of(x, x, x, request)).kernel == kernel
    pattern = replace(request, want=Want(pattern=True))
    assert choose.choose(pattern, TensorFacts.of(x, x, x, pattern)).kernel == "reference"


@pytest.mark.shapes_unchecked
@pytest.mark.parametrize("kernel", ["fused", "window", "varlen", "flex"])
def test_compiled_whole_it_gives_the_same(kernel: str, device: str) -> None:
    mask = {"flex": MASKS["longformer"], "window": Window(20, 9)}.get(kernel, Causal())
    dtype = DTYPES["bfloat16"]
    torch.manual_seed(0)
    weight = torch.randn(64, 3 * 4 * 64, device=device, dtype=dtype) / 8
    batch = Ragged(
        torch.randn(400, 64, device=device, dtype=dtype), Lengths.of((200, 0, 1, 199), device)
    )

    def ask(lengths: Lengths) -> Request:
        return Request(queries=lengths, keys=lengths, mask=mask, scale=0.125, want=Want(lse=True))

    def attention(batch: Ragged, weight: Tensor) -> Tensor:
        q, k, v = (batch.values @ weight).unflatten(-1, (3, 4, 64)).unbind(1)
        return choose.attend(q, k, v, ask(batch.lengths), kernel).output

    x = torch.zeros(400, 4, 64, device=device, dtype=dtype)
    request = ask(batch.lengths)
    must_do(choose.KERNELS[kernel].cannot(request, TensorFacts.of(x, x, x, request)), device)
    torch._dynamo.reset()
    answers = []
    for function in (attention, torch.compile(attention, fullgraph=True)):
        leaf = weight.clone().requires_grad_()
        output = function(batch, leaf)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), leaf)
        answers.append((output.float(), gradient.float()))
    for eager, compiled in zip(*answers, strict=True):
        assert (compiled - eager).norm() <= 1e-2 * eager.norm()


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize(
    ("queries", "keys"), [((), ()), ((0, 0), (0, 0)), ((0, 0), (3, 2)), ((3, 2), (0, 0))]
)
def test_nothing_to_ask_and_nothing_to_see(
    queries: tuple[int, ...], keys: tuple[int, ...], kernel: str, device: str
) -> None:
    request = Request(
        queries=Lengths.of(queries, device),
        keys=Lengths.of(keys, device),
        mask=Causal(),
        scale=0.125,
        want=Want(lse=True),
    )
    q = torch.randn(sum(queries), 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(sum(keys), 2, 64, device=device, dtype=q.dtype) for _ in range(2))
    k, v = k.requires_grad_(), v.requires_grad_()
    answer = choose.attend(q, k, v, request, kernel)
    assert answer.output.shape == q.shape
    assert not answer.output.any()
    assert (lse(answer) == -torch.inf).all()
    if answer.output.requires_grad:
        gradients = torch.autograd.grad(answer.output.sum(), (q, k, v), allow_unused=True)
        assert not any(gradient.any() for gradient in gradients if gradient is not None)
