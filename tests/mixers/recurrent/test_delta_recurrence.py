"""Chunks, single steps and the explicit pattern give the same delta rule."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.mixers.recurrent.delta_recurrence import (
    delta_by_fla,
    delta_in_chunks,
    delta_one_token,
    delta_pattern,
    naive_delta_rule,
)
from manyheads.ragged import Lengths

HEADS, SIZE, VALUE = 2, 4, 3


def inputs(total: int, *, by_channel: bool) -> list[Tensor]:
    q, k = F.normalize(torch.randn(2, total, HEADS, SIZE), dim=-1)
    shape = (total, HEADS, SIZE) if by_channel else (total, HEADS)
    v, beta = torch.randn(total, HEADS, VALUE), torch.rand(total, HEADS)
    return [q, k, v, beta, -torch.rand(shape)]


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("each", [[1], [50], [3, 0, 17, 4, 30, 1]])
def test_chunks_and_single_tokens_equal_the_loop_over_tokens(
    each: list[int], by_channel: bool
) -> None:
    lengths = Lengths.of(each)
    arguments = inputs(lengths.total, by_channel=by_channel)
    state = torch.randn(len(each), HEADS, SIZE, VALUE)
    outputs, last = delta_in_chunks(*arguments, lengths, state, chunk=8)
    expected, expected_last = naive_delta_rule(*arguments, lengths, state)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, expected_last, atol=1e-5, rtol=1e-5)
    for index, where in enumerate(lengths.slices()):
        now = state[index : index + 1]
        for token in range(where.start, where.stop):
            output, now = delta_one_token(*(part[token : token + 1] for part in arguments), now)
            torch.testing.assert_close(output, expected[token : token + 1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(now[0], expected_last[index], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("by_channel", [True, False])
def test_the_pattern_gives_the_outputs(by_channel: bool) -> None:
    q, k, v, beta, decay = inputs(40, by_channel=by_channel)
    outputs, _ = delta_in_chunks(q, k, v, beta, decay, Lengths.of([40]), chunk=8)
    expected = torch.einsum("hnm,mhe->nhe", delta_pattern(q, k, beta, decay), v)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)


def test_texts_of_a_batch_never_meet() -> None:
    lengths = Lengths.of([37, 21])
    q, k, v, beta, decay = inputs(58, by_channel=False)
    together, _ = delta_in_chunks(q, k, v, beta, decay, lengths, chunk=8)
    k[:37] = torch.nan
    again, _ = delta_in_chunks(q, k, v, beta, decay, lengths, chunk=8)
    assert torch.equal(again[37:], together[37:])


def test_gradients_are_those_of_the_pattern() -> None:
    arguments = [x.requires_grad_() for x in inputs(24, by_channel=False)]
    q, k, v, beta, decay = arguments
    weights = torch.randn(24, HEADS, VALUE)
    chunked, _ = delta_in_chunks(q, k, v, beta, decay, Lengths.of([24]), chunk=8)
    explicit = torch.einsum("hnm,mhe->nhe", delta_pattern(q, k, beta, decay), v)
    for result, expected in zip(
        torch.autograd.grad((chunked * weights).sum(), arguments),
        torch.autograd.grad((explicit * weights).sum(), arguments),
        strict=True,
    ):
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_kernels_of_fla_are_called_as_they_are_defined(
    by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their place a plain rule in their layout: a batch of one, texts end to end."""

    def rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        scale: float,
        initial_state: Tensor,
        output_final_state: bool,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert output_final_state
        assert cu_seqlens.tolist() == [0, 5, 8]
        texts, parts = Lengths.of([5, 3]), (scale * q, k, v, beta, g)
        outputs, states = naive_delta_rule(*(part[0] for part in parts), texts, initial_state)
        return outputs[None], states

    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    for module, name in (
        ("kda", "chunk_kda"),
        ("gated_delta_rule", "chunk_gated_delta_rule"),
    ):
        fake = ModuleType(f"fla.ops.{module}")
        setattr(fake, name, rule)
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", fake)
    lengths = Lengths.of([5, 3])
    q, k, v = (torch.randn(8, 2, 4) for _ in range(3))
    k = F.normalize(k, dim=-1)
    beta, decay = torch.rand(8, 2), -torch.rand((8, 2, 4) if by_channel else (8, 2))
    state = torch.randn(2, 2, 4, 4)
    result = delta_by_fla(q, k, v, beta, decay, lengths, state)
    expected = delta_in_chunks(q, k, v, beta, decay, lengths, state)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
