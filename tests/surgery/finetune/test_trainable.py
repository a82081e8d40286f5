"""Training some heads, or all but some."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads import build
from manyheads.errors import InputError
from manyheads.surgery import freeze, freeze_except, unfreeze_all
from manyheads.train.optim.optimizers import AdamW, Muon
from manyheads.train.optim.param_groups import RateFactor, build_param_groups, describe_parameters

SHAPE: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_size": 8}
MORE: dict[str, Any] = {"hidden": 40, "vocabulary": 50}


def llama() -> Any:
    return build("llama-1b-shape", **SHAPE, **MORE, seed=0)


def moved(model: Any, optimizer: AdamW | Muon) -> dict[str, Tensor]:
    """Which numbers two steps have changed."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps = optimizer.build(model)
    for _ in range(2):
        model(torch.arange(12)[None]).logits.square().mean().backward()
        steps.step()
        steps.zero_grad()
    return {name: tensor != before[name] for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", [AdamW(decay=0.5), Muon(decay=0.5)], ids=["adamw", "muon"])
def test_only_the_chosen_heads_move(optimizer: AdamW | Muon) -> None:
    model = llama()
    assert freeze_except(model, ("L1H2", "L1H3", "L0H0")) == (2 * 8 + 8 + 8 + 2 * 8 + 2 * 8) * 32
    result = moved(model, optimizer)
    project = result.pop("stack.layers.1.attention.project.weight").all(1)
    assert project.view(-1, 8).all(1).nonzero().flatten().tolist() == [2, 3, 5, 7]
    output = result.pop("stack.layers.1.attention.output.weight")
    assert output.all(0).tolist() == [False] * 16 + [True] * 16
    assert not output[:, :16].any()
    # The key of L0H0 is L0H1's too, and rests.
    first = result.pop("stack.layers.0.attention.project.weight")
    assert first.any(1).view(-1, 8).all(1).tolist() == [True] + [False] * 7
    result.pop("stack.layers.0.attention.output.weight")
    assert not any(each.any() for each in result.values())


def test_all_but_the_chosen_heads_move() -> None:
    model = llama()
    freeze(model, ("L1H2",))
    result = moved(model, AdamW(decay=0.5))
    project = result.pop("stack.layers.1.attention.project.weight")
    rests = [2, 5, 7]
    blocks = project.view(8, 8, 32).flatten(1)
    assert [index for index in range(8) if not blocks[index].any()] == rests
    output = result.pop("stack.layers.1.attention.output.weight")
    assert not output[:, 16:24].any()
    assert output[:, :16].any()
    assert all(each.any() for each in result.values())


def test_everything_learns_again() -> None:
    model = llama()
    freeze_except(model, ("L0H0",))
    unfreeze_all(model)
    assert all(each.any() for each in moved(model, AdamW()).values())


def test_queries_keys_and_values_have_rates_of_their_own() -> None:
    model = llama()
    rates = (
        RateFactor(pattern="*.query.*", factor=0.0),
        RateFactor(pattern="*.value.*", factor=2.0),
    )
    groups = build_param_groups(describe_parameters(model), lr=1.0, decay=0.0, rates=rates)
    assert any(group["parts"] == ((32, 0.0), (16, 1.0), (16, 2.0)) for group in groups)
    result = moved(model, AdamW(rates=rates))["stack.layers.0.attention.project.weight"].any(1)
    assert not result[:32].any()
    assert result[32:].all()


def test_a_missing_head_is_refused_and_everything_stays_trainable() -> None:
    model = llama()
    with pytest.raises(InputError, match="use L0H0 to L0H3"):
        freeze_except(model, ("L0H9",))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_bare_head_of_an_encoder_decoder_is_its_decoders_own() -> None:
    model = build("transformer-base", layers=1, width=16, heads=2, vocabulary=50, seed=0)
    assert freeze_except(model, ["L0H1"]) == freeze_except(model, ["decoder L0H1"]) > 0
