"""The definition: patterns, chunks, dropout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads.kernels import reference
from manyheads.kernels.contract import Request, Want
from manyheads.parts.masks import Causal, Full
from manyheads.ragged import Lengths
from manyheads.taps import Patterns
from tests.kernels.oracle import BIASES, RULES, Problem, assert_close


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("rule", RULES)
def test_patterns_are_those_of_the_definition(rule: str, bias: str, sink: bool) -> None:
    problem = Problem.of(rule, (5, 0, 1, 8), biased=BIASES[bias], sink=sink, grad=False)
    leaves = problem.leaves()
    request = problem.request(leaves, Want(lse=True, pattern=True))
    result = reference.attend(*leaves[:3], request)
    expected, _ = problem.expected()
    assert result.patterns is not None
    assert result.lse is not None
    for index, pattern in enumerate(expected.patterns):
        assert_close(result.patterns.of(index), pattern, 1e-5, f"pattern {index}")
    assert_close(result.output, expected.output, 1e-5, "output")
    assert_close(result.lse, expected.lse, 1e-5, "log-sum-exp")


@given(rule=st.sampled_from(list(RULES)), each=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_row_of_a_pattern_sums_to_one_or_sees_nothing(rule: str, each: list[int]) -> None:
    problem = Problem.of(rule, each, grad=False)
    leaves = problem.leaves()
    result = reference.attend(*leaves[:3], problem.request(leaves, Want(pattern=True)))
    assert result.patterns is not None
    for length, pattern in zip(each, result.patterns.each, strict=True):
        rows = [any(RULES[rule].sees(i, j, length) for j in range(length)) for i in range(length)]
        expected = torch.tensor(rows, dtype=torch.float32).expand(4, length)
        torch.testing.assert_close(pattern.sum(-1), expected)


def test_scores_hold_minus_infinity_where_the_mask_hides_a_key() -> None:
    q, k, lengths = torch.randn(3, 2, 4), torch.randn(3, 1, 4), Lengths.of([3])
    request = Request(queries=lengths, keys=lengths, mask=Causal(), scale=0.25)
    (scores,) = reference.scores(q, k, request).each
    plain = 0.25 * torch.einsum("thd,sd->hts", q, k[:, 0])
    hidden = torch.ones(3, 3).triu(1).bool()
    torch.testing.assert_close(scores, plain.masked_fill(hidden, -torch.inf))


def test_mix_weighs_values_by_any_pattern() -> None:
    v, lengths = torch.randn(5, 2, 3), Lengths.of([2, 3])
    request = Request(queries=lengths, keys=lengths, mask=Full(), scale=1.0)
    patterns = Patterns((torch.rand(4, 2, 2), torch.rand(4, 3, 3)))
    mixed = reference.mix(patterns, v, request)
    spread = v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(mixed[2:], torch.einsum("hts,she->the", patterns.of(1), spread[2:]))


@pytest.mark.parametrize("largest", [1, 40, 2**22])
def test_the_size_of_chunks_changes_nothing(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "LARGEST_CHUNK", largest)
    problem = Problem.of("longformer", (7, 0, 5), biased=BIASES["shaw with values"])
    leaves = problem.leaves()
    result = reference.attend(*leaves[:3], problem.request(leaves, Want()))
    expected, gradients = problem.expected()
    assert_close(result.output, expected.output, 1e-5, "output")
    for index, gradient in enumerate(problem.gradients(result.output, leaves)):
        assert_close(gradient, gradients[index], 2e-5, f"gradient {index}")


@given(heads=st.integers(1, 128), keys=st.integers(0, 10**7))
def test_a_chunk_is_as_large_as_allowed_and_never_empty(heads: int, keys: int) -> None:
    rows = reference.rows_per_chunk(heads, keys)
    assert rows >= 1
    assert rows == 1 or rows * heads * keys <= reference.LARGEST_CHUNK
    assert keys == 0 or (rows + 1) * heads * keys > reference.LARGEST_CHUNK


@pytest.mark.parametrize("want", [Want(), Want(pattern=True)])
def test_dropout_drops_a_share_of_the_weights_and_keeps_the_mean(want: Want) -> None:
    torch.manual_seed(0)
    lengths = Lengths.of([200])
    q = k = torch.zeros(200, 2, 4)
    # Every weight is 1/200; the columns of the identity show each weight after dropout.
    v = torch.eye(200)[:, None]
    request = Request(
        queries=lengths, keys=lengths, mask=Full(), scale=1.0, dropout=0.25, want=want
    )
    seen = 200 * reference.attend(q, k[:, :1], v, request).output
    values, counts = seen.round(decimals=3).unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.75]), rtol=0, atol=1e-3)
    assert counts[0] / counts.sum() == pytest.approx(0.25, abs=0.01)


def test_dropout_drops_the_same_weights_in_the_backward_pass() -> None:
    lengths = Lengths.of([50])
    q, v = torch.zeros(50, 1, 4), torch.eye(50)[:, None].requires_grad_()
    request = Request(queries=lengths, keys=lengths, mask=Full(), scale=1.0, dropout=0.5)
    output = reference.attend(q, q, v, request).output
    pull = torch.randn_like(output)
    output.backward(pull)
    torch.testing.assert_close(v.grad, torch.einsum("ths,the->she", output.detach(), pull))
