"""A pruned model is the model with those heads ablated, and an ordinary model besides."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.checkpoints.folder import load, save
from manyheads.errors import InputError
from manyheads.lens.addresses import Address, blocks_of
from manyheads.models.build import build
from manyheads.models.recipes import ModelConfig
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal
from manyheads.parts.norms import Both, LayerNorm, Post, RMSNorm
from manyheads.parts.positions import Alibi, Rotary, T5Buckets
from manyheads.ragged import Ragged
from manyheads.surgery.prune import prune, prune_layers, prune_neurons
from manyheads.surgery.record import origins
from manyheads.taps import Head, Patterns, Record, Site, Sublayer, Tap
from tests.models import zoo

TOLERANCE = 1e-5

# Eight queries over one, two and four heads of keys, and seven over one.
SHARED = {
    f"{heads} over {keys}": zoo.decoder(
        *[
            zoo.layer(
                zoo.own(heads=heads, head_size=8, kv_heads=keys, mask=Causal(), position=Rotary()),
                SwiGLU(width=zoo.WIDTH, hidden=40),
            )
        ]
        * 2
    )
    for heads, keys in ((6, 6), (6, 2), (7, 1), (8, 4))
}
ODD = {
    "post with bias": zoo.encoder(
        *[zoo.layer(zoo.own(bias="all"), norm=Post(LayerNorm()))] * 3, position=zoo.LEARNED
    ),
    "both with bias": zoo.decoder(
        *[zoo.layer(zoo.own(bias="all", mask=Causal()), norm=Both(LayerNorm()))] * 2
    ),
    "all gates": zoo.decoder(
        *[zoo.writes(position=Rotary(), kv_heads=2, heads=8, head_size=4, gates=zoo.EVERY_GATE)] * 2
    ),
    "shared final gate": zoo.decoder(
        *[zoo.writes(gates=(Gate(at="final", per="channel", heads="shared"),))] * 2
    ),
    "alibi shared": zoo.decoder(*[zoo.writes(position=Alibi(), heads=8, kv_heads=2)] * 2),
    "buckets shared": zoo.decoder(
        *[
            zoo.writes(
                position=T5Buckets(buckets=8, bidirectional=False),
                heads=8,
                kv_heads=2,
                sink="learned",
                head_scale="learned",
                query_norm=RMSNorm(),
            )
        ]
        * 3
    ),
}
MODELS: dict[str, ModelConfig] = zoo.MODELS | SHARED | ODD


class Silenced:
    """Puts zeros, or other values, where these heads speak."""

    def __init__(self, heads: Iterable[Address], means: dict[Site, Tensor] | None = None) -> None:
        self.heads: dict[Site, list[int]] = {}
        for address in heads:
            site = Site(address.head.layer, Tap.HEAD_OUTPUT, address.sublayer, address.stack)
            self.heads.setdefault(site, []).append(address.head.head)
        self.means = means or {}

    def wants(self, site: Site) -> bool:
        return site in self.heads

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged:
        assert isinstance(value, Ragged)
        values, gone = value.values.clone(), self.heads[site]
        values[:, gone] = self.means[site][gone] if site in self.means else 0.0
        return value.with_values(values)


def every(model: Any) -> list[Address]:
    return [address for block in blocks_of(model) for address in block.addresses]


def some(model: Any, seed: int, share: float = 0.4) -> list[Address]:
    heads = every(model)
    return random.Random(seed).sample(heads, max(1, round(share * len(heads))))


def trembling(config: ModelConfig, seed: int = 0) -> Any:
    """A model in which nothing is zero or one by chance: biases, norms, sinks, scales."""
    model = build(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def said(model: Any, **more: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out = zoo.answer(model, **more)
    hidden = zoo.values(out.hidden)
    return hidden, hidden if out.logits is None else zoo.values(out.logits)


def close(one: Any, other: Any, **watched: Any) -> None:
    for mine, theirs in zip(said(one), said(other, **watched), strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(mine / scale, theirs / scale, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_pruned_is_ablated(name: str) -> None:
    model = trembling(MODELS[name])
    for seed in range(3):
        heads = some(model, seed, (0.2, 0.4, 0.7)[seed])
        try:
            pruned = prune(model, heads)
        except InputError as error:
            # The only thing that has no counterpart: a final gate over nothing but a bias.
            assert "keep one of its heads" in str(error)
            continue
        close(pruned, model, watch=Silenced(heads))


@pytest.mark.parametrize("name", [name for name in MODELS if "gate" not in name])
def test_a_whole_layer_may_lose_its_heads(name: str) -> None:
    model = trembling(MODELS[name])
    for sublayer in (Sublayer.ATTENTION, Sublayer.CROSS):
        layers = {(each.stack, each.head.layer) for each in every(model)}
        chosen = sorted(layers)[0]
        heads = [
            each
            for each in every(model)
            if (each.stack, each.head.layer) == chosen and each.sublayer is sublayer
        ]
        close(prune(model, heads), model, watch=Silenced(heads))
    close(prune(model, every(model)), model, watch=Silenced(every(model)))
