"""Chunks, single steps and the explicit pattern give the same recurrence."""

import pytest
import torch
from torch import Tensor

from manyheads.mixers.recurrent.decay_recurrence import (
    decay_pattern,
    naive_decay_recurrence,
    recur_in_chunks,
    recur_one_token,
)
from manyheads.ragged import Lengths

HEADS, SIZE, VALUE = 2, 4, 3


def inputs(total: int, *, decays: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k = torch.randn(2, total, HEADS, SIZE)
    decay = -torch.rand(total, HEADS) if decays else None
    return q, k, torch.randn(total, HEADS, VALUE), decay


@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("each", [[1], [8], [200], [3, 0, 17, 4, 150, 1], [4] * 40])
def test_chunks_equal_the_loop_over_tokens(each: list[int], decays: bool) -> None:
    lengths = Lengths.of(each)
    q, k, v, decay = inputs(lengths.total, decays=decays)
    state = torch.randn(len(each), HEADS, SIZE, VALUE)
    outputs, last = recur_in_chunks(q, k, v, decay, lengths, state, chunk=4)
    expected, expected_last = naive_decay_recurrence(q, k, v, decay, lengths, state)
    torch.testing.assert_close(outputs, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(last, expected_last, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("decays", [True, False])
def test_single_tokens_equal_the_loop_over_tokens(decays: bool) -> None:
    q, k, v, decay = inputs(9, decays=decays)
    state = torch.randn(1, HEADS, SIZE, VALUE)
    expected, expected_last = naive_decay_recurrence(q, k, v, decay, Lengths.of([9]), state)
    for token, output in enumerate(expected.split(1)):
        parts = [None if part is None else part[token : token + 1] for part in (q, k, v, decay)]
        result, state = recur_one_token(*parts, state)
        torch.testing.assert_close(result, output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, expected_last, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("decays", [True, False])
def test_the_pattern_gives_the_outputs(decays: bool) -> None:
    q, k, v, decay = inputs(50, decays=decays)
    outputs, _ = recur_in_chunks(q, k, v, decay, Lengths.of([50]), chunk=8)
    expected = torch.einsum("hnm,mhe->nhe", decay_pattern(q, k, decay), v)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)


def test_texts_of_a_batch_never_meet() -> None:
    lengths = Lengths.of([37, 21])
    q, k, v, decay = inputs(58, decays=True)
    assert decay is not None
    together, _ = recur_in_chunks(q, k, v, decay, lengths, chunk=8)
    k[:37] = torch.nan
    again, _ = recur_in_chunks(q, k, v, decay, lengths, chunk=8)
    assert torch.equal(again[37:], together[37:])


def test_gradients_are_those_of_the_pattern() -> None:
    q, k, v, decay = inputs(40, decays=True)
    assert decay is not None
    arguments = [x.double().requires_grad_() for x in (q, k, v, decay)]
    weights = torch.randn(40, HEADS, VALUE)
    chunked, _ = recur_in_chunks(*arguments, Lengths.of([40]), chunk=8)
    explicit = torch.einsum(
        "hnm,mhe->nhe",
        decay_pattern(arguments[0], arguments[1], arguments[3]),
        arguments[2].float(),
    )
    for result, expected in zip(
        torch.autograd.grad((chunked * weights).sum(), arguments),
        torch.autograd.grad((explicit * weights).sum(), arguments),
        strict=True,
    ):
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_half_precision_keeps_the_state_whole() -> None:
    q, k, v, decay = inputs(30, decays=True)
    outputs, state = recur_in_chunks(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), decay, Lengths.of([30])
    )
    assert outputs.dtype == torch.bfloat16
    assert state.dtype == torch.float32
