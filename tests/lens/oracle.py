"""Every measure by its definition, from whole patterns, in plain loops over queries."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from manyheads.lens.results.addresses import Block, blocks_of, heads_at, mask_in
from manyheads.mixers.mixer import Mixer
from manyheads.models.model_interface import ModelInputs
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.gates import GATE_TAPS
from manyheads.parts.masks import visible
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Sublayer, Tap

Array = NDArray[np.float64]
Values = dict[tuple[Block, str], list[tuple[int, Array]]]


@dataclass
class Expected:
    """For each attention and measure the values that count, each with its text.

    NaN is the value of a head for which a text does not count.
    """

    values: Values = field(default_factory=lambda: defaultdict(list))

    def add(self, block: Block, name: str, text: int, value: Any) -> None:
        self.values[block, name].append((text, np.asarray(value, dtype=np.float64)))

    def mean(self, block: Block, name: str) -> Array:
        return np.array([head.mean for head in self._heads(block, name)])

    def error(self, block: Block, name: str) -> Array:
        """Residuals of the mean, summed by text: the ratio estimator."""
        return np.array([head.error for head in self._heads(block, name)])

    def _heads(self, block: Block, name: str) -> "list[_Head]":
        result = self.values.get((block, name), [])
        return [
            _Head([(text, value[head]) for text, value in result if not np.isnan(value[head])])
            for head in range(block.heads)
        ]


@dataclass
class _Head:
    """The values of one head that count, each with its text."""

    values: list[tuple[int, float]]

    @cached_property
    def mean(self) -> float:
        return float(np.mean([value for _, value in self.values])) if self.values else math.nan

    @property
    def error(self) -> float:
        texts = sorted({text for text, _ in self.values})
        if len(texts) < 2:
            return math.nan
        sums = [
            sum(value - self.mean for owner, value in self.values if owner == text)
            for text in texts
        ]
        scatter = np.square(sums).sum() * len(texts) / (len(texts) - 1)
        return float(np.sqrt(scatter) / len(self.values))


def by_definition(
    model: nn.Module, inputs: ModelInputs, classes: dict[str, Sequence[int]], offsets: Sequence[int]
) -> Expected:
    """All measures of a model on one batch, through its patterns."""
    record = _recorded(model, inputs)
    expected = Expected()
    tokens = _tokens(inputs)
    for block in blocks_of(model):
        site = Site(block.layer, Tap.PATTERN, block.sublayer, block.stack)
        same = block.sublayer is Sublayer.ATTENTION
        keys = tokens.get(block.stack if same else "encoder")
        seen = record[site]
        assert isinstance(seen, Patterns)
        stack = model.stacks()[block.stack]
        attention = heads_at(stack, block.layer, block.sublayer)
        mask = mask_in(stack.config.layers[block.layer], block.sublayer)
        has_sink = getattr(attention, "sink", None) is not None
        for text, pattern in enumerate(seen.each):
            if isinstance(attention, Mixer):
                # Weights of mixers may be negative: shares of their absolute values count.
                pattern = pattern.abs() / pattern.abs().sum(-1, keepdim=True)
            ids = None if keys is None else keys.of(text).tolist()
            shape = (range(pattern.shape[1]), pattern.shape[1], pattern.shape[2])
            sight = visible(mask, *shape, torch.device("cpu")).numpy()
            one = _Pattern(pattern.double().numpy(), sight, ids, same)
            for name, value in one.measures(classes, offsets, has_sink):
                expected.add(block, name, text, value)
            if isinstance(attention, Mixer) and attention.config.causal:
                for row, weights in enumerate(one.weights.transpose(1, 0, 2)):
                    latest = weights[:, row::-1].cumsum(-1)
                    expected.add(block, "memory_length", text, (latest < 0.9).sum(-1) + 1)
        if not isinstance(attention, Mixer):
            scores = record[Site(block.layer, Tap.SCORES, block.sublayer, block.stack)]
            assert isinstance(scores, Patterns)
            largest = [text.amax((1, 2)).numpy() for text in scores.each if text.numel()]
            # A maximum: one value for all texts.
            expected.add(block, "largest_logit", 0, np.max(largest, axis=0))
        _outputs(expected, block, record, attention.output.weight.detach())
        _gates(expected, block, record)
    return expected


@dataclass
class _Pattern:
    """One sequence's patterns: h t s, which keys each query may see, the ids of the keys."""

    weights: Array
    sight: NDArray[np.bool_]
    ids: list[int] | None
    same: bool

    def measures(
        self, classes: dict[str, Sequence[int]], offsets: Sequence[int], sink: bool
    ) -> Iterator[tuple[str, Array]]:
        seen = [row for row in range(len(self.sight)) if self.sight[row].any()]
        for row in seen:
            yield from self._row(row, classes, sink)
            if self.same:
                yield from self._places(row, offsets)
        if seen:
            yield from self._whole(seen)

    def _row(
        self, row: int, classes: dict[str, Sequence[int]], sink: bool
    ) -> Iterator[tuple[str, Array]]:
        a, count = self.weights[:, row], int(self.sight[row].sum())
        logs = np.where(a > 0, np.log(np.where(a > 0, a, 1.0)), 0.0)
        entropy = -(a * logs).sum(-1)
        yield "entropy", entropy
        if count > 1:
            yield "normalized_entropy", entropy / math.log(count)
        yield "effective_keys", 1 / np.square(_shares(a)).sum(-1)
        yield "max_weight", a.max(-1)
        yield "first_token", a[:, 0]
        if sink:
            yield "on_no_key", 1 - a.sum(-1)
        if self.ids is not None:
            for name, members in classes.items():
                marked = np.array([token in members for token in self.ids])
                yield f"on_{name}", a[:, marked].sum(-1)

    def _places(self, row: int, offsets: Sequence[int]) -> Iterator[tuple[str, Array]]:
        a, keys = self.weights[:, row], np.arange(self.weights.shape[2])
        yield "distance", (a * abs(row - keys)).sum(-1)
        share = _shares(a)
        center = (share * keys).sum(-1, keepdims=True)
        yield "spread", np.sqrt((share * np.square(keys - center)).sum(-1))
        names = {-1: "previous_token", 0: "self", 1: "next_token"}
        for offset in (-1, 0, 1, *offsets):
            if 0 <= row + offset < len(keys):
                yield names.get(offset, f"offset{offset:+d}"), a[:, row + offset]
        yield "previous_token_all_queries", a[:, row - 1] if row else np.zeros(len(a))
        if self.ids is not None and self.ids[row] in self.ids[:row]:
            copies = [key for key in range(row) if self.ids[key] == self.ids[row]]
            yield "duplicate_token", a[:, copies].sum(-1)
            yield "induction", a[:, [copy + 1 for copy in copies]].sum(-1)

    def _whole(self, seen: list[int]) -> Iterator[tuple[str, Array]]:
        first = self.weights[:, :, 0].sum(-1)
        yield "sink", (first / len(seen) > 0.3).astype(np.float64)
        if self.same and self.ids is not None:
            result = np.zeros(len(self.weights))
            for row, token in enumerate(self.ids):
                after = [key + 1 for key in range(row) if self.ids[key] == token]
                result += self.weights[:, row, after].sum(-1)
            mass = self.weights.sum((1, 2))
            yield "induction_score", result / mass
            # A text counts for each head that has weight left behind the first token.
            left = mass - first > 1e-6 * mass
            rest = np.where(left, mass - first, np.nan)
            yield "induction_score_without_first", result / rest


