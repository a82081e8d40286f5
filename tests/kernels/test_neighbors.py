"""Sequences of a batch never meet, whichever kernel runs."""

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyheads.kernels import banded, batched, fused, reference
from manyheads.kernels.contract import Request, TensorFacts, Want
from manyheads.ragged import Lengths, Ragged
from tests.kernels.oracle import RULES

KERNELS: dict[str, ModuleType] = {
    "reference": reference,
    "fused": fused,
    "banded": banded,
    "batched": batched,
}

BOUNDED = [name for name, rule in RULES.items() if rule.bounded]
CASES = [
    (kernel, rule) for kernel in KERNELS for rule in RULES if kernel != "banded" or rule in BOUNDED
]

lengths = st.lists(st.integers(0, 9), min_size=2, max_size=5)


def attend(kernel: str, rule: str, batch: Ragged) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a batch that carries queries, keys and values side by side."""
    request = Request(
        queries=batch.lengths,
        keys=batch.lengths,
        mask=RULES[rule].mask,
        scale=0.5,
        want=Want(lse=True),
    )
    q, k, v = batch.values.split((4, 2, 2), dim=1)
    assert KERNELS[kernel].cannot(request, TensorFacts.of(q, k, v, request)) is None
    result = KERNELS[kernel].attend(q, k, v, request)
    assert result.lse is not None
    return result.output, result.lse


def drawn(each: list[int]) -> Ragged:
    return Ragged(torch.randn(sum(each), 8, 4), Lengths.of(each))


@pytest.mark.parametrize(("kernel", "rule"), CASES)
def test_a_sequence_that_changes_leaves_the_others_bit_for_bit(kernel: str, rule: str) -> None:
    batch = drawn([6, 1, 0, 9, 6])
    before = [batch.with_values(each).to_list() for each in attend(kernel, rule, batch)]
    for changed in (0, 3):
        each = batch.to_list()
        each[changed] = 9 * torch.randn_like(each[changed])
        other = Ragged.from_list(each)
        after = [other.with_values(each).to_list() for each in attend(kernel, rule, other)]
        for old, new in zip(before, after, strict=True):
            assert [torch.equal(a, b) for a, b in zip(old, new, strict=True)] == [
                index != changed for index in range(len(old))
            ]


@pytest.mark.parametrize(("kernel", "rule"), CASES)
def test_gradients_of_one_sequence_reach_no_other(kernel: str, rule: str) -> None:
    batch = drawn([6, 1, 0, 9, 6])
    values = batch.values.requires_grad_()
    output, _ = attend(kernel, rule, batch)
    batch.with_values(output).of(3).square().sum().backward()
    assert values.grad is not None
    reached = [bool(each.any()) for each in batch.with_values(values.grad).to_list()]
    assert reached == [False, False, False, True, False]


@pytest.mark.parametrize(("kernel", "rule"), CASES)
def test_a_sequence_of_nan_spoils_no_other(kernel: str, rule: str) -> None:
    batch = drawn([6, 4, 6])
    spoilt = Ragged.from_list([batch.of(0), torch.full_like(batch.of(1), torch.nan), batch.of(2)])
    output, _ = attend(kernel, rule, spoilt)
    result = output.isnan().any(-1).any(-1)
    # A row that sees nothing may give zeros all the same.
    sees = [any(RULES[rule].sees(i, j, 4) for j in range(4)) for i in range(4)]
    assert result[6:10][torch.tensor(sees)].all()
    assert not result[:6].any()
    assert not result[10:].any()


@given(each=lengths, case=st.sampled_from(CASES), shuffle=st.randoms(use_true_random=False))
def test_a_permuted_batch_gives_the_permuted_result(
    each: list[int], case: tuple[str, str], shuffle: object
) -> None:
    order = list(range(len(each)))
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    batch = drawn(each)
    straight = [batch.with_values(result).select(order).values for result in attend(*case, batch)]
    permuted = attend(*case, batch.select(order))
    for one, other in zip(straight, permuted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@given(each=lengths, case=st.sampled_from(CASES))
def test_a_sequence_alone_gives_what_it_gives_in_a_batch(
    each: list[int], case: tuple[str, str]
) -> None:
    batch = drawn(each)
    together, _ = attend(*case, batch)
    for index in range(len(each)):
        alone, _ = attend(*case, batch.select([index]))
        torch.testing.assert_close(
            alone, batch.with_values(together).of(index), rtol=1e-5, atol=1e-6
        )
