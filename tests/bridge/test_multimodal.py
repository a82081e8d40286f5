"""Models of several towers, which read dicts."""

import pytest
import torch
import transformers

from manyheads import lens
from manyheads.bridge.wrapped_model import wrap
from manyheads.taps import Head
from tests.bridge.zoo import IMAGE, TEXT


def test_both_towers_of_clip() -> None:
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**TEXT, "projection_dim": 16},
        vision_config={**IMAGE, "projection_dim": 16},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    examples = [
        {"input_ids": torch.tensor([ids]), "pixel_values": torch.randn(1, 3, 16, 16)}
        for ids in ([5, 6, 7, 8, 2], [9, 10, 2])
    ]
    result = lens.statistics(wrap(model), examples, progress=False)
    assert {block.stack for block in result.blocks} == {"text", "vision"}
    model.set_attn_implementation("eager")
    entropies: dict[str, list[torch.Tensor]] = {"text": [], "vision": []}
    for example in examples:
        with torch.no_grad():
            output = model(**example, output_attentions=True)
        for stack, values in entropies.items():
            weights = getattr(output, f"{stack}_model_output").attentions[1][0, 2]
            values.append(-torch.special.xlogy(weights, weights).sum(-1))
    for stack, values in entropies.items():
        address = next(
            each for each in result.addresses if each.stack == stack and each.head == Head(1, 2)
        )
        expected = float(torch.cat(values).mean())
        assert result.of(address)["entropy"] == pytest.approx(expected, abs=1e-5)
