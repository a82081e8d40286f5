"""The cases that every CUDA kernel is tried on, and how far a case lies from the reference."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyheads.kernels.choose import KERNELS
from manyheads.kernels.contract import AttentionResult, Request, TensorFacts, Want
from manyheads.parts.masks import (
    Blocks,
    Causal,
    Full,
    GlobalTokens,
    Mask,
    Prefix,
    RandomBlocks,
    Window,
)
from manyheads.parts.positions import Alibi, Shaw, T5Buckets
from manyheads.parts.positions.relative import Bias, BucketTable, ShawTable
from manyheads.ragged import Lengths

MASKS: dict[str, Mask] = {
    "all": Full(),
    "causal": Causal(),
    "window before": Window(20),
    "window both": Window(20, 9),
    "prefix": Prefix(30),
    "longformer": Window(16, 16) | GlobalTokens((0, -2)),
    "blocks": Blocks(24, before=1, after=1),
    "random blocks": RandomBlocks(16, count=2, seed=3),
    "bigbird": (Blocks(16, 1, 1) | RandomBlocks(16, count=1) | GlobalTokens((0,))) & Causal(),
    "blind rows": Causal() & GlobalTokens((5,)),
}
BIASES = ("none", "alibi", "t5 both", "t5 back", "shaw")
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "threes": (6, 2)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Queries and keys of every sequence.
RAGGED = (200, 0, 1, 131, 64)
LAYOUTS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "ragged": (RAGGED, RAGGED),
    "even": ((128, 128), (128, 128)),
    "long": ((1030, 1030), (1030, 1030)),
    "cached": ((3, 0, 1, 60, 64), (200, 5, 1, 131, 64)),
    "step": ((1, 1, 1), (200, 7, 131)),
    "short memory": ((40, 6, 3, 0), (9, 3, 0, 2)),
}
# Of output and gradients as a share of the reference's length, and of the log-sum-exp itself.
LIMITS = {
    "float32": (1e-5, 3e-5, 1e-4),
    "bfloat16": (1e-2, 2e-2, 2e-2),
    "float16": (3e-3, 5e-3, 5e-3),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request to one kernel."""

    kernel: str
    mask: str
    dtype: str
    bias: str = "none"
    heads: str = "gqa"
    layout: str = "ragged"
    size: int = 64
    value_size: int = 64
    sink: bool = False
    grad: bool = True

    def __str__(self) -> str:
        sizes = f"{self.size}x{self.value_size}"
        flags = ["sink"] * self.sink + ["no grad"] * (not self.grad)
        words = (self.kernel, self.mask, self.bias, self.heads, self.dtype, self.layout, sizes)
        return "-".join((*words, *flags)).replace(" ", "_")

    @property
    def scale(self) -> float:
        return self.size**-0.5


