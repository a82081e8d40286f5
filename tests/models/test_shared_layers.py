"""Layers that share their weights across depth, and tokens that stop early."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import AttentionConfig, Ragged, generate, lens, load, save, surgery
from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts import MLP, Causal, Halting
from manyheads.parts.gates import Gate
from manyheads.taps import Head, Record, Site, Tap
from manyheads.train.objectives import CausalLM, Routing

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
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
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
    result = model.stack.layers[3].attention.project.weight.grad
    torch.testing.assert_close(result, weights[2] + weights[3])


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
    peer = lens.ablate(unshared(model), TEXTS, progress=False)
    torch.testing.assert_close(ours.means["metric"], peer.means["metric"])


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


def universal(**changes: Any) -> Decoder:
    """Different tokens stop after one to four layers."""
    model = decoder(**{"weights_of": "first", "halting": Halting()} | changes)
    assert model.stack.halting is not None
    with torch.no_grad():
        model.stack.halting.weight.mul_(4)
    return model


@torch.no_grad()
def test_tokens_stop_as_in_the_definition() -> None:
    model = universal()
    output = model(batch())
    x = model.embedding(batch(), batch().lengths.positions)
    states, probabilities = [], []
    for layer in model.stack.layers:
        probabilities.append(torch.sigmoid(model.stack.halting(x.values)[:, 0]))  # type: ignore[misc]
        x, _ = layer(x)
        states.append(x.values)
    for token, steps in enumerate(output.router[-1].steps.tolist()):
        sums = [float(sum(each[token] for each in probabilities[: n + 1])) for n in range(4)]
        expected = next((n + 1 for n in range(3) if sums[n] > 0.99), 4)
        assert steps == expected
        weights = [float(each[token]) for each in probabilities[: steps - 1]]
        weights.append(1 - sum(weights))
        mean = sum(weight * state[token] for weight, state in zip(weights, states, strict=False))
        torch.testing.assert_close(output.hidden.values[token], mean, atol=1e-5, rtol=1e-5)
    assert len(set(output.router[-1].steps.tolist())) > 1


@torch.no_grad()
def test_texts_that_stop_early_stay_as_they_are_alone() -> None:
    model = universal()
    together = model(batch()).logits
    for index, text in enumerate(TEXTS):
        alone = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(together.of(index), alone, atol=1e-5, rtol=1e-5)
    changed = batch().values.clone()
    changed[:7] = 3
    assert torch.equal(model(batch().with_values(changed)).logits.of(1), together.of(1))
    whole = torch.tensor([TEXTS[0]])
    cache = model.new_cache()
    steps = [model(piece, cache=cache).logits for piece in whole.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1)[0], together.of(0), atol=1e-4, rtol=1e-4)


def test_training_shortens_the_way(tmp_path: Path) -> None:
    model = universal()
    objective = CausalLM(routing=Routing(ponder=1.0))
    prepared = objective.prepare(model, Batch(texts=batch()), torch.Generator())
    loss = objective.score(model, prepared)
    assert loss.parts["ponder"].item() > loss.targets
    loss.parts["ponder"].backward()
    assert model.stack.halting is not None
    assert model.stack.halting.weight.grad is not None
    assert model.stack.halting.weight.grad.any()
    save(model, tmp_path)
    again: Any = load(tmp_path)
    assert torch.equal(again(batch()).logits.values, model(batch()).logits.values)


def test_what_halting_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"threshold must be in \(0, 1\], got 1.5"):
        Halting(threshold=1.5)
    with pytest.raises(InputError, match="use a model without halting"):
        lens.ablate(universal(), TEXTS, progress=False)
    with pytest.raises(InputError, match="use a model without halting"):
        lens.attribute_logits(universal(), TEXTS, [5, 6])
