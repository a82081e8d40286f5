"""The kernels of fla-core for delta nets: outputs, states and gradients are those of the plain."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from manyheads.mixers.recurrent.delta_recurrence import (
    HAS_FLA,
    delta_by_fla,
    delta_in_chunks,
    fla_has_gradients,
)
from manyheads.ragged import Lengths

LENGTHS = (300, 1, 64, 129)


@pytest.mark.skipif(not HAS_FLA, reason="needs fla-core: pip install '.[fla]'")
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_outputs_states_and_gradients(by_channel: bool, continued: bool) -> None:
    lengths = Lengths.of(LENGTHS, "cuda")
    total, heads, size = lengths.total, 4, 64
    q, k, v = (torch.randn(total, heads, size, device="cuda") for _ in range(3))
    q, k = F.normalize(q, dim=-1) * size**-0.5, F.normalize(k, dim=-1)
    beta = torch.rand(total, heads, device="cuda")
    shape = (total, heads, size) if by_channel else (total, heads)
    decay = -torch.rand(shape, device="cuda")
    state = torch.randn(len(LENGTHS), heads, size, size, device="cuda") if continued else None
    pull = torch.randn(total, heads, size, device="cuda")
    result, gradients = [], []
    plain = partial(delta_in_chunks, by_triton=False)
    for compute, dtype in ((delta_by_fla, torch.bfloat16), (plain, torch.float32)):
        inputs = [each.to(torch.bfloat16).to(dtype).requires_grad_() for each in (q, k, v, beta)]
        log_decay = decay.clone().requires_grad_()
        output, after = compute(*inputs, log_decay, lengths, state)
        result.append((output, after))
        learned = [*inputs, log_decay] if fla_has_gradients(decay) else []
        gradients.append(torch.autograd.grad(output, learned, pull.to(dtype)) if learned else ())
    for one, other in zip((*result[0], *gradients[0]), (*result[1], *gradients[1]), strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() < 2e-2 * other.double().norm()