def _shares(a: Array) -> Array:
    """The weights over their sum; NaN for heads that give everything to a learned sink."""
    mass = a.sum(-1, keepdims=True)
    shares: Array = a / np.where(mass > 1e-6, mass, np.nan)
    return shares


def _outputs(expected: Expected, block: Block, record: Record, weight: torch.Tensor) -> None:
    site = Site(block.layer, Tap.HEAD_OUTPUT, block.sublayer, block.stack)
    before = record[Site(block.layer, Tap.BEFORE, block.sublayer, block.stack)]
    read = record[site]
    assert isinstance(before, Ragged)
    assert isinstance(read, Ragged)
    slices = weight.double().unflatten(1, (block.heads, -1))
    written = torch.einsum("nhd,chd->nhc", read.values.double(), slices).norm(dim=-1)
    residual = before.values.double().norm(dim=-1)
    for token, text in enumerate(read.lengths.sequence_of_token.tolist()):
        expected.add(block, "output_norm", text, written[token])
        expected.add(block, "output_share", text, written[token] / residual[token])


def _gates(expected: Expected, block: Block, record: Record) -> None:
    for place, tap in GATE_TAPS.items():
        site = Site(block.layer, tap, block.sublayer, block.stack)
        if site not in record:
            continue
        gate = record[site]
        assert isinstance(gate, Ragged)
        shared = gate.values.double().repeat_interleave(block.heads // gate.values.shape[1], dim=1)
        for token, text in enumerate(gate.lengths.sequence_of_token.tolist()):
            expected.add(block, f"gate_{place}", text, shared[token].mean(-1))
            closed = (shared[token] < 0.1).double().mean(-1)
            expected.add(block, f"gate_{place}_closed", text, closed)


def _recorded(model: nn.Module, inputs: ModelInputs) -> Record:
    taps = (Tap.SCORES, Tap.PATTERN, Tap.HEAD_OUTPUT, Tap.BEFORE, *GATE_TAPS.values())
    record = Record(
        Site(block.layer, tap, block.sublayer, block.stack)
        for block in blocks_of(model)
        for tap in taps
    )
    with torch.no_grad():
        if isinstance(model, Vision):
            model(list(inputs.images), watch=record)
        elif isinstance(model, Seq2Seq):
            model(inputs.source, inputs.ids, watch=record)
        else:
            model(inputs.ids, watch=record)
    return record


def _tokens(inputs: ModelInputs) -> dict[str, Ragged]:
    if inputs.ids is None:
        return {}
    if inputs.source is None:
        return {"main": inputs.ids}
    return {"encoder": inputs.source, "decoder": inputs.ids}
