"""Patching: one part of a clean run put into a corrupted one, to see how much it brings back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.causal.evaluate import ROOM_ON_CPU, ROOM_ON_CUDA
from manyheads.lens.inputs.cached_run import Change, Edits, Part, StackName, Trunk, entry, part_of
from manyheads.lens.inputs.metrics import Judge, Metric, judge, weighed
from manyheads.lens.inputs.texts import Given, Targets, read
from manyheads.lens.results.by_head import ByHead, Tabular
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.progress import Progress
from manyheads.ragged import Lengths
from manyheads.taps import Head, Site, Sublayer, Tap

Spot = Literal["head", "residual", "attention", "cross", "feedforward"]
Each = Literal["all", "each"]


@dataclass(frozen=True, slots=True)
class Patch:
    """What is taken from the clean run: a spot of a layer, of one head or one position or all."""

    spot: Spot
    layer: int
    head: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        where = str(Head(self.layer, self.head)) if self.head is not None else f"L{self.layer}"
        at = "" if self.position is None else f" at {self.position}"
        return f"{self.spot} {where}{at}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Patching(Tabular):
    """(metric - corrupted) / (clean - corrupted) by patch: 1 where it brings back all.

    `errors` are standard errors over texts of that share's numerator, in the same unit.
    """

    clean: float
    corrupted: float
    shares: dict[Patch, float]
    errors: dict[Patch, float] = field(default_factory=dict)
    complete: bool = True

    def __getitem__(self, wanted: Patch) -> float:
        return self.shares[wanted]

    def ranked(self, top_k: int | None = None) -> list[tuple[Patch, float]]:
        """Patches by what they bring back, most first."""
        return sorted(self.shares.items(), key=lambda pair: -pair[1])[:top_k]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "spot": patch.spot,
                "layer": patch.layer,
                "head": patch.head,
                "position": patch.position,
                "share": share,
                "share_error": self.errors.get(patch, float("nan")),
            }
            for patch, share in self.shares.items()
        ]

    def __str__(self) -> str:
        lines = [f"clean {self.clean:.4f}, corrupted {self.corrupted:.4f}; most is brought back by"]
        return "\n".join(lines + [f"  {patch}  {share:.3f}" for patch, share in self.ranked(10)])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Runs:
    """A clean and a corrupted run of the same lengths, and the metric of each text in both."""

    part: Part
    clean: Trunk
    corrupted: Trunk
    judged: Judge
    ends: tuple[Float[Tensor, " b"], Float[Tensor, " b"]]
    batch_tokens: int

    @classmethod
    def of(
        cls,
        part: Part,
        clean: Given,
        corrupted: Given,
        metric: Metric,
        targets: Targets | None = None,
        *,
        keep: Sequence[Site] = (),
        batch_tokens: int | None = None,
    ) -> "Runs":
        model = part.model
        if clean.sizes(model) != corrupted.sizes(model) or len(clean) != len(corrupted):
            raise InputError(
                f"clean texts have {clean.sizes(model)} tokens and corrupted ones "
                f"{corrupted.sizes(model)}",
                "corrupt token by token, so that positions keep their meaning",
            )
        if batch_tokens is None:
            on_cuda = next(model.parameters()).is_cuda
            batch_tokens = ROOM_ON_CUDA if on_cuda else ROOM_ON_CPU
        layers = range(len(part.stack.layers))
        sites = [*keep, *(site for layer in layers for site in _sites(part, layer).values())]
        judged = judge(model, clean, range(len(clean)), metric, targets)
        good, bad = (Trunk(part, each, layers=layers, keep=sites) for each in (clean, corrupted))
        ends = judged(good.hidden)[0].double().cpu(), judged(bad.hidden)[0].double().cpu()
        return cls(
            part=part,
            clean=good,
            corrupted=bad,
            judged=judged,
            ends=ends,
            batch_tokens=batch_tokens,
        )

    def share(
        self, values: Float[Tensor, " b"], base: Literal["corrupted", "clean"] = "corrupted"
    ) -> tuple[float, float]:
        """How much of the way from the base to the other end the metric has gone, and its error."""
        clean, corrupted = self.ends
        start, end = (corrupted, clean) if base == "corrupted" else (clean, corrupted)
        weights = self.judged.weights.double().cpu()
        whole = weighed(end - start, weights)[0]
        gone, error = weighed(values - start, weights)
        return float(gone / whole), float((error / whole).abs())

    @property
    def lengths(self) -> Lengths:
        return self.corrupted[entry(self.part.stack, self.part.layers[0])].lengths

    @property
    def copies(self) -> int:
        return max(1, self.batch_tokens // max(1, self.lengths.total))


def patch(
    model: Model,
    clean: Any,
    corrupted: Any,
    metric: Metric = "loss",
    *,
    spots: Sequence[Spot] = ("head",),
    positions: Each = "all",
    targets: Targets | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Patching:
    """Activation patching: each spot of each layer alone, at all positions or at each.

    "head" is a head's output, "attention", "cross" and "feedforward" what the sublayer adds to the
    residual stream, and "residual" the stream itself as it enters a layer. Texts, metric and
    targets are those of the clean run. Ctrl-C keeps what was measured.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> found = patch(model, [[1, 2, 3]], [[4, 2, 3]], spots=("residual",), positions="each")
    >>> round(found[Patch("residual", layer=0, position=0)], 5)
    1.0
    """
    part = part_of(model, stack, sublayer)
    with resting(model), torch.no_grad():
        runs = Runs.of(
            part,
            read(model, clean),
            read(model, corrupted),
            metric,
            targets,
            batch_tokens=batch_tokens,
        )
        _check_ends(runs)
        wanted = list(_patches(runs, spots, positions))
        return _measure(runs, wanted, progress)


def patch_heads(found: Patching, part: Part) -> ByHead:
    """The shares of whole heads as values by head."""
    shares = [found.shares.get(Patch("head", head.layer, head.head)) for head in part.heads]
    values = np.array([np.nan if each is None else each for each in shares])
    return ByHead(kind="patching", blocks=part.blocks, means={"share": values})


def _measure(runs: Runs, wanted: list[Patch], progress: bool) -> Patching:
    clean, corrupted = runs.ends
    weights = runs.judged.weights.double().cpu()
    shares, errors, complete = {}, {}, True
    with Progress("patching", total=len(wanted), unit="patches", enabled=progress) as bar:
        try:
            for group in _groups(wanted, runs.copies):
                values = _run(runs, group).double().cpu()
                for each, one in zip(group, values, strict=True):
                    shares[each], errors[each] = runs.share(one)
                bar.advance(len(group))
        except KeyboardInterrupt:
            if not shares:
                raise
            complete = False
    return Patching(
        clean=float(weighed(clean, weights)[0]),
        corrupted=float(weighed(corrupted, weights)[0]),
        shares=shares,
        errors=errors,
        complete=complete,
    )


def _run(runs: Runs, group: list[Patch]) -> Float[Tensor, "copies b"]:
    """Patches of one spot of one layer, each in a copy of the corrupted batch."""
    spot, layer = group[0].spot, group[0].layer
    site = _sites(runs.part, layer)[spot]
    good = runs.clean[site].values
    change = _put(group, good, runs.lengths)
    hidden = runs.corrupted.resume(layer, Edits({site: change}), len(group))
    return runs.judged(hidden, len(group))


def _put(group: list[Patch], good: Float[Tensor, "n *rest"], lengths: Lengths) -> Change:
    def change(values: Tensor) -> Tensor:
        copies = values.unflatten(0, (len(group), -1)).clone()
        for copy, each in zip(copies, group, strict=True):
            rows = _rows(lengths, each.position)
            if each.head is None:
                copy[rows] = good[rows]
            else:
                copy[rows, each.head] = good[rows, each.head]
        return copies.flatten(0, 1)

    return change


def _rows(lengths: Lengths, position: int | None) -> Bool[Tensor, " n"]:
    if position is None:
        return torch.ones_like(lengths.positions, dtype=torch.bool)
    return lengths.positions == position


def _sites(part: Part, layer: int) -> dict[Spot, Site]:
    """Where the spots of a layer are seen; a sublayer it lacks has none."""
    config, name = part.stack.config.layers[layer], part.stack_name
    found: dict[Spot, Site] = {"residual": entry(part.stack, layer)}
    if part.config(layer) is not None:
        found["head"] = part.site(layer, Tap.HEAD_OUTPUT)
    if config.attention is not None:
        found["attention"] = Site(layer, Tap.OUTPUT, Sublayer.ATTENTION, name)
    if config.cross is not None:
        found["cross"] = Site(layer, Tap.OUTPUT, Sublayer.CROSS, name)
    if config.feedforward is not None:
        found["feedforward"] = Site(layer, Tap.OUTPUT, Sublayer.FEEDFORWARD, name)
    return found


def _patches(runs: Runs, spots: Sequence[Spot], positions: Each) -> Iterator[Patch]:
    places: list[int | None] = [None]
    if positions == "each":
        places = list(range(runs.lengths.longest))
    for spot in spots:
        layers = [
            layer
            for layer in range(len(runs.part.stack.layers))
            if spot in _sites(runs.part, layer)
        ]
        if not layers:
            raise InputError(
                f"no layer has {spot!r} to patch",
                'use "head", "residual", "attention", "cross" or "feedforward", as the model has',
            )
        for layer in layers:
            heads: list[int | None] = [None]
            if spot == "head":
                heads = list(range(runs.part.attention(layer).config.heads))
            yield from (Patch(spot, layer, head, at) for head in heads for at in places)


def _groups(wanted: list[Patch], copies: int) -> Iterator[list[Patch]]:
    group: list[Patch] = []
    for each in wanted:
        same = not group or (group[0].spot, group[0].layer) == (each.spot, each.layer)
        if group and (not same or len(group) == copies):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _check_ends(runs: Runs) -> None:
    clean, corrupted = runs.ends
    if torch.equal(clean, corrupted):
        raise InputError(
            f"the metric is the same clean and corrupted, {float(clean.mean()):.4g}",
            "corrupt something that the answer depends on",
        )
