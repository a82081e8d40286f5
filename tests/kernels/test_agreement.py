"""Every kernel of the CPU gives the output, log-sum-exp and gradients of the definition."""

from functools import lru_cache
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyheads.kernels import banded, fused, reference
from manyheads.kernels.contract import Attended, Facts, Want
from manyheads.ragged import Lengths
from tests.kernels.oracle import (
    BIASES,
    HEADS,
    RULES,
    TOLERANCE,
    Biased,
    Expected,
    Problem,
    Rule,
    assert_close,
)

KERNELS: dict[str, ModuleType] = {"reference": reference, "fused": fused, "banded": banded}
DTYPES = list(TOLERANCE)
LENGTHS = (5, 0, 1, 11, 5)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of six queries and blocks of five, so that small inputs cross their borders."""
    for module in (reference, fused):
        monkeypatch.setattr(module, "rows_a_chunk", lambda heads, keys: 6)  # noqa: ARG005
    monkeypatch.setattr(banded, "block_size", lambda width: 5)  # noqa: ARG005


def claims(kernel: str, rule: Rule, biased: Biased, grad: bool) -> bool:
    """What a kernel must be able to do: the rest of the matrix belongs to the reference."""
    if kernel == "reference":
        return True
    if biased.needs_pattern or (grad and biased.learned):
        return False
    return kernel == "fused" or rule.bounded


def run(kernel: str, problem: Problem, want: Want) -> tuple[list[Tensor], Attended]:
    """What the kernel computes, and from which tensors."""
    leaves = problem.leaves()
    request = problem.request(leaves, want)
    refusal = KERNELS[kernel].cannot(request, Facts.of(*leaves[:3], request))
    assert refusal is None, f"{kernel} refuses: {refusal}"
    return leaves, KERNELS[kernel].attend(*leaves[:3], request)


def agree(kernel: str, problem: Problem, expected: tuple[Expected, list[Tensor]]) -> None:
    leaves, found = run(kernel, problem, Want(lse=True))
    tolerance = TOLERANCE[problem.dtype]
    assert found.output.dtype == problem.dtype
    assert found.lse is not None
    assert found.lse.dtype == torch.float32
    assert_close(found.output, expected[0].output, tolerance, "output")
    assert_close(found.lse, expected[0].lse, tolerance, "log-sum-exp")
    gradients = problem.gradients(found.output, leaves)
    assert len(gradients) == len(expected[1])
    for index, (gradient, one) in enumerate(zip(gradients, expected[1], strict=True)):
        assert_close(gradient, one, 2 * tolerance, f"gradient {index}")


@lru_cache(maxsize=256)
def matrix_problem(rule: str, bias: str, heads: str, dtype: torch.dtype, grad: bool) -> Problem:
    return Problem.of(
        rule, LENGTHS, heads=HEADS[heads], dtype=dtype, biased=BIASES[bias], grad=grad
    )


@lru_cache(maxsize=256)
def matrix_expected(
    rule: str, bias: str, heads: str, dtype: torch.dtype, grad: bool
) -> tuple[Expected, list[Tensor]]:
    return matrix_problem(rule, bias, heads, dtype, grad).expected()


MATRIX = [
    (rule, bias, heads, dtype, kernel, grad)
    for rule in RULES
    for bias in BIASES
    for heads in HEADS
    for dtype in DTYPES
    for kernel in KERNELS
    for grad in (True, False)
    if claims(kernel, RULES[rule], BIASES[bias], grad)
    # A learned bias costs a fused kernel its gradients; there the output alone is compared.
    and (grad or not claims(kernel, RULES[rule], BIASES[bias], True))
]


@pytest.mark.parametrize(("rule", "bias", "heads", "dtype", "kernel", "grad"), MATRIX)
def test_every_kernel_gives_the_definition(
    rule: str, bias: str, heads: str, dtype: torch.dtype, kernel: str, grad: bool
) -> None:
    case = (rule, bias, heads, dtype, grad)
    agree(kernel, matrix_problem(*case), matrix_expected(*case))
