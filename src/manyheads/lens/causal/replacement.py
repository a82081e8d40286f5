"""What stands in for a head that is taken away: nothing, its mean, or what it says elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import Edits, Part
from manyheads.lens.inputs.texts import Given, run, shares
from manyheads.ragged import Lengths
from manyheads.taps import Tap

How = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StandIns:
    """Values for the heads of any layer, made for one share of the texts after another."""

    part: Part
    given: Given
    means: dict[int, Float[Tensor, "_ _"]] = field(default_factory=dict)
    donors: tuple[int, ...] = ()

    def of(self, texts: range, layers: Sequence[int]) -> dict[int, Float[Tensor, "_ _ _"]]:
        """For each layer what its heads' outputs become; one row may stand for all tokens."""
        if self.donors:
            return self._elsewhere(texts, layers)
        if self.means:
            return {layer: self.means[layer].unsqueeze(0) for layer in layers}
        weight = next(self.part.model.parameters())
        shapes = {layer: self.part.attention(layer).config for layer in layers}
        return {
            layer: weight.new_zeros(1, shape.heads, shape.size) for layer, shape in shapes.items()
        }

    def _elsewhere(self, texts: range, layers: Sequence[int]) -> dict[int, Float[Tensor, "_ _ _"]]:
        sites = {layer: self.part.site(layer, Tap.HEAD_OUTPUT) for layer in layers}
        seen = Edits({}, sites.values())
        run(self.part.model, self.given.select([self.donors[text] for text in texts]), seen)
        found = {}
        for layer, site in sites.items():
            spoken = seen[site]
            places = _same_position(self._lengths(texts), spoken.lengths)
            found[layer] = spoken.values[places]
        return found

    def _lengths(self, texts: range) -> Lengths:
        """Of the sequences whose tokens the heads write to."""
        mine = self.given.select(texts)
        if self.part.stack_name == "encoder" and mine.source is not None:
            return mine.source.lengths
        return mine.lengths(self.part.model)


def stand_ins(part: Part, given: Given, replace_with: How, *, seed: int, room: int) -> StandIns:
    """Zeros; each head's mean over all tokens of the texts; or its output in another text.

    "resample" takes the output at the same position of another of the texts (resampling ablation
    of causal scrubbing, Chan et al. 2022), beginning anew where that one is shorter.
    """
    if replace_with == "mean":
        return StandIns(part=part, given=given, means=_means(part, given, room))
    if replace_with == "resample":
        return StandIns(part=part, given=given, donors=_donors(len(given), seed))
    if replace_with != "zero":
        raise InputError(
            f'replace_with must be "zero", "mean" or "resample", got {replace_with!r}',
            "use one of them",
        )
    return StandIns(part=part, given=given)


def _means(part: Part, given: Given, room: int) -> dict[int, Float[Tensor, "_ _"]]:
    sites = {layer: part.site(layer, Tap.HEAD_OUTPUT) for layer in part.layers}
    sums: dict[int, Tensor] = {}
    tokens = 0
    for texts in shares(given.sizes(part.model), room):
        seen = Edits({}, sites.values())
        run(part.model, given.select(texts), seen)
        for layer, site in sites.items():
            summed = seen[site].values.double().sum(0)
            sums[layer] = sums[layer] + summed if layer in sums else summed
        tokens += seen[next(iter(sites.values()))].lengths.total
    dtype = next(part.model.parameters()).dtype
    return {layer: (summed / tokens).to(dtype) for layer, summed in sums.items()}


def _donors(texts: int, seed: int) -> tuple[int, ...]:
    """For every text another one, each once.

    >>> sorted(_donors(4, seed=0)), any(place == other for place, other in enumerate(_donors(4, 0)))
    ([0, 1, 2, 3], False)
    """
    if texts < 2:
        raise InputError("one text has no other to resample from", "give two or more")
    order = torch.randperm(texts, generator=torch.Generator().manual_seed(seed))
    found = torch.empty_like(order)
    found[order] = order.roll(1)
    return tuple(found.tolist())


def _same_position(ours: Lengths, theirs: Lengths) -> Int[Tensor, " n"]:
    """For each token of ours the place of the one that stands so far into the other's text."""
    owner = ours.sequence_of_token
    starts, each = theirs.offsets[:-1].long(), theirs.offsets.diff().long()
    return starts[owner] + ours.positions % each[owner]
