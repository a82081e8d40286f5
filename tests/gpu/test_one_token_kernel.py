"""The kernel for one more token gives the outputs and states of plain torch.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_one_token_kernel.py --on cpu`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.mixers.recurrent import decay_recurrence, delta_recurrence


@pytest.mark.parametrize("shape", [(3, 2, 2, 24, 40), (2, 4, 2, 64, 16), (1, 2, 1, 130, 33)])
@pytest.mark.parametrize("rule", ["no decay", "decay", "delta", "delta by channel"])
def test_outputs_and_states(shape: tuple[int, ...], rule: str, device: str) -> None:
    from manyheads.mixers.kernels.triton_one_token import one_token

    batch, heads, keys, size, out = shape
    draw = torch.Generator().manual_seed(3)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(device)

    q, k = normal(batch, keys, size), F.normalize(normal(batch, keys, size), dim=-1)
    v, state = normal(batch, heads, out), normal(batch, heads, size, out)
    beta = normal(batch, heads).sigmoid()
    decay = -normal(batch, heads, size).abs()
    with torch.enable_grad():
        # Where gradients are wanted, plain torch computes.
        v.requires_grad_()
        match rule:
            case "delta":
                expected = delta_recurrence.delta_one_token(q, k, v, beta, decay[:, :, 0], state)
                result = one_token(q, k, v.detach(), decay[:, :, 0], beta, state)
            case "delta by channel":
                expected = delta_recurrence.delta_one_token(q, k, v, beta, decay, state)
                result = one_token(q, k, v.detach(), decay, beta, state)
            case _:
                g = None if rule == "no decay" else decay[:, :, 0]
                expected = decay_recurrence.recur_one_token(q, k, v, g, state)
                result = one_token(q, k, v.detach(), g, None, state)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)
