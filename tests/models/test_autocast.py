"""Models whose weights stay in float32 while their products are taken in bfloat16."""

import pytest
import torch

from tests.models.zoo import MODELS, answer, small, values


@pytest.mark.parametrize("name", MODELS)
def test_autocast_stays_near_single_precision_and_trains(name: str) -> None:
    model = small(MODELS[name])
    expected = values(answer(model).hidden).detach()
    with torch.autocast("cpu", torch.bfloat16):
        result = values(answer(model).hidden)
    gradients = torch.autograd.grad(
        result.float().square().sum(), list(model.parameters()), allow_unused=True
    )
    assert torch.linalg.norm(result.float() - expected) < 0.1 * torch.linalg.norm(expected)
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)
