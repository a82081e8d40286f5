"""Layers that have collapsed: heads that all do the same, or tokens that all point one way."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.attention_maps.overlap import overlap
from manyheads.lens.inputs.batches import gather, lead
from manyheads.lens.inputs.cached_run import StackName, part_of
from manyheads.lens.inputs.texts import Given, climb
from manyheads.lens.results.addresses import stacks_of
from manyheads.lens.results.by_head import Tabular
from manyheads.lens.results.by_pair import ByPair
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

KIND = "collapse"


@dataclass(frozen=True, slots=True)
class LayerState:
    """How alike the heads of a layer look, and how alike the tokens after it are; None: unknown.

    `heads` is the mean overlap of each two heads' patterns, `tokens` the mean cosine of the
    residual streams of each two tokens of a text.
    """

    layer: int
    heads: float | None
    tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Collapse(Tabular):
    """The state of every layer, and which have collapsed by the two thresholds."""

    layers: tuple[LayerState, ...]
    heads_above: float
    tokens_above: float
    texts: int
    tokens: int
    complete: bool = True

    @property
    def alike(self) -> tuple[int, ...]:
        """Layers whose heads all look at the same."""
        return tuple(
            each.layer
            for each in self.layers
            if each.heads is not None and each.heads > self.heads_above
        )

    @property
    def flat(self) -> tuple[int, ...]:
        """Layers after which all tokens of a text point in one direction."""
        return tuple(
            each.layer
            for each in self.layers
            if each.tokens is not None and each.tokens > self.tokens_above
        )

    def rows(self) -> list[dict[str, Any]]:
        """One record per layer."""
        return [
            asdict(each) | {"alike": each.layer in self.alike, "flat": each.layer in self.flat}
            for each in self.layers
        ]

    def table(self) -> Any:
        """A rich table, one row per layer."""
        from rich.table import Table

        table = Table("layer", box=None, pad_edge=False, title=KIND, title_justify="left")
        for name in ("heads' overlap", "tokens' cosine", "collapsed"):
            table.add_column(name, justify="right")
        for each in self.layers:
            numbers = ["-" if x is None else f"{x:.3f}" for x in (each.heads, each.tokens)]
            table.add_row(str(each.layer), *numbers, self._said(each.layer) or "-")
        return table

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        fallen = sorted({*self.alike, *self.flat})
        yield f"{len(fallen)} of {len(self.layers)} layers have collapsed"
        for layer in fallen:
            yield f"  layer {layer}: {self._said(layer)}"

    def _said(self, layer: int) -> str:
        said = ["its heads look alike"] if layer in self.alike else []
        return ", ".join([*said, *(["its tokens point one way"] if layer in self.flat else [])])


def collapse(
    model: Model,
    texts: Any,
    *,
    heads_above: float = 0.9,
    tokens_above: float = 0.9,
    stack: StackName | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Collapse:
    """Both ways in which a layer may collapse, by layer.

    - heads: the mean over pairs of heads of the layer's pattern overlap (see `overlap`) is above
      `heads_above`: they all do the same
    - tokens: the mean over pairs of tokens of a text of the cosine of their residual streams after
      the layer is above `tokens_above`: they all point one way (rank collapse: Dong et al., arXiv
      2103.03404; the mean cosine is Ethayarajh's anisotropy, arXiv 1909.00512). A text weighs as
      much as it has pairs.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> [state.layer for state in collapse(model, [[1, 2, 3, 4], [5, 6, 7]]).layers]
    [0, 1]
    """
    for name, value in (("heads_above", heads_above), ("tokens_above", tokens_above)):
        if not -1 <= value <= 1:
            raise InputError(f"{name}={value} is no mean cosine", "use one of -1 to 1")
    part = part_of(model, stack)
    given = gather(model, texts)
    pairs = overlap(
        model,
        given,
        partners="same layer",
        stack=stack,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    found = _Directions(stacks_of(model)[part.stack_name])

    def visit(some: Given, _: list[int]) -> None:
        watcher = _Directions(found.stack)
        with torch.inference_mode():
            climb(model, some, watcher)
        found.merge(watcher)

    passed = lead(
        model, given, visit, label="reading tokens", batch_tokens=batch_tokens, progress=progress
    )
    heads, tokens = _by_layer(pairs), found.means()
    return Collapse(
        layers=tuple(
            LayerState(layer, heads.get(layer), tokens.get(layer))
            for layer in range(len(found.stack.layers))
        ),
        heads_above=heads_above,
        tokens_above=tokens_above,
        texts=passed.texts,
        tokens=passed.tokens,
        complete=passed.complete and pairs.facts["complete"],
    )


def _by_layer(pairs: ByPair) -> dict[int, float]:
    """The mean over pairs of different heads of a layer; a layer of one head has none."""
    found, start = {}, 0
    for block in pairs.blocks:
        mine = pairs.values[start : start + block.heads, start : start + block.heads]
        start += block.heads
        if block.heads > 1:
            found[block.layer] = float(mine[~np.eye(block.heads, dtype=bool)].mean())
    return found


class _Directions:
    """A watcher that adds up the cosines of each two tokens: |sum of unit vectors|^2 has them all.

    So pairs cost no more than tokens.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.cosines: dict[int, float] = {}
        self.pairs: dict[int, float] = {}

    def wants(self, site: Site) -> bool:
        mine = site.stack == self.stack.name and site.tap is Tap.AFTER
        return mine and site.sublayer is self._last(site.layer)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        each = value.values.float()
        norms = torch.linalg.vector_norm(each, dim=-1, keepdim=True)
        unit = each / norms.clamp(min=torch.finfo(torch.float32).tiny)
        owner, texts = value.lengths.sequence_of_token, len(value)
        summed = _summed(unit.double(), owner, texts)
        # A token that is nothing has no direction and makes no pair.
        count = _summed((norms > 0).double(), owner, texts).squeeze(-1)
        cosines = summed.square().sum(-1) - count
        self.cosines[site.layer] = float(cosines[count > 1].sum())
        self.pairs[site.layer] = float((count * (count - 1)).sum())

    def merge(self, other: "_Directions") -> None:
        for mine, theirs in ((self.cosines, other.cosines), (self.pairs, other.pairs)):
            for layer, value in theirs.items():
                mine[layer] = mine.get(layer, 0.0) + value

    def means(self) -> dict[int, float]:
        return {layer: self.cosines[layer] / pairs for layer, pairs in self.pairs.items() if pairs}

    def _last(self, layer: int) -> Sublayer | None:
        """The last sublayer that a layer has, or what is left of one."""
        config = self.stack.config.layers[layer]
        order: Sequence[Sublayer] = (Sublayer.FEEDFORWARD, Sublayer.CROSS, Sublayer.ATTENTION)
        for sublayer in order:
            rest = getattr(config, f"{sublayer.value}_rest", None)
            if getattr(config, sublayer.value) is not None or rest is not None:
                return sublayer
        return None


def _summed(values: Tensor, owner: Tensor, texts: int) -> Tensor:
    return values.new_zeros(texts, values.shape[1]).index_add(0, owner, values)