class Inputs(nn.Module):
    """Tokens and learned tables of a case: the same values in every copy of it."""

    def __init__(self, case: Case, device: str, *, exact: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        heads, kv_heads = HEADS[case.heads]
        queries, keys = (sum(each) for each in LAYOUTS[case.layout])

        def tokens(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=draw).to(DTYPES[case.dtype])
            return (drawn.float() if exact else drawn).to(device)

        self.q = nn.Parameter(tokens(queries, heads, case.size))
        self.k = nn.Parameter(tokens(keys, kv_heads, case.size))
        self.v = nn.Parameter(tokens(keys, kv_heads, case.value_size))
        self.cotangent = tokens(queries, heads, case.value_size).float()
        self.sink = (
            nn.Parameter(torch.randn(heads, generator=draw).to(device)) if case.sink else None
        )
        self.table: BucketTable | ShawTable | None = None
        if case.bias.startswith("t5"):
            config = T5Buckets(bidirectional=case.bias == "t5 both")
            self.table = BucketTable(config, heads)
        elif case.bias == "shaw":
            self.table = ShawTable(Shaw(reach=8), case.size)
        if self.table is not None:
            for parameter in self.table.parameters():
                parameter.data = torch.randn(parameter.shape, generator=draw) / 2
            self.table.to(device)
        self.requires_grad_(case.grad)

    def bias(self, case: Case) -> Bias | None:
        if isinstance(self.table, BucketTable):
            return self.table.bias()
        if isinstance(self.table, ShawTable):
            return self.table.bias(self.q, case.scale)
        if case.bias == "alibi":
            return Alibi().bias(self.q.shape[1], self.q.device)
        return None

    def request(self, case: Case) -> Request:
        queries, keys = (Lengths.of(each, self.q.device) for each in LAYOUTS[case.layout])
        return Request(
            queries=queries,
            keys=keys,
            mask=MASKS[case.mask],
            scale=case.scale,
            bias=self.bias(case),
            sink=self.sink,
            want=Want(lse=True),
        )

    def attend(self, case: Case, kernel: str) -> AttentionResult:
        return cast(Any, KERNELS[kernel]).attend(self.q, self.k, self.v, self.request(case))

    def gradients(self, answer: AttentionResult) -> dict[str, Tensor]:
        names, leaves = zip(*self.named_parameters(), strict=True)
        loss = (answer.output.float() * self.cotangent).sum()
        result = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return dict(zip(names, result, strict=True))


@dataclass(frozen=True)
class Distance:
    """How far a kernel's answer lies from the reference's, and what is wrong with that."""

    output: float
    gradient: float
    faults: tuple[str, ...]


def refusal(case: Case, device: str) -> str | None:
    """Why the kernel will not do this; None if it will."""
    inputs = Inputs(case, device, exact=False)
    request = inputs.request(case)
    facts = TensorFacts.of(inputs.q, inputs.k, inputs.v, request)
    return cast("str | None", cast(Any, KERNELS[case.kernel]).cannot(request, facts))


def distance(case: Case, device: str) -> Distance:
    """The kernel's answer beside that of the reference, which sees the same values in float32.

    The reference itself is compared to its run on the CPU.
    """
    truth = "cpu" if case.kernel == "reference" else device
    inputs, exact = Inputs(case, device, exact=False), Inputs(case, truth, exact=True)
    result, expected = inputs.attend(case, case.kernel), exact.attend(case, "reference")
    output_limit, gradient_limit, lse_limit = LIMITS[case.dtype]
    faults = list(_lse_faults(result, expected, lse_limit))
    if result.output.dtype != inputs.q.dtype:
        faults.append(f"the output is {result.output.dtype}")
    if case.sink is False and bool(result.output.cpu()[_blind(expected).cpu()].any()):
        faults.append("a row that sees nothing is not zero")
    output = _relative(result.output, expected.output)
    if not output <= output_limit:
        faults.append(f"output is {output:.1e} off")
    worst = 0.0
    if case.grad:
        expected_gradients = exact.gradients(expected)
        for name, gradient in inputs.gradients(result).items():
            off = _relative(gradient, expected_gradients[name])
            worst = max(worst, off)
            if not off <= gradient_limit:
                faults.append(f"gradient of {name} is {off:.1e} off")
    return Distance(output, worst, tuple(faults))


def flex_cases() -> list[Case]:
    """Compiling each takes seconds: every mask meets every type, and the rest takes turns."""
    cases = []
    for (row, mask), (turn, dtype) in itertools.product(enumerate(MASKS), enumerate(DTYPES)):
        heads = ("mha", "gqa", "mqa")[(row + turn) % 3]
        bias = BIASES[(row + 2 * turn) % len(BIASES)]
        cases.append(Case(kernel="flex", mask=mask, dtype=dtype, bias=bias, heads=heads))
    half, single = "bfloat16", "float32"
    cases += [
        Case(kernel="flex", mask="causal", dtype=half, layout="cached"),
        Case(kernel="flex", mask="window both", dtype=single, bias="alibi", layout="cached"),
        Case(kernel="flex", mask="causal", dtype=half, bias="t5 back", layout="step"),
        Case(kernel="flex", mask="all", dtype=half, layout="short memory"),
        Case(kernel="flex", mask="causal", dtype=single, bias="shaw", layout="short memory"),
        Case(kernel="flex", mask="causal", dtype=half, sink=True),
        Case(kernel="flex", mask="blind rows", dtype=single, bias="alibi", sink=True),
        Case(kernel="flex", mask="causal", dtype=half, size=24, value_size=24),
        Case(kernel="flex", mask="longformer", dtype=half, size=96, value_size=32),
        Case(kernel="flex", mask="blocks", dtype=half, heads="threes"),
    ]
    return cases


def _blind(expected: AttentionResult) -> Tensor:
    assert expected.lse is not None
    return expected.lse == -torch.inf


def _lse_faults(result: AttentionResult, expected: AttentionResult, limit: float) -> Sequence[str]:
    assert result.lse is not None
    assert expected.lse is not None
    one, other = result.lse.cpu(), expected.lse.cpu()
    if one.dtype != torch.float32:
        return [f"log-sum-exp is {one.dtype}"]
    if not torch.equal(one == -torch.inf, other == -torch.inf):
        return ["log-sum-exp is not -inf where, and only where, nothing is seen"]
    seen = other > -torch.inf
    off = (one[seen] - other[seen]).abs().max().item() if bool(seen.any()) else 0.0
    return [] if off <= limit else [f"log-sum-exp is {off:.1e} off"]


def _relative(result: Tensor, expected: Tensor) -> float:
    """The difference as a share of what is expected; NaN where anything is not a number."""
    one, other = result.detach().double().cpu(), expected.detach().double().cpu()
    length = other.norm().item()
    off = (one - other).norm().item()
    return off / length if length else off
