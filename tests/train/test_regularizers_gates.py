"""Gates of heads, against the published formulas."""

import math

import pytest
import torch

from manyheads.models.build import build
from manyheads.taps import Site, Tap
from manyheads.train.regularizers import HeadGates
from tests.models.zoo import DECODERS, HEADS, ids, values


def test_gates_follow_the_published_formulas() -> None:
    model = build(DECODERS["llama"], seed=0)
    gates = HeadGates(model)
    site = Site(1, Tap.HEAD_OUTPUT)
    with torch.no_grad():
        gates.gate_probability[1].copy_(torch.tensor([-9.0, -1.0, 0.5, 9.0]))
    torch.manual_seed(3)
    chance = torch.rand(HEADS).clamp(1e-6, 1 - 1e-6)
    torch.manual_seed(3)
    drawn = gates.values(site)
    soft = torch.sigmoid((chance.logit() + gates.gate_probability[1]) / 0.33)
    torch.testing.assert_close(drawn, (1.2 * soft - 0.1).clamp(0, 1))
    gates.eval()
    still = (1.2 * torch.sigmoid(gates.gate_probability[1]) - 0.1).clamp(0, 1)
    torch.testing.assert_close(gates.values(site), still)
    torch.testing.assert_close(gates.settled()[site], still.detach())
    each = torch.cat(list(gates.gate_probability))
    expected = torch.sigmoid(each - 0.33 * math.log(0.1 / 1.1)).sum()
    torch.testing.assert_close(gates.expected_open(), expected)


def test_a_gate_is_open_as_often_as_its_cost_predicts() -> None:
    gates = HeadGates(build(DECODERS["llama"], seed=0), start=0.7)
    torch.manual_seed(0)
    draws = torch.stack([gates.values(Site(0, Tap.HEAD_OUTPUT)) for _ in range(2000)])
    assert (draws > 0).float().mean().item() == pytest.approx(0.7, abs=0.02)
    assert gates.expected_open().item() == pytest.approx(0.7 * 2 * HEADS)


def test_a_closed_gate_takes_its_head_out() -> None:
    model, ablated = (build(DECODERS["llama"], seed=0) for _ in range(2))
    gates = HeadGates(model).eval()
    with torch.no_grad():
        for layer, gate_probability in enumerate(gates.gate_probability):
            gate_probability.fill_(9.0)
            gate_probability[layer] = -9.0
            size = ablated.stack.layers[layer].attention.config.size
            columns = slice(layer * size, (layer + 1) * size)
            ablated.stack.layers[layer].attention.output.weight[:, columns] = 0
        result = values(model(ids(), watch=gates).hidden)
        torch.testing.assert_close(result, values(ablated(ids()).hidden))
