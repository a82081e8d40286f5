"""Layers that share their weights across depth, and tokens that stop early."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import AttentionConfig, Ragged, generate, lens, load, save, surgery
from manyheads.errors import ConfigError
from manyheads.models.build import build
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts import MLP, Causal
from manyheads.parts.gates import Gate
from manyheads.taps import Head, Record, Site, Tap

TEXTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11]]
LAYER = LayerConfig(
    attention=Branch(AttentionConfig(width=16, heads=2, mask=Causal())),
    feedforward=Branch(MLP(width=16, hidden=24)),
)


def decoder(**changes: Any) -> Decoder:
    changes = {"layers": (LAYER,) * 4, "weights_of": (0, 0, 2, 2)} | changes
    config = DecoderConfig(
        embedding=Embedding(vocabulary=40, width=16),
        stack=StackConfig(width=16, **changes),
        readout=LanguageHead(),
    )
    model = build(config, seed=0)
    assert isinstance(model, Decoder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.eval()


def unshared(model: Decoder) -> Decoder:
    """The same model with a copy of the weights at every depth."""
    config = replace(model.config, stack=replace(model.config.stack, weights_of="own"))
    other = build(config, seed=0)
    assert isinstance(other, Decoder)
    for index, owner in enumerate(model.config.stack.owners):
        other.stack.layers[index].load_state_dict(model.stack.layers[owner].state_dict())
    other.embedding.load_state_dict(model.embedding.state_dict())
    return other.eval()


def batch() -> Ragged:
    return Ragged.from_list([torch.tensor(text) for text in TEXTS])


def test_it_is_the_model_with_copies_and_learns_their_sum() -> None:
    model, alone = decoder(), None
    alone = unshared(model)
    assert {name.split(".")[2] for name, _ in model.stack.named_parameters(prefix="s")} == {
        "0",
        "2",
    }
    for each in (model, alone):
        each(batch()).logits.values.square().mean().backward()
    assert torch.equal(model(batch()).logits.values, alone(batch()).logits.values)
    weights = [layer.attention.project.weight.grad for layer in alone.stack.layers]
    found = model.stack.layers[3].attention.project.weight.grad
    torch.testing.assert_close(found, weights[2] + weights[3])


def test_it_generates_with_a_cache_per_depth() -> None:
    model = decoder(weights_of="first")
    [one] = generate(model, [TEXTS[0]], max_new_tokens=8, progress=False)
    [other] = generate(unshared(model), [TEXTS[0]], max_new_tokens=8, progress=False)
    assert one.ids == other.ids


def test_it_is_saved_once(tmp_path: Path) -> None:
    model = decoder()
    save(model, tmp_path)
    again: Any = load(tmp_path)
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(again(batch()).logits.values, model(batch()).logits.values)


def test_every_depth_is_watched_and_ablated_on_its_own() -> None:
    model = decoder()
    record = Record([Site(2, Tap.PATTERN), Site(3, Tap.PATTERN)])
    with torch.no_grad():
        model(batch(), watch=record)
    assert not torch.allclose(*(record[Site(layer, Tap.PATTERN)].of(0) for layer in (2, 3)))
    ours = lens.ablate(model, TEXTS, progress=False)
    theirs = lens.ablate(unshared(model), TEXTS, progress=False)
    torch.testing.assert_close(ours.means["metric"], theirs.means["metric"])


def test_pruning_gives_every_depth_its_own_weights() -> None:
    model = decoder()
    pruned = surgery.prune(model, [Head(3, 1)])
    assert pruned.config.stack.weights_of == "own"
    expected = surgery.prune(unshared(model), [Head(3, 1)])
    assert torch.equal(pruned(batch()).logits.values, expected(batch()).logits.values)


def test_gates_and_adapters_are_shared_too() -> None:
    model = decoder()
    expected = model(batch()).logits.values
    gated = surgery.add_gates(model, Gate(at="output"))
    torch.testing.assert_close(gated(batch()).logits.values, expected)
    with pytest.raises(ConfigError, match="layer 3 uses the weights of layer 2"):
        surgery.add_gates(model, Gate(at="output"), (3,))
    surgery.adapt(model, surgery.LoraConfig(rank=2))
    assert not [name for name, _ in model.named_parameters() if ".layers.3." in name]


def test_sharing_that_cannot_be_is_refused() -> None:
    wider = replace(LAYER, feedforward=Branch(MLP(width=16, hidden=32)))
    for changes, message in (
        ({"weights_of": (0, 0)}, "2 numbers, and the stack 4"),
        ({"weights_of": (0, 2, 2, 2)}, "layer 1 cannot use the weights of 2"),
        ({"weights_of": (0, 0, 1, 1)}, "layer 2 cannot use the weights of 1"),
        ({"layers": (LAYER, wider), "weights_of": "first"}, "layer 1 uses .* another config"),
    ):
        with pytest.raises(ConfigError, match=message):
            decoder(**changes)
