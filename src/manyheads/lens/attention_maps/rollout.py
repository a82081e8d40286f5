"""Attention across layers: rollout and flow (arXiv 2005.00928)."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import StackName, head_scope
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.results.addresses import check_one_stream
from manyheads.models.build import Model, eval_mode
from manyheads.progress import Progress
from manyheads.taps import Patterns, Record, Tap

# A smaller capacity is rounding error.
MIN_CAPACITY = 1e-12


@wrapping_models
def attention_rollout(
    model: Model, texts: Inputs, *, stack: StackName | None = None
) -> tuple[Float[Tensor, "_ _"], ...]:
    """Attention rollout of arXiv 2005.00928: for each text, output positions by input positions.

    Of mixers it takes the shares of absolute weights.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> rolled, = attention_rollout(model, [[1, 2, 3]])
    >>> rolled.shape, bool(torch.allclose(rolled.sum(1), torch.ones(3)))
    (torch.Size([3, 3]), True)
    """
    return tuple(roll_out(layers) for layers in _residual_patterns(model, texts, stack))


@wrapping_models
def attention_flow(
    model: Model,
    texts: Inputs,
    *,
    outputs: Sequence[int] | None = None,
    stack: StackName | None = None,
    progress: bool = True,
) -> tuple[Float[Tensor, "_ _"], ...]:
    """Attention flow of arXiv 2005.00928: the max-flow from each output position to each input.

    Capacities are the weights of rollout. Each pair of positions is a max-flow problem, so texts
    should be short; `outputs` are the positions to follow (None: all).
    """
    by_text = [layers.double().cpu().numpy() for layers in _residual_patterns(model, texts, stack)]
    lengths = [capacities.shape[1] for capacities in by_text]
    positions = [range(length) if outputs is None else outputs for length in lengths]
    total = sum(len(own) * length for own, length in zip(positions, lengths, strict=True))
    flows = []
    with Progress("attention flow", total=total, unit="flows", enabled=progress) as bar:
        for own, length, capacities in zip(positions, lengths, by_text, strict=True):
            rows = np.zeros((len(own), length))
            for row, output in enumerate(own):
                if not 0 <= output < length:
                    problem = f"a text of {length} tokens has no position {output}"
                    raise InputError(problem, f"use 0 to {length - 1}")
                for source in range(length):
                    rows[row, source] = max_flow(capacities, output, source)
                    bar.advance()
            flows.append(torch.from_numpy(rows))
    return tuple(flows)


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


def max_flow(capacities: Float[np.ndarray, "l t t"], output: int, source: int) -> float:
    """The max-flow from `output` above the last layer down to `source` below the first.

    `capacities[l, i, j]` is the capacity from i above layer l to j below it (Dinic's algorithm).
    """
    return _Network(capacities[::-1]).flow(output, source)


class _Network:
    """Layers of nodes with capacities to the next layer, and residual capacities back."""

    def __init__(self, capacities: NDArray[np.float64]) -> None:
        self.down = capacities.copy()
        self.up = np.zeros_like(self.down).transpose(0, 2, 1).copy()
        self.depth, self.width = self.down.shape[:2]

    def flow(self, source: int, sink: int) -> float:
        total = 0.0
        while True:
            # The distance of each node from the source along free capacities; -1: unreachable.
            self.levels = np.full((self.depth + 1, self.width), -1, dtype=np.int64)
            self.levels[0, source] = 0
            step = 0
            while (ahead := self.levels == step).any():
                step += 1
                for layer in np.flatnonzero(ahead.any(1)):
                    for neighbor, table in self._neighbors(int(layer)):
                        reached = (table[ahead[layer]] > MIN_CAPACITY).any(0)
                        self.levels[neighbor, reached & (self.levels[neighbor] < 0)] = step
            if self.levels[self.depth, sink] < 0:
                return total
            self.tried = np.zeros_like(self.levels)
            while (pushed := self._push(0, source, sink, np.inf)) > 0:
                total += pushed

    def _neighbors(self, layer: int) -> list[tuple[int, NDArray[np.float64]]]:
        """The adjacent layers, each with the free capacities to it."""
        below = [(layer + 1, self.down[layer])] if layer < self.depth else []
        return below + ([(layer - 1, self.up[layer - 1])] if layer > 0 else [])

    def _push(self, layer: int, node: int, sink: int, limit: float) -> float:
        """Push flow along one shortest path from a node to the sink."""
        if layer == self.depth and node == sink:
            return limit
        level = self.levels[layer, node]
        options = self._neighbors(layer)
        # Edges already tried in this phase are exhausted.
        while self.tried[layer, node] < len(options) * self.width:
            turn, target = divmod(int(self.tried[layer, node]), self.width)
            neighbor, table = options[turn]
            free = table[node, target]
            if free > MIN_CAPACITY and self.levels[neighbor, target] == level + 1:
                pushed = self._push(neighbor, target, sink, min(limit, free))
                if pushed > 0:
                    # A view: the capacity there falls, and the one back rises.
                    table[node, target] -= pushed
                    back = self.up if neighbor > layer else self.down
                    back[min(layer, neighbor), target, node] += pushed
                    return pushed
            self.tried[layer, node] += 1
        return 0.0


def _residual_patterns(
    model: Model, texts: Inputs, stack: StackName | None
) -> list[Float[Tensor, "l _ _"]]:
    """For each text the patterns of all layers, averaged over heads, with the residual stream."""
    scope, inputs = head_scope(model, stack), read_inputs(model, texts)
    check_one_stream(scope.stack)
    for layer, config in enumerate(scope.stack.config.layers):
        if config.mixer is not None and not scope.heads_of(layer):
            name = type(config.mixer.inner).__name__
            raise InputError(
                f"layer {layer} mixes tokens by {name}, which has no pattern of weights",
                "use attribution by gradients, or a model with attention in every layer",
            )
    scope.check_patterns(scope.layers)
    sites = [scope.site(layer, Tap.PATTERN) for layer in scope.layers]
    record = Record(sites)
    with eval_mode(model), torch.no_grad():
        model.run_inputs(inputs, record)
    by_layer = [value for site in sites if isinstance(value := record[site], Patterns)]
    return [
        torch.stack([with_residual(patterns.shares(text)) for patterns in by_layer])
        for text in range(len(inputs))
    ]
