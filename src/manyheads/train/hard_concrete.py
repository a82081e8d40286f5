"""Hard concrete gates (arXiv 1712.01312): learned numbers from 0 to 1 on parts of a model."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.models.layer import Layer
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

# A sigmoid is stretched from 0..1 to LOW..HIGH, then clamped to 0..1.
LOW, HIGH, TEMPERATURE = -0.1, 1.1, 0.33


class GatedSite(NamedTuple):
    """A site with gated parts, their number, and their device."""

    site: Site
    parts: int
    device: torch.device


class HardConcrete(nn.Module, ABC):
    """A watcher with a hard concrete gate for every part, which scales the part's output.

    In training gates are sampled in each forward pass; in evaluation they are deterministic.
    `start` is the initial probability that a gate is open.
    """

    def __init__(self, sites: Sequence[GatedSite], start: float) -> None:
        super().__init__()
        # So that a gate is open with probability `start`.
        shift = TEMPERATURE * math.log(-LOW / HIGH)
        value = math.log(start / (1 - start)) + shift
        self.sites = tuple(sites)
        self.openness = nn.ParameterList(
            torch.full((parts,), value, device=device) for _, parts, device in self.sites
        )
        self._index = {gated.site: index for index, gated in enumerate(self.sites)}

    def wants(self, site: Site) -> bool:
        return site in self._index

    @abstractmethod
    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        """The value with its parts scaled by their gates."""

    def values(self, site: Site) -> Float[Tensor, " k"]:
        """The gates of one site, 0 to 1."""
        openness = self.openness[self._index[site]]
        if not self.training:
            return settled(openness)
        # 0 and 1 are left out, since their logits are infinite.
        chance = torch.rand_like(openness).clamp(1e-6, 1 - 1e-6)
        return settled((chance.logit() + openness) / TEMPERATURE)

    def expected_open(self) -> Float[Tensor, ""]:
        shift = TEMPERATURE * math.log(-LOW / HIGH)
        return torch.cat([torch.sigmoid(each - shift) for each in self.openness]).sum()

    def settled(self) -> Mapping[Site, Float[Tensor, " k"]]:
        """All gates in evaluation; a part with a gate of zero can be removed."""
        gates = [settled(openness.detach()) for openness in self.openness]
        return {gated.site: gate for gated, gate in zip(self.sites, gates, strict=True)}


class HeadGates(HardConcrete):
    """A gate on the output of every head (arXiv 1905.09418)."""

    def __init__(self, model: nn.Module, start: float = 0.9) -> None:
        super().__init__(_head_sites(model), start)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged:
        assert isinstance(value, Ragged)
        gate = self.values(site)
        return value.with_values(value.values * gate.to(value.values.dtype)[:, None])


def settled(openness: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Gates in evaluation, 0 to 1."""
    return ((HIGH - LOW) * torch.sigmoid(openness) + LOW).clamp(0, 1)


def _head_sites(model: nn.Module) -> list[GatedSite]:
    found = []
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        for index, layer in enumerate(stack.layers):
            assert isinstance(layer, Layer)
            both = ((Sublayer.ATTENTION, layer.attention), (Sublayer.CROSS, layer.cross))
            for sublayer, attention in both:
                if attention is not None:
                    site = Site(index, Tap.HEAD_OUTPUT, sublayer, stack.name)
                    device = attention.project.weight.device
                    found.append(GatedSite(site, attention.config.heads, device))
    return found
