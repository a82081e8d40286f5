"""Losses from chunks of scores are those from all scores at once, and so are their gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.train.loss.chunked_cross_entropy import cross_entropy_sums

TOKENS, WIDTH, WORDS = 37, 16, 53
# torch's own, met when dynamo traces any autograd.Function.
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]


def inputs(
    *, bias: bool = True, tokens: int = TOKENS, dtype: torch.dtype = torch.float64
) -> Inputs:
    draw = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype).requires_grad_()

    answers = torch.randint(WORDS, (tokens,), generator=draw)
    return leaf(tokens, WIDTH), leaf(WORDS, WIDTH), leaf(WORDS) if bias else None, answers


def plainly(arguments: Inputs, smoothing: float) -> Tensor:
    x, vectors, bias, answers = arguments
    scores = F.linear(x, vectors, bias)
    loss = F.cross_entropy(scores, answers, label_smoothing=smoothing, reduction="sum")
    return torch.stack((loss, scores.logsumexp(1).square().sum()))


def gradients(sums: Tensor, arguments: Inputs, weights: tuple[float, float]) -> list[Tensor]:
    leaves = [each for each in arguments[:3] if each is not None]
    return list(torch.autograd.grad((sums * torch.tensor(weights)).sum(), leaves))


def assert_same(
    arguments: Inputs, smoothing: float, squares: bool, room: int, tolerance: float = 1e-10
) -> None:
    weights = (0.7, 0.3 if squares else 0.0)
    result = cross_entropy_sums(*arguments, smoothing=smoothing, squares=squares, max_logits=room)
    expected = plainly(arguments, smoothing)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    pairs = zip(
        gradients(result, arguments, weights), gradients(expected, arguments, weights), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("squares", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("room", [WORDS, 5 * WORDS, 2**26])
def test_chunks_give_the_whole_loss_and_gradient(
    room: int, smoothing: float, squares: bool, bias: bool
) -> None:
    assert_same(inputs(bias=bias), smoothing, squares, room)


def test_single_precision_is_summed_in_single_precision() -> None:
    result = cross_entropy_sums(*inputs(dtype=torch.bfloat16), max_logits=5 * WORDS)
    assert result.dtype == torch.float32
    assert_same(inputs(dtype=torch.float32), 0.1, True, 5 * WORDS, tolerance=1e-4)


@pytest.mark.parametrize("squares", [True, False])
def test_no_token_gives_zero_and_zero_gradients(squares: bool) -> None:
    arguments = inputs(tokens=0)
    sums = cross_entropy_sums(*arguments, squares=squares)
    assert sums.tolist() == [0, 0]
    for gradient in gradients(sums, arguments, (1.0, 1.0)):
        assert (gradient == 0).all()


def test_a_score_beyond_the_range_of_exp_is_no_infinity() -> None:
    x, vectors, bias, answers = inputs()
    assert_same((x, vectors.detach().mul(1e4).requires_grad_(), bias, answers), 0.0, False, WORDS)


@pytest.mark.parametrize("squares", [True, False])
def test_capped_scores_have_their_own_loss_and_gradient(squares: bool) -> None:
    arguments, weights = inputs(), (0.7, 0.3 if squares else 0.0)
    x, vectors, bias, answers = arguments
    result = cross_entropy_sums(*arguments, squares=squares, softcap=1.5, max_logits=5 * WORDS)
    scores = 1.5 * (F.linear(x, vectors, bias) / 1.5).tanh()
    loss = F.cross_entropy(scores, answers, reduction="sum")
    expected = torch.stack((loss, scores.logsumexp(1).square().sum()))
    torch.testing.assert_close(result, expected)
    pairs = zip(
        gradients(result, arguments, weights), gradients(expected, arguments, weights), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_without_gradients_only_the_loss_is_computed() -> None:
    arguments = inputs()
    with torch.no_grad():
        sums = cross_entropy_sums(*arguments, max_logits=WORDS)
    assert not sums.requires_grad
    torch.testing.assert_close(sums, plainly(arguments, 0.0))


def test_frozen_vectors_pass_the_gradient_on() -> None:
    x, vectors, bias, answers = inputs()
    frozen = vectors.detach()
    cross_entropy_sums(x, frozen, bias, answers)[0].backward()
    assert x.grad is not None
    expected = gradients(
        plainly((x, vectors, bias, answers), 0.0), (x, vectors, bias, answers), (1.0, 0.0)
    )
    torch.testing.assert_close(x.grad, expected[0])


def test_autocast_takes_products_in_half_precision_and_sums_in_single() -> None:
    arguments = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = cross_entropy_sums(*arguments, squares=True, max_logits=5 * WORDS)
        expected = plainly(arguments, 0.0)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected.float(), rtol=1e-2, atol=0)
    for one, other in zip(
        gradients(result, arguments, (1.0, 0.1)),
        gradients(expected, arguments, (1.0, 0.1)),
        strict=True,
    ):
        assert one.dtype == torch.float32
        assert torch.linalg.norm(one - other) < 0.02 * torch.linalg.norm(other)


@COMPILES
@pytest.mark.shapes_unchecked
def test_a_compiled_step_may_hold_it_with_any_number_of_tokens() -> None:
    for squares in (True, False):
        torch._dynamo.reset()

        def losses(*arguments: Any, squares: bool = squares) -> Tensor:
            return cross_entropy_sums(
                *arguments, smoothing=0.1, squares=squares, max_logits=20 * WORDS
            )

        compiled = torch.compile(losses, dynamic=True, backend="aot_eager_default_partitioner")
        weights = (1.0, 0.1 if squares else 0.0)
        for tokens in (37, 64):
            arguments = inputs(tokens=tokens)
            result, expected = compiled(*arguments), plainly(arguments, 0.1)
            torch.testing.assert_close(result, expected)
            pairs = zip(
                gradients(result, arguments, weights),
                gradients(expected, arguments, weights),
                strict=True,
            )
            for one, other in pairs:
                torch.testing.assert_close(one, other)
