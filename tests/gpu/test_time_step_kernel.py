"""The kernel of the decay that a token chooses: values and gradients are those of plain torch.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_time_step_kernel.py --on cpu`.
"""

import pytest
import torch

from manyheads.mixers.recurrent.time_step import log_decay


@pytest.mark.parametrize(("heads", "per_head"), [(3, 1), (2, 40), (8, 16)])
def test_values_and_gradients(heads: int, per_head: int, device: str) -> None:
    draw = torch.Generator().manual_seed(2)
    channels = heads * per_head
    # As part of a wider projection; far out softplus is 0 or x itself.
    x = (10 * torch.randn(90, channels + 5, generator=draw)).to(device)[:, 5:]
    bias, a_log = (torch.randn(size, generator=draw).to(device) for size in (channels, heads))
    pull = torch.randn(90, channels, generator=draw).to(device)
    results = []
    for by_triton in (True, False):
        learned = [each.detach().requires_grad_() for each in (x, bias, a_log)]
        decay = log_decay(*learned, by_triton=by_triton)
        results.append((decay, *torch.autograd.grad(decay, learned, pull)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
