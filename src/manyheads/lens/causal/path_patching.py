"""Path patching: what one head tells another directly, all other heads held still."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.causal.ablation import HeadNames
from manyheads.lens.causal.patching import Runs
from manyheads.lens.inputs.cached_run import Change, Edits, Part, StackName, find_heads, part_of
from manyheads.lens.inputs.metrics import Metric
from manyheads.lens.inputs.texts import Targets, read
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.by_head import ByHead
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.progress import Progress
from manyheads.taps import Head, Site, Sublayer, Tap

Through = Literal["query", "key", "value"]
Base = Literal["clean", "corrupted"]

TAPS: dict[Through, Tap] = {"query": Tap.QUERY, "key": Tap.KEY, "value": Tap.VALUE}


def patch_paths(
    model: Model,
    clean: Any,
    corrupted: Any,
    metric: Metric = "loss",
    *,
    receivers: Sequence[Head | Address | str] | Literal["logits"],
    through: Through = "query",
    senders: HeadNames = "all",
    base: Base = "clean",
    feedforward: Literal["free", "frozen"] = "free",
    targets: Targets | None = None,
    stack: StackName | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> ByHead:
    """Path patching of arXiv 2211.00593, from each sender to the receivers taken together.

    In the base run the sender speaks as in the other run, every other head as before, and only what
    reaches the receivers (their queries, keys or values; or the logits) is kept. A second run of
    the base gets just that. "share" is how far the metric goes from the base to the other run.
    Feed-forwards pass changes on, unless frozen. Heads that share keys or values get them together.
    """
    part = part_of(model, stack)
    speaks = find_heads(part, senders)
    hears = None if receivers == "logits" else find_heads(part, receivers)
    if through not in TAPS:
        raise InputError(f"through={through!r} is no way in", 'use "query", "key" or "value"')
    with resting(model), torch.no_grad():
        runs = Runs.of(
            part,
            read(model, clean),
            read(model, corrupted),
            metric,
            targets,
            keep=_frozen_sites(part),
            batch_tokens=batch_tokens,
        )
        paths = _Paths(runs, hears, through, base, feedforward == "frozen")
        return paths.measure(speaks, progress)


class _Paths:
    def __init__(
        self,
        runs: Runs,
        receivers: tuple[Head, ...] | None,
        through: Through,
        base: Base,
        frozen: bool,
    ) -> None:
        self.runs, self.receivers, self.through, self.base = runs, receivers, through, base
        self.part, self.frozen = runs.part, frozen
        ends = (runs.clean, runs.corrupted)
        self.here, self.other = ends if base == "clean" else ends[::-1]

    def measure(self, senders: Sequence[Head], progress: bool) -> ByHead:
        places = {head: place for place, head in enumerate(self.part.heads)}
        columns = np.full((2, len(places)), np.nan)
        complete = True
        with Progress("patching paths", total=len(senders), unit="heads", enabled=progress) as bar:
            try:
                for group in self._groups(senders):
                    for head, values in zip(group, self._run(group), strict=True):
                        columns[:, places[head]] = self.runs.share(values, self.base)
                    bar.advance(len(group))
            except KeyboardInterrupt:
                if np.isnan(columns).all():
                    raise
                complete = False
        return ByHead(
            kind="path patching",
            blocks=self.part.blocks,
            means={"share": columns[0]},
            errors={"share": columns[1]},
            facts={
                "receivers": "logits" if self.receivers is None else list(map(str, self.receivers)),
                "through": self.through,
                "base": self.base,
                "complete": complete,
            },
        )

    def _groups(self, senders: Sequence[Head]) -> list[list[Head]]:
        """Senders of one layer, so many side by side."""
        groups = []
        for layer in sorted({head.layer for head in senders}):
            mine = [head for head in senders if head.layer == layer]
            step = self.runs.copies
            groups += [mine[start : start + step] for start in range(0, len(mine), step)]
        return groups

    def _run(self, senders: list[Head]) -> Float[Tensor, "copies b"]:
        copies, layer = len(senders), senders[0].layer
        hears = self._above(layer)
        if self.receivers is not None and not hears:
            # Nobody listens above: the base stays as it is.
            return self.runs.judged(self.here.hidden).expand(copies, -1).double().cpu()
        kept = [self.part.site(at, TAPS[self.through]) for at in {head.layer for head in hears}]
        spoken = Edits(self._speaking(senders), kept)
        hidden = self.here.resume(layer, spoken, copies)
        if self.receivers is not None:
            heard = {site: self._hearing(site, hears, spoken[site].values) for site in kept}
            lowest = min(head.layer for head in hears)
            hidden = self.here.resume(lowest, Edits(heard), copies)
        return self.runs.judged(hidden, copies).double().cpu()

    def _above(self, layer: int) -> list[Head]:
        return [head for head in self.receivers or () if head.layer > layer]

    def _speaking(self, senders: list[Head]) -> dict[Site, Change]:
        """Every head from the senders' layer up as in the base, each sender as in the other run."""
        layer = senders[0].layer
        changes: dict[Site, Change] = {}
        for site in _frozen_sites(self.part):
            is_head = site.tap is Tap.HEAD_OUTPUT
            if site.layer < layer or not (is_head or self.frozen):
                continue
            values = self.here[site].values
            copies = values.expand(len(senders), *values.shape)
            if site == self.part.site(layer, Tap.HEAD_OUTPUT):
                copies = copies.clone()
                for copy, head in zip(copies, senders, strict=True):
                    copy[:, head.head] = self.other[site].values[:, head.head]
            changes[site] = _always(copies.flatten(0, 1))
        return changes

    def _hearing(self, site: Site, receivers: list[Head], heard: Tensor) -> Change:
        config = self.part.attention(site.layer).config
        places = range(config.heads) if self.through == "query" else config.owners
        mine = sorted({places[head.head] for head in receivers if head.layer == site.layer})

        def change(values: Tensor) -> Tensor:
            values = values.clone()
            values[:, mine] = heard[:, mine]
            return values

        return change


def _always(values: Tensor) -> Change:
    return lambda _: values


def _frozen_sites(part: Part) -> list[Site]:
    """What every attention and feed-forward of the stack says."""
    found = []
    for layer, config in enumerate(part.stack.config.layers):
        for sublayer, branch in (
            (Sublayer.ATTENTION, config.attention),
            (Sublayer.CROSS, config.cross),
        ):
            if branch is not None:
                found.append(Site(layer, Tap.HEAD_OUTPUT, sublayer, part.stack_name))
        if config.feedforward is not None:
            found.append(Site(layer, Tap.OUTPUT, Sublayer.FEEDFORWARD, part.stack_name))
    return found
