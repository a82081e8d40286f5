"""What replaces the outputs of ablated heads: zeros, means, or the outputs of another text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs import cached_run
from manyheads.lens.inputs.texts import batch_ranges
from manyheads.models import model_interface
from manyheads.ragged import Lengths
from manyheads.taps import Tap

Replacement = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReplacementValues:
    """What replaces the outputs of ablated heads, computed for one batch of texts at a time."""

    scope: cached_run.HeadScope
    inputs: model_interface.ModelInputs
    means: dict[int, Float[Tensor, "_ _"]] = field(default_factory=dict)
    donors: tuple[int, ...] = ()

    def of(self, texts: range, layers: Sequence[int]) -> dict[int, Float[Tensor, "_ _ _"]]:
        """The replacement of each layer's head outputs; a single row holds for all tokens."""
        if self.donors:
            return self._resampled(texts, layers)
        if self.means:
            return {layer: self.means[layer].unsqueeze(0) for layer in layers}
        weight = next(self.scope.model.parameters())
        return {layer: weight.new_zeros(1, self.scope.heads_of(layer), 1) for layer in layers}

    def _resampled(self, texts: range, layers: Sequence[int]) -> dict[int, Float[Tensor, "_ _ _"]]:
        sites = {layer: self.scope.site(layer, Tap.HEAD_OUTPUT) for layer in layers}
        record = cached_run.ActivationEditor({}, sites.values())
        donors = self.inputs.select([self.donors[text] for text in texts])
        self.scope.model.run_inputs(donors, record)
        lengths = written_lengths(self.scope, self.inputs.select(texts))
        owners, by_layer = lengths.sequence_of_token, {}
        for layer, site in sites.items():
            # The token at the same position of the donor, which begins again if it is shorter.
            offsets = record[site].lengths.offsets.long()
            tokens = offsets[owners] + lengths.positions % offsets.diff()[owners]
            by_layer[layer] = record[site].values[tokens]
        return by_layer


def written_lengths(scope: cached_run.HeadScope, inputs: model_interface.ModelInputs) -> Lengths:
    """The lengths of the sequences that the heads write to."""
    if scope.stack_name == "encoder" and inputs.source is not None:
        return inputs.source.lengths
    return inputs.lengths(scope.model)


def replacement_values(
    scope: cached_run.HeadScope,
    inputs: model_interface.ModelInputs,
    replace_with: Replacement,
    *,
    seed: int,
    batch_tokens: int,
) -> ReplacementValues:
    """Zeros; each head's mean over all tokens of the texts; or its output in another text.

    "resample" takes the output at the same position of another of the texts (resampling ablation
    of causal scrubbing, Chan et al. 2022), wrapping around where that one is shorter.
    """
    if replace_with == "mean":
        means = _means(scope, inputs, batch_tokens)
        return ReplacementValues(scope=scope, inputs=inputs, means=means)
    if replace_with == "resample":
        return ReplacementValues(scope=scope, inputs=inputs, donors=_donors(len(inputs), seed))
    if replace_with != "zero":
        raise InputError(
            f'replace_with must be "zero", "mean" or "resample", got {replace_with!r}',
            "use one of them",
        )
    return ReplacementValues(scope=scope, inputs=inputs)


def _means(
    scope: cached_run.HeadScope, inputs: model_interface.ModelInputs, batch_tokens: int
) -> dict[int, Float[Tensor, "_ _"]]:
    sites = {layer: scope.site(layer, Tap.HEAD_OUTPUT) for layer in scope.layers}
    sums: dict[int, Tensor] = {}
    tokens = 0
    for texts in batch_ranges(inputs.sizes(scope.model), batch_tokens):
        record = cached_run.ActivationEditor({}, sites.values())
        scope.model.run_inputs(inputs.select(texts), record)
        for layer, site in sites.items():
            sums[layer] = sums.get(layer, 0) + record[site].values.double().sum(0)
        tokens += record[next(iter(sites.values()))].lengths.total
    dtype = next(scope.model.parameters()).dtype
    return {layer: (summed / tokens).to(dtype) for layer, summed in sums.items()}


def _donors(texts: int, seed: int) -> tuple[int, ...]:
    """For each text the index of another text, each used once.

    >>> sorted(_donors(4, seed=0)), any(i == donor for i, donor in enumerate(_donors(4, 0)))
    ([0, 1, 2, 3], False)
    """
    if texts < 2:
        raise InputError(
            "replace_with='resample' needs at least 2 texts, got 1", "give two or more"
        )
    order = torch.randperm(texts, generator=torch.Generator().manual_seed(seed))
    previous = torch.empty_like(order)
    previous[order] = order.roll(1)
    return tuple(previous.tolist())
