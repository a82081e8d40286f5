"""Gates of neurons and layers: closed ones are what pruning leaves, and what is idle closes."""

from typing import Any

import pytest
import torch

from manyheads.errors import ConfigError
from manyheads.models.build import build
from manyheads.models.layer import LayerConfig
from manyheads.surgery.addresses import layer_ends, neuron_site
from manyheads.surgery.pruning import prune, prune_layers, prune_neurons
from manyheads.surgery.selection.l0_selection import (
    L0Config,
    LayerGates,
    NeuronGates,
    train_l0_gates,
)
from manyheads.taps import Site, Sublayer, Tap
from tests.models import zoo

TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 3], [11, 12, 13]]
CASES = [
    (name, stack)
    for name, config in zoo.MODELS.items()
    for stack in (("encoder", "decoder") if name.startswith("seq2seq") else ("main",))
]


def said(model: Any, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return zoo.values(zoo.answer(model, **more).hidden)


@pytest.mark.parametrize(("name", "stack"), CASES)
def test_closed_layers_are_pruned_layers_and_open_ones_change_nothing(
    name: str, stack: Any
) -> None:
    model = zoo.small(zoo.MODELS[name]).eval()
    gates = LayerGates(model.stacks()[stack]).eval()
    with torch.no_grad():
        for gate_probability in gates.gate_probability:
            gate_probability.fill_(9.0)
    assert torch.equal(said(model, watch=gates), said(model))
    # The last stays, and the only one that looks at an encoder.
    going = 1 if name.endswith("looks back") else len(gates.sites) - 1
    for place in range(going if len(gates.sites) > 1 else 0):
        with torch.no_grad():
            gates.gate_probability[place].fill_(-9.0)
        gone = [each.layer for each, _, _ in gates.sites[: place + 1]]
        pruned = prune_layers(model, gone, stack=stack).eval()
        torch.testing.assert_close(said(model, watch=gates), said(pruned))


def test_a_layer_is_entered_at_its_first_sublayer_and_left_at_its_last() -> None:
    stack = zoo.small(zoo.DECODERS["uneven"]).stack
    assert layer_ends(stack, 0) == (Site(0, Tap.BEFORE), Site(0, Tap.AFTER, Sublayer.FEEDFORWARD))
    assert layer_ends(stack, 1) == tuple(
        Site(1, tap, Sublayer.FEEDFORWARD) for tap in (Tap.BEFORE, Tap.AFTER)
    )
    assert layer_ends(stack, 2) == (Site(2, Tap.BEFORE), Site(2, Tap.AFTER))
    idle = zoo.decoder(zoo.writes(), LayerConfig(attention=None, feedforward=None))
    assert layer_ends(build(idle, seed=0).stack, 1) is None


@pytest.mark.parametrize("name", ["decoder llama", "encoder bert", "seq2seq t5", "decoder uneven"])
def test_closed_neurons_are_pruned_neurons(name: str) -> None:
    model = zoo.small(zoo.MODELS[name]).eval()
    stack = list(model.stacks().values())[-1]
    gates = NeuronGates(stack).eval()
    gone: dict[int, list[int]] = {}
    with torch.no_grad():
        for (site, count, _), gate_probability in zip(
            gates.sites, gates.gate_probability, strict=True
        ):
            gone[site.layer] = list(range(site.layer, count, 3))
            gate_probability.fill_(9.0)
            gate_probability[gone[site.layer]] = -9.0
    pruned = prune_neurons(model, gone, stack=stack.name).eval()
    torch.testing.assert_close(said(model, watch=gates), said(pruned))


def test_experts_have_no_gates_for_neurons() -> None:
    mixed = zoo.decoder(zoo.writes(), zoo.layer(zoo.own(), zoo.EXPERTS))
    gates = NeuronGates(build(mixed, seed=0).stack)
    assert [site.layer for site, _, _ in gates.sites] == [0]


def close(model: Any, what: Any, **more: Any) -> Any:
    how = L0Config(steps=30, lr=0.3, **more)
    return train_l0_gates(model, TEXTS, how, what, targets=None, seed=0, progress=False)


def test_gates_close_where_closing_is_cheap() -> None:
    model = build(zoo.DECODERS["windows and whole"], seed=0)
    with torch.no_grad():
        for part in (model.stack.layers[1].attention.output, model.stack.layers[1].feedforward):
            for weight in part.parameters():
                weight.zero_()
        model.stack.layers[2].feedforward.contract.weight[:, 7] = 0.0
    before = {name: each.clone() for name, each in model.state_dict().items()}
    layers = close(model, "layers", weight=0.001)
    assert min(layers, key=lambda site: float(layers[site])).layer == 1
    neurons = close(model, "neurons", weight=0.01)
    third = neurons[neuron_site(model.stack, 2)]
    assert int((third <= third[7]).sum()) <= 4
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(each.requires_grad for each in model.parameters())


def test_the_gates_of_one_stack_are_trained() -> None:
    model = build(zoo.SEQ2SEQS["2017"], seed=0)
    pairs = [([1, 2, 3], [0, 4, 5]), ([6, 7], [0, 8, 9, 3])]
    how = L0Config(steps=2)
    result = train_l0_gates(
        model, pairs, how, "layers", targets=None, stack="encoder", seed=0, progress=False
    )
    assert {site.stack for site in result} == {"encoder"}
    assert len(result) == 2
    heads = train_l0_gates(prune(model, []), pairs, how, targets=None, seed=0, progress=False)
    assert {site.stack for site in heads} == {"encoder", "decoder"}


def test_what_cannot_close_is_refused() -> None:
    with pytest.raises(ConfigError, match="steps must be at least 1, got 0"):
        L0Config(steps=0)
