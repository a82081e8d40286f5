"""Norms round where those of `transformers` round."""

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from manyheads.parts.norms import RMSNorm, make_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_centered_norm_is_that_of_qwen3_next(dtype: torch.dtype) -> None:
    ours = make_norm(RMSNorm(eps=1e-6, centered=True), 256).to(dtype)
    peer = Qwen3NextRMSNorm(256, eps=1e-6).to(dtype)
    weight = 0.1 * torch.randn(256)
    with torch.no_grad():
        ours.weight.copy_(weight)
        peer.weight.copy_(weight)
        x = (2 * torch.randn(128, 256)).to(dtype)
        result, expected = ours(x), peer(x)
    if dtype == torch.float32:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    else:
        # Sums in another order tip a last digit now and then.
        assert (result == expected).float().mean() > 0.999
