"""Attention through many layers: rollout, and the most that can flow from input to output."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import StackName, part_of
from manyheads.lens.inputs.texts import read, run
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.progress import Progress
from manyheads.taps import Patterns, Record, Tap

# What is left of a capacity below this is rounding.
NOTHING = 1e-12


def attention_rollout(
    model: Model, texts: Any, *, stack: StackName | None = None
) -> tuple[Float[Tensor, "_ _"], ...]:
    """Attention rollout of arXiv 2005.00928: for each text, output positions by input positions.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> rolled, = attention_rollout(model, [[1, 2, 3]])
    >>> rolled.shape, bool(torch.allclose(rolled.sum(1), torch.ones(3)))
    (torch.Size([3, 3]), True)
    """
    return tuple(roll_out(layers) for layers in _residual_patterns(model, texts, stack))


def attention_flow(
    model: Model,
    texts: Any,
    *,
    outputs: Sequence[int] | None = None,
    stack: StackName | None = None,
    progress: bool = True,
) -> tuple[Float[Tensor, "_ _"], ...]:
    """Attention flow of arXiv 2005.00928: the max-flow from each output position to each input.

    Capacities are those of rollout. One flow is solved a pair, so that texts should be short;
    `outputs` names the positions to follow (None: all).
    """
    every = _residual_patterns(model, texts, stack)
    found = []
    places = [range(layers.shape[1]) if outputs is None else outputs for layers in every]
    total = sum(len(mine) * layers.shape[1] for mine, layers in zip(places, every, strict=True))
    with Progress("flowing", total=total, unit="flows", enabled=progress) as bar:
        for mine, layers in zip(places, every, strict=True):
            capacities = layers.double().cpu().numpy()
            rows = np.zeros((len(mine), capacities.shape[1]))
            for row, output in enumerate(mine):
                if not 0 <= output < capacities.shape[1]:
                    problem = f"a text of {capacities.shape[1]} tokens has no position {output}"
                    raise InputError(problem, f"use 0 to {capacities.shape[1] - 1}")
                for place in range(capacities.shape[1]):
                    rows[row, place] = max_flow(capacities, output, place)
                    bar.advance()
            found.append(torch.from_numpy(rows))
    return tuple(found)


def with_residual(pattern: Float[Tensor, "h t t"]) -> Float[Tensor, "t t"]:
    """(mean over heads + I), each row divided by its sum."""
    mean = pattern.double().mean(0)
    mixed = mean + torch.eye(mean.shape[0], dtype=mean.dtype, device=mean.device)
    return mixed / mixed.sum(-1, keepdim=True)


def roll_out(layers: Float[Tensor, "l t t"]) -> Float[Tensor, "t t"]:
    """The product of all layers, the last one leftmost."""
    rolled = layers[0]
    for layer in layers[1:]:
        rolled = layer @ rolled
    return rolled.float()


def max_flow(capacities: Float[np.ndarray, "l t t"], output: int, place: int) -> float:
    """The most that flows from `output` above the last layer down to `place` below the first.

    `capacities[l, i, j]` is what may pass from i above layer l to j below it (Dinic's algorithm).
    """
    return _Network(capacities[::-1]).flow(output, place)


class _Network:
    """Layers of nodes, joined to the next by a full table of capacities, and back by what flows."""

    def __init__(self, capacities: NDArray[np.float64]) -> None:
        self.down = capacities.copy()
        self.up = np.zeros_like(self.down).transpose(0, 2, 1).copy()
        self.depth, self.width = self.down.shape[:2]

    def flow(self, source: int, sink: int) -> float:
        total = 0.0
        while True:
            levels = self._levels(source)
            if levels[self.depth, sink] < 0:
                return total
            self.levels = levels
            self.tried: NDArray[np.int64] = np.zeros((self.depth + 1, self.width), dtype=np.int64)
            while (pushed := self._push(0, source, sink, np.inf)) > 0:
                total += pushed

    def _levels(self, source: int) -> NDArray[np.int64]:
        """How many steps each node is from the source where something can still pass; -1: none."""
        levels = np.full((self.depth + 1, self.width), -1, dtype=np.int64)
        levels[0, source] = 0
        step = 0
        while (levels == step).any():
            ahead = levels == step
            for floor in np.flatnonzero(ahead.any(1)):
                for other, table in self._neighbours(int(floor)):
                    reached = (table[ahead[floor]] > NOTHING).any(0) & (levels[other] < 0)
                    levels[other, reached] = step + 1
            step += 1
        return levels

    def _neighbours(self, floor: int) -> list[tuple[int, NDArray[np.float64]]]:
        """The floors next to one, each with what can still pass to it."""
        found = []
        if floor < self.depth:
            found.append((floor + 1, self.down[floor]))
        if floor > 0:
            found.append((floor - 1, self.up[floor - 1]))
        return found

    def _push(self, floor: int, node: int, sink: int, most: float) -> float:
        """One path's worth from a node to the sink, by nodes that are each a step further."""
        if floor == self.depth and node == sink:
            return most
        level = self.levels[floor, node]
        options = self._neighbours(floor)
        # Places already tried in this phase lead nowhere: neighbours are counted through.
        while self.tried[floor, node] < len(options) * self.width:
            turn, target = divmod(int(self.tried[floor, node]), self.width)
            other, table = options[turn]
            room = table[node, target]
            if room > NOTHING and self.levels[other, target] == level + 1:
                pushed = self._push(other, target, sink, min(most, room))
                if pushed > 0:
                    self._move(floor, other, node, target, pushed)
                    return pushed
            self.tried[floor, node] += 1
        return 0.0

    def _move(self, floor: int, other: int, node: int, target: int, amount: float) -> None:
        if other > floor:
            self.down[floor, node, target] -= amount
            self.up[floor, target, node] += amount
        else:
            self.up[other, node, target] -= amount
            self.down[other, target, node] += amount


def _residual_patterns(
    model: Model, texts: Any, stack: StackName | None
) -> list[Float[Tensor, "l _ _"]]:
    """For each text the patterns of all layers, heads averaged and the residual stream added."""
    part, given = part_of(model, stack), read(model, texts)
    record = Record([part.site(layer, Tap.PATTERN) for layer in part.layers])
    with resting(model), torch.no_grad():
        run(model, given, record)
    seen = [record[part.site(layer, Tap.PATTERN)] for layer in part.layers]
    patterns = [each for each in seen if isinstance(each, Patterns)]
    return [
        torch.stack([with_residual(each.of(text)) for each in patterns])
        for text in range(len(given))
    ]
