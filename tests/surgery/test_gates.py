"""Gates for trained models: any kind at any place, and nothing changes until they learn."""

from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import build, load, save
from manyheads.errors import ConfigError, InputError
from manyheads.parts import Gate
from manyheads.surgery import LoraConfig, adapt, add_gates, freeze_except_gates
from manyheads.taps import Sublayer
from tests.models.zoo import MODELS, answer, small, values

SHAPE: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_size": 8}
MORE: dict[str, Any] = {"hidden": 40, "vocabulary": 50}
KINDS = [
    Gate(at=at, per=per, heads=heads, operation=operation, activation=activation)  # type: ignore[arg-type]
    for at in ("query", "key", "value", "output", "final")
    for per, heads in (("head", "own"), ("channel", "shared"), ("channel", "own"))
    for operation in ("multiply", "add")
    for activation in ("sigmoid", "silu")
]
CONTROLS = [
    Gate(at=at, per="channel", reads=reads, operation=operation, activation="raised_sigmoid")  # type: ignore[arg-type]
    for at in ("value", "output", "final")
    for reads, operation in (("input", "multiply"), ("nothing", "multiply"), ("nothing", "add"))
]
UNGATED = [name for name in MODELS if "gates" not in name]


def llama() -> Any:
    return build("llama-1b-shape", **SHAPE, **MORE, seed=0)


@pytest.mark.parametrize("gate", KINDS, ids=str)
def test_every_gate_leaves_the_output_as_it_was_and_can_learn(gate: Gate) -> None:
    model = llama()
    gated = add_gates(model, gate)
    ids = torch.arange(20).view(2, 10)
    before, after = model(ids).logits, gated(ids).logits
    assert (after - before).abs().max() <= 1e-6
    freeze_except_gates(gated)
    after.square().mean().backward()
    for each in gated.stack.layers:
        attention = each.attention
        parts = attention.project.weight.grad.split(list(attention.our_rows.values()))
        gradients = dict(zip(attention.our_rows, parts, strict=True))
        assert gradients.pop(f"gate_{gate.at}").any()
        assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("gate", CONTROLS, ids=str)
def test_controls_leave_the_output_as_it_was_and_can_learn(gate: Gate) -> None:
    model = llama()
    gated = add_gates(model, gate)
    ids = torch.arange(20).view(2, 10)
    before, after = model(ids).logits, gated(ids).logits
    # An added half costs digits of small numbers.
    assert (after - before).abs().max() <= (1e-6 if gate.operation == "multiply" else 1e-5)
    heads, size = gated.stack.layers[0].attention.config.gate_shape(gate.at)
    inputs = 32 if gate.reads == "input" else 1
    assert freeze_except_gates(gated) == 2 * heads * size * inputs
    after.square().mean().backward()
    for layer in gated.stack.layers:
        for logits in layer.attention.gate_parameters.values():
            assert logits.grad.any()


@pytest.mark.parametrize("name", UNGATED)
def test_every_model_can_have_gates(name: str) -> None:
    model = small(MODELS[name])
    gated = add_gates(add_gates(model, Gate(at="output")), Gate(at="value", operation="add"))
    with torch.no_grad():
        for one, other in zip(_said(gated), _said(model), strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    assert not any(layer.attention.inner.gates for layer in _layers(model) if layer.attention)


def _layers(model: Any) -> list[Any]:
    config = model.config
    stacks = [config.stack] if hasattr(config, "stack") else [config.encoder, config.decoder]
    return [layer for stack in stacks for layer in stack.layers]


def _said(model: Any) -> list[torch.Tensor]:
    output = answer(model)
    return [values(each) for each in (output.hidden, output.logits) if each is not None]


def test_cross_attention_and_one_stack_can_be_gated() -> None:
    model = small(MODELS["seq2seq 2017"])
    gated = add_gates(model, Gate(at="key", operation="add"), sublayer=Sublayer.CROSS)
    gated = add_gates(gated, Gate(at="output"), (1,), stack="encoder")
    result = [
        [bool(branch and branch.inner.gates) for branch in (layer.attention, layer.cross)]
        for layer in _layers(gated)
    ]
    assert result == [[False, False], [True, False], [False, True], [False, True]]
    with torch.no_grad():
        torch.testing.assert_close(_said(gated), _said(model), atol=2e-5, rtol=1e-5)


def test_a_gated_model_is_saved_and_loaded(tmp_path: Path) -> None:
    gated = add_gates(llama(), Gate(at="output", per="channel"))
    assert save(gated, tmp_path / "gated").family == "qwen3"
    again: Any = load(tmp_path / "gated")
    ids = torch.arange(10)[None]
    assert torch.equal(again(ids).logits, gated(ids).logits)


def test_gates_alone_learn() -> None:
    gated = add_gates(llama(), Gate(at="output"))
    before = {name: tensor.clone() for name, tensor in gated.state_dict().items()}
    assert freeze_except_gates(gated) == 2 * 4 * 32
    optimizer = torch.optim.AdamW([p for p in gated.parameters() if p.requires_grad], lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    gated(torch.arange(10)[None]).logits.square().mean().backward()
    optimizer.step()
    for name, tensor in gated.state_dict().items():
        moved = (tensor != before[name]).reshape(len(tensor), -1).any(1)
        if name.endswith("attention.project.weight"):
            assert not moved[:32].any()
            assert moved[32:36].all()
            assert not moved[36:].any()
        else:
            assert not moved.any(), name


def test_bad_input_is_refused() -> None:
    model = llama()
    with pytest.raises(ConfigError, match="layer 2 of main has no attention: use 0, 1"):
        add_gates(model, Gate(at="output"), (2,))
    with pytest.raises(ConfigError, match="no layer has cross"):
        add_gates(model, Gate(at="output"), sublayer=Sublayer.CROSS)
    with pytest.raises(ConfigError, match="reads itself changes the output"):
        add_gates(model, Gate(at="output", per="channel", reads="itself"))
    with pytest.raises(ConfigError, match="the model has no stack 'decoder'"):
        add_gates(model, Gate(at="output"), stack="decoder")
    gated = add_gates(model, Gate(at="output"))
    with pytest.raises(ConfigError, match="layer 0 already has a gate at 'output'"):
        add_gates(gated, Gate(at="output", operation="add"))
    with pytest.raises(ConfigError, match="the model has no gates"):
        freeze_except_gates(model)
    adapt(model, LoraConfig())
    with pytest.raises(InputError, match="does not belong to the model's own weights"):
        add_gates(model, Gate(at="output"))
