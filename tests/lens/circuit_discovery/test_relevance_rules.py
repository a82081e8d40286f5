"""Gradients by the rules of relevance: outputs stay, and what is constant stays constant."""

import torch

from manyheads.lens.circuit_discovery.relevance_rules import relevance_rules
from manyheads.parts.feedforward import MLP, FeedForward, SwiGLU
from manyheads.parts.norms import LayerNorm, Normalize, RMSNorm
from manyheads.ragged import Ragged

BATCH = Ragged.from_list([torch.randn(4, 8, generator=torch.Generator().manual_seed(0))])


def test_outputs_stay_the_same() -> None:
    torch.manual_seed(0)
    for module in (FeedForward(SwiGLU(width=8, hidden=6)), FeedForward(MLP(width=8, hidden=6))):
        expected = module(BATCH.values, BATCH)
        with relevance_rules(module):
            torch.testing.assert_close(module(BATCH.values, BATCH), expected)
        assert "forward" not in vars(module)
    for config in (LayerNorm(), RMSNorm(centered=True)):
        norm = Normalize(config, 8)
        expected = norm(BATCH.values)
        with relevance_rules(norm):
            torch.testing.assert_close(norm(BATCH.values), expected)


def test_input_times_gradient_of_a_feedforward_without_biases_is_its_output() -> None:
    torch.manual_seed(0)
    for config in (SwiGLU(width=8, hidden=6), MLP(width=8, hidden=6, bias=False)):
        module, x = FeedForward(config), BATCH.values.clone().requires_grad_()
        with relevance_rules(module):
            output = module(x, BATCH).sum()
            (gradient,) = torch.autograd.grad(output, x)
        torch.testing.assert_close((gradient * x).sum(), output)


def test_the_divisor_of_a_norm_is_a_constant() -> None:
    norm, x = Normalize(RMSNorm(), 8), BATCH.values.clone().requires_grad_()
    with relevance_rules(norm):
        output = norm(x).sum()
        (gradient,) = torch.autograd.grad(output, x)
    torch.testing.assert_close((gradient * x).sum(), output)
