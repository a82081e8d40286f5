"""Every kernel of the CPU gives the output, log-sum-exp and gradients of the definition."""

from functools import lru_cache
from itertools import product
from types import ModuleType

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from manyheads.kernels import banded, batched, fused, reference
from manyheads.kernels.contract import AttentionResult, TensorFacts, Want
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
from tests.sampling import cover

KERNELS: dict[str, ModuleType] = {
    "reference": reference,
    "fused": fused,
    "banded": banded,
    "batched": batched,
}
DTYPES = list(TOLERANCE)
LENGTHS = (5, 0, 1, 11, 5)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of six queries and blocks of five, so that small inputs cross their borders."""
    for module in (reference, fused, batched):
        monkeypatch.setattr(module, "rows_per_chunk", lambda *_: 6)
    monkeypatch.setattr(banded, "BLOCK", 5)
    monkeypatch.setattr(batched, "PADDING_PER_BLOCK", 640)
    monkeypatch.setattr(batched, "KEPT_KEYS", 6)


def claims(kernel: str, rule: Rule, biased: Biased, grad: bool) -> bool:
    """What a kernel must be able to do: the rest of the matrix belongs to the reference."""
    if kernel in ("reference", "batched"):
        return True
    if biased.needs_pattern or (grad and biased.learned):
        return False
    return kernel == "fused" or rule.bounded


def run(kernel: str, problem: Problem, want: Want) -> tuple[list[Tensor], AttentionResult]:
    """What the kernel computes, and from which tensors."""
    leaves = problem.leaves()
    request = problem.request(leaves, want)
    refusal = KERNELS[kernel].cannot(request, TensorFacts.of(*leaves[:3], request))
    assert refusal is None, f"{kernel} refuses: {refusal}"
    return leaves, KERNELS[kernel].attend(*leaves[:3], request)


def agree(kernel: str, problem: Problem, expected: tuple[Expected, list[Tensor]]) -> None:
    leaves, result = run(kernel, problem, Want(lse=True))
    tolerance = TOLERANCE[problem.dtype]
    assert result.output.dtype == problem.dtype
    assert result.lse is not None
    assert result.lse.dtype == torch.float32
    assert_close(result.output, expected[0].output, tolerance, "output")
    assert_close(result.lse, expected[0].lse, tolerance, "log-sum-exp")
    gradients = problem.gradients(result.output, leaves)
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


# Every kernel with every mask and every bias; head counts and dtypes in pairs with all of them.
SAMPLE = cover(MATRIX, every=(0, 1, 4))


@pytest.mark.parametrize(("rule", "bias", "heads", "dtype", "kernel", "grad"), SAMPLE, ids=str)
def test_every_kernel_gives_the_definition(
    rule: str, bias: str, heads: str, dtype: torch.dtype, kernel: str, grad: bool
) -> None:
    case = (rule, bias, heads, dtype, grad)
    agree(kernel, matrix_problem(*case), matrix_expected(*case))


def test_the_matrix_leaves_out_only_what_kernels_refuse() -> None:
    missing = [
        (kernel, rule, bias, grad)
        for rule in RULES
        for bias in BIASES
        for kernel in KERNELS
        for grad in (True, False)
        if not claims(kernel, RULES[rule], BIASES[bias], grad)
    ]
    for kernel, rule, bias, grad in missing:
        problem = Problem.of(rule, LENGTHS, biased=BIASES[bias], grad=grad)
        leaves = problem.leaves()
        request = problem.request(leaves, Want())
        assert KERNELS[kernel].cannot(request, TensorFacts.of(*leaves[:3], request)), (
            kernel,
            rule,
            bias,
        )


lengths = st.lists(st.integers(0, 9) | st.integers(0, 1), max_size=4)
head_counts = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda x: (x[0] * x[1], x[0]))


@given(
    kernel=st.sampled_from(list(KERNELS)),
    rule=st.sampled_from(list(RULES)),
    bias=st.sampled_from(list(BIASES)),
    heads=head_counts,
    each=lengths,
    size=st.integers(1, 9),
    sink=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_ragged_batch_gives_the_definition(
    kernel: str,
    rule: str,
    bias: str,
    heads: tuple[int, int],
    each: list[int],
    size: int,
    sink: bool,
    seed: int,
) -> None:
    grad = claims(kernel, RULES[rule], BIASES[bias], True) and (
        kernel in ("reference", "batched") or not sink
    )
    if not claims(kernel, RULES[rule], BIASES[bias], grad):
        kernel = "reference"
    problem = Problem.of(
        rule,
        each,
        heads=heads,
        size=size,
        value_size=size,
        biased=BIASES[bias],
        sink=sink,
        grad=grad,
        seed=seed,
    )
    agree(kernel, problem, problem.expected())


@given(
    kernel=st.sampled_from(["reference", "fused", "batched"]),
    rule=st.sampled_from(list(RULES)),
    bias=st.sampled_from(["no bias", "alibi", "t5", "t5 backwards"]),
    each=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4),
)
def test_the_last_query_stands_at_the_last_key(
    kernel: str, rule: str, bias: str, each: list[tuple[int, int]]
) -> None:
    queries, keys = (Lengths.of([pair[side] for pair in each]) for side in (0, 1))
    problem = Problem(RULES[rule], queries, keys, biased=BIASES[bias])
    agree(kernel, problem, problem.expected())


@given(
    kernel=st.sampled_from(["reference", "fused", "batched"]),
    rule=st.sampled_from(list(RULES)),
    each=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4),
    spare=st.integers(0, 3),
)
@example(kernel="fused", rule="causal", each=[(1, 4)], spare=3)
@example(kernel="fused", rule="all", each=[(1, 4), (1, 4), (1, 2)], spare=0)
def test_keys_with_room_between_sequences_are_read_in_their_places(
    kernel: str, rule: str, each: list[tuple[int, int]], spare: int
) -> None:
    counts = [new + old for new, old in each]
    room = max(counts, default=0) + spare
    keys = Lengths.with_capacity(counts, room, "cpu")
    behind = room - counts[-1] if counts else 0
    queries = Lengths.of([new for new, _ in each])
    problem = Problem(RULES[rule], queries, keys, spare=behind)
    agree(kernel, problem, problem.expected())


@given(
    kernel=st.sampled_from(["reference", "fused", "batched"]),
    each=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=4),
    heads=head_counts,
)
def test_cross_attention_reads_all_of_a_memory_of_any_length(
    kernel: str, each: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    queries, keys = (Lengths.of([pair[side] for pair in each]) for side in (0, 1))
    problem = Problem(RULES["all"], queries, keys, heads=heads)
    agree(kernel, problem, problem.expected())


@pytest.mark.parametrize("kernel", ["reference", "fused", "batched"])
def test_an_empty_memory_gives_zeros(kernel: str) -> None:
    problem = Problem(RULES["all"], Lengths.of([3, 2]), Lengths.of([0, 0]))
    leaves, result = run(kernel, problem, Want(lse=True))
    assert torch.equal(result.output, torch.zeros(5, 4, 8))
    assert torch.equal(result.lse, torch.full((5, 4), -torch.inf))
    assert all(not gradient.any() for gradient in problem.gradients(result.output, leaves))


@pytest.mark.parametrize("kernel", ["reference", "fused", "batched"])
@pytest.mark.parametrize(("size", "value_size"), [(8, 3), (4, 8), (1, 2)])
def test_values_may_have_a_size_of_their_own(kernel: str, size: int, value_size: int) -> None:
    problem = Problem.of("longformer", LENGTHS, size=size, value_size=value_size)
    agree(kernel, problem, problem.expected())


@pytest.mark.parametrize(
    ("kernel", "rule", "heads", "dtype"),
    cover(list(product(KERNELS, ["all", "causal", "window", "last rows blind"], HEADS, DTYPES))),
    ids=str,
)
def test_a_sink_is_one_more_key_without_a_value(
    kernel: str, rule: str, heads: str, dtype: torch.dtype
) -> None:
    if not claims(kernel, RULES[rule], BIASES["no bias"], False):
        rule = "both sides"
    grad = kernel in ("reference", "batched")
    problem = Problem.of(rule, LENGTHS, heads=HEADS[heads], dtype=dtype, sink=True, grad=grad)
    agree(kernel, problem, problem.expected())


def test_a_sink_with_gradients_is_left_to_the_reference() -> None:
    problem = Problem.of("window", LENGTHS, sink=True)
    leaves = problem.leaves()
    request = problem.request(leaves, Want())
    facts = TensorFacts.of(*leaves[:3], request)
    assert {name for name in KERNELS if KERNELS[name].cannot(request, facts)} == {"fused", "banded"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_the_wanted_outputs_are_returned(kernel: str) -> None:
    _, result = run(kernel, Problem.of("window", LENGTHS), Want())
    assert result.lse is None
    assert result.patterns is None
