"""Erasure: one prediction of a model for one text, with some attention weights removed.

Only the queries that the prediction is read from decide: the rest of the text reaches them through
their attention weights, which can be inspected, differentiated and replaced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, nan

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.attribution.direct_logits import At, token_indices
from manyheads.lens.inputs.cached_run import ActivationEditor, CachedRun, HeadScope
from manyheads.models.model_interface import ModelInputs
from manyheads.models.readout import ClassHead
from manyheads.parts.masks import visible
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Tap

# From a layer, the index of a copy and its weights to the new weights.
Reshape = Callable[[int, int, Float[Tensor, "h r s"]], Float[Tensor, "h r s"]]

# Weights of all copies of a text that are in memory at once: 256 MB.
WEIGHTS_AT_ONCE = 2**26


class _Reshaping(ActivationEditor):
    """A watcher that replaces the weights of some queries in some layers."""

    def __init__(self, decision: "Decision", reshape: Reshape) -> None:
        super().__init__({})
        site = decision.scope.site
        self._layers = {site(layer, Tap.PATTERN): layer for layer in decision.layers}
        self._rows, self._reshape = decision.rows, reshape

    def wants(self, site: Site) -> bool:
        return site in self._layers

    def see(self, site: Site, value: Ragged | Patterns) -> Patterns:
        assert isinstance(value, Patterns)
        layer, patterns = self._layers[site], []
        for copy, pattern in enumerate(value.each):
            rows = self._reshape(layer, copy, pattern[:, self._rows])
            patterns.append(pattern.index_copy(1, self._rows, rows.to(pattern.dtype)))
        return Patterns(tuple(patterns))


@dataclass(frozen=True, eq=False)
class Decision:
    """The prediction at one position of one text; `rows` are the queries it is read from."""

    scope: HeadScope
    layers: tuple[int, ...]
    cached: CachedRun
    rows: Int[Tensor, " r"]

    @cached_property
    def probabilities(self) -> Float[Tensor, " v"]:
        """The probabilities of all answers, with the model's own weights."""
        with torch.no_grad():
            return self._read(self.cached.hidden, 1)[0]

    @property
    def answer(self) -> int:
        return int(self.probabilities.argmax())

    @cached_property
    def weights(self) -> dict[int, Float[Tensor, "h r s"]]:
        """The model's own weights of the deciding queries in each layer."""
        by_layer: dict[int, Tensor] = {}

        def keep(layer: int, _: int, weights: Tensor) -> Tensor:
            by_layer[layer] = weights
            return weights

        with torch.no_grad():
            self.under(keep)
        return by_layer

    @cached_property
    def visible(self) -> dict[int, Bool[Tensor, "r s"]]:
        """Which keys are visible to the deciding queries in each layer."""
        by_layer, length = {}, self._queries
        for layer, weights in self.weights.items():
            mask = self.scope.attention(layer).config.mask
            pairs = visible(mask, range(length), length, weights.shape[-1], weights.device)
            by_layer[layer] = pairs.expand(length, -1)[self.rows]
        return by_layer

    @cached_property
    def keys(self) -> Int[Tensor, " k"]:
        """The keys that are visible to any deciding query in any of the layers."""
        by_layer = torch.stack([pairs.any(0) for pairs in self.visible.values()])
        return by_layer.any(0).nonzero().flatten()

    def gradients(self) -> dict[int, Float[Tensor, "h r s"]]:
        """The gradient of the answer's probability with respect to each weight."""
        added = {
            layer: torch.zeros_like(weights, requires_grad=True)
            for layer, weights in self.weights.items()
        }
        with torch.enable_grad():
            answers = self.under(lambda layer, _, weights: weights + added[layer])
            gradients = torch.autograd.grad(answers[0, self.answer], list(added.values()))
        return dict(zip(added, gradients, strict=True))

    def under(self, reshape: Reshape, copies: int = 1) -> Float[Tensor, "copies v"]:
        """The probabilities of all answers in copies of the text whose weights are replaced."""
        watch = _Reshaping(self, reshape)
        return self._read(self.cached.resume(min(self.layers), watch, copies), copies)

    @property
    def copies_at_once(self) -> int:
        """How many copies run side by side."""
        heads, _, keys = map(max, zip(*(own.shape for own in self.weights.values()), strict=True))
        return max(1, WEIGHTS_AT_ONCE // (heads * self._queries * keys))

    @property
    def has_sink(self) -> dict[int, bool]:
        """Whether each layer has a learned sink, which takes weight from the keys."""
        return {layer: self.scope.attention(layer).sink is not None for layer in self.layers}

    @property
    def _queries(self) -> int:
        return self.cached.head_outputs(self.layers[0]).lengths.total

    def _read(self, hidden: Ragged, copies: int) -> Float[Tensor, "copies v"]:
        model, readout = self.scope.model, self.scope.model.readout
        assert readout is not None, "checked in decisions_of()"
        if isinstance(readout.config, ClassHead):
            x = readout.config.pooled(hidden.values, hidden.lengths)
        else:
            x = hidden.values.unflatten(0, (copies, -1))[:, int(self.rows[0])]
        return readout.logits(x, model.table).float().softmax(-1)


def decisions_of(
    scope: HeadScope, layers: Sequence[int], inputs: ModelInputs, at: At
) -> list[Callable[[], Decision]]:
    """The decision of each text, to be called one after another.

    Each runs its text once; everything else resumes from the first of the layers.
    """
    model, config = scope.model, scope.model.config.readout
    if model.readout is None:
        raise InputError(
            f"this {type(model).__name__} has no readout and thus no answer",
            "use a model with a language or class head",
        )
    if scope.stack_name == "encoder":
        raise InputError(
            "the encoder's tokens have no readout", 'use stack="decoder", or Sublayer.CROSS'
        )
    lengths = inputs.lengths(model)
    if isinstance(config, ClassHead):
        if at != "last":
            raise InputError(f"a class belongs to the whole text, got at={at}", "leave out at")
        pooled = {"first": slice(1), "last": slice(-1, None)}.get(config.pool, slice(None))
        rows = [range(length)[pooled] for length in lengths.each]
    else:
        if at == "last" and not model.generates:
            raise InputError(
                f"this {type(model).__name__} predicts at every token",
                "set at to one position per text",
            )
        positions = (token_indices(lengths, at) - lengths.offsets[:-1]).tolist()
        rows = [range(position, position + 1) for position in positions]

    def decide(text: int) -> Decision:
        with torch.no_grad():
            cached = CachedRun(scope, inputs.select([text]), layers=layers)
        queries = torch.tensor(rows[text], device=next(model.parameters()).device)
        return Decision(scope, tuple(layers), cached, queries)

    return [partial(decide, text) for text in range(len(inputs))]


ORDERS = ("attention", "gradient", "gradient_times_attention", "random")


@dataclass(frozen=True, slots=True, eq=False)
class Erasure:
    """The effect on one answer of erasing keys in one order.

    `fraction` is that of the keys erased when the answer first changed, 1 if it never did, and NaN
    if there was no answer because some probability is NaN;
    `curve` is the answer's probability at even steps from nothing to everything erased.
    """

    fraction: float
    flipped: bool
    curve: Float[Tensor, " steps"]


def rank_keys(decision: Decision) -> dict[str, Float[Tensor, " k"]]:
    """The importance of each key to the answer: by attention, gradient, and their product.

    Each is summed over the deciding queries, heads and layers; gradients keep their sign, so that
    evidence for the answer comes first (arXiv 1906.03731).
    """
    gradients = decision.gradients()
    sums = {name: torch.zeros_like(decision.keys, dtype=torch.float64) for name in ORDERS[:-1]}
    for layer, weights in decision.weights.items():
        by_order = (weights, gradients[layer], weights * gradients[layer])
        for name, values in zip(sums, by_order, strict=True):
            sums[name] += values.double().sum((0, 1))[decision.keys]
    return sums


def renormalize(
    weights: Float[Tensor, "h r s"], keys: Bool[Tensor, " s"], *, sink: bool
) -> Float[Tensor, "h r s"]:
    """Remove all but some keys and rescale their weights to the same sum; without any key, 0.

    The weight of a learned sink counts in the sum.

    >>> keys = torch.tensor([False, True, True])
    >>> renormalize(torch.tensor([[[0.5, 0.3, 0.2]]]), keys, sink=False)
    tensor([[[0.0000, 0.6000, 0.4000]]])
    """
    remaining = weights * keys
    total = remaining.sum(-1, keepdim=True)
    if sink:
        total = total + (1 - weights.sum(-1, keepdim=True)).clamp(min=0)
    return remaining / total.clamp(min=torch.finfo(total.dtype).tiny)


def erase_key_weights(
    decision: Decision, keys: Bool[Tensor, "copies s"]
) -> Float[Tensor, "copies v"]:
    """The probabilities of all answers, each copy using only some keys."""
    sinks = decision.has_sink

    def without(batch: Tensor, layer: int, copy: int, weights: Tensor) -> Tensor:
        return renormalize(weights, batch[copy], sink=sinks[layer])

    batches = keys.split(decision.copies_at_once)
    with torch.no_grad():
        return torch.cat([decision.under(partial(without, own), len(own)) for own in batches])


def erase(decision: Decision, order: Sequence[int] | Int[Tensor, " k"], steps: int) -> Erasure:
    """Erase the keys in this order, in at most `steps` even steps (arXiv 1906.03731).

    A text with more keys than `steps` is evaluated after each step only, so that its fraction is an
    upper bound within one step.
    """
    order = torch.as_tensor(order, device=decision.keys.device)
    counts = [ceil(len(order) * step / steps) for step in range(steps + 1)]
    size = next(iter(decision.weights.values())).shape[-1]
    evaluated = sorted(set(counts))
    keys = torch.ones(len(evaluated), size, dtype=torch.bool, device=order.device)
    for row, count in zip(keys, evaluated, strict=True):
        row[order[:count]] = False
    answers = erase_key_weights(decision, keys)
    changed = (answers.argmax(-1) != decision.answer).nonzero().flatten()
    fraction = evaluated[int(changed[0])] / len(order) if len(changed) else 1.0
    if answers.isnan().any():
        fraction = nan
    by_count = dict(zip(evaluated, answers[:, decision.answer].tolist(), strict=True))
    curve = torch.tensor([by_count[count] for count in counts])
    return Erasure(fraction, bool(len(changed)), curve)
