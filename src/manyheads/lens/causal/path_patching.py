"""Path patching: the direct effect of one head on another, with all other heads frozen."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.attention import AttentionConfig
from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.causal.evaluate import group_by
from manyheads.lens.causal.patching import RunPair
from manyheads.lens.inputs import cached_run, metrics, texts
from manyheads.lens.results import addresses, tables
from manyheads.models.build import Model, eval_mode
from manyheads.progress import Progress
from manyheads.taps import Head, Site, Sublayer, Tap

Through = Literal["query", "key", "value"]
Base = Literal["clean", "corrupted"]

TAPS: dict[Through, Tap] = {"query": Tap.QUERY, "key": Tap.KEY, "value": Tap.VALUE}


@wrapping_models
def patch_paths(
    model: Model,
    clean: texts.Inputs,
    corrupted: texts.Inputs,
    metric: metrics.Metric = "loss",
    *,
    receivers: addresses.Heads,
    through: Through = "query",
    senders: addresses.Heads = "all",
    base: Base = "clean",
    feedforward: Literal["free", "frozen"] = "free",
    targets: texts.Targets | None = None,
    stack: cached_run.StackName | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> tables.ByHead:
    """Path patching of arXiv 2211.00593, from each sender to the receivers taken together.

    In the base run the sender's output is that of the other run, all other heads are frozen, and
    the receivers' inputs (their queries, keys or values; or the logits) are recorded. A second base
    run gets these inputs. "effect" is how far the metric moves from the base run to the other one.
    Feed-forwards pass changes on unless frozen. Heads that share keys or values are patched
    together. `receivers` are heads or "logits"; they and the senders are of one stack and sublayer.
    """
    senders = addresses.head_names(senders)
    ends = () if receivers == "logits" else addresses.head_names(receivers)
    scope = cached_run.head_scope(model, stack, heads=(*ends, *senders))
    sending = scope.find(senders)
    receiving = None if receivers == "logits" else scope.find(ends)
    if through not in TAPS:
        raise InputError(f"through must be query, key or value, got {through!r}", "use one of them")
    with eval_mode(model), torch.no_grad():
        keep = frozen_sites(scope)
        runs = RunPair.of(
            scope, clean, corrupted, metric, targets, keep=keep, batch_tokens=batch_tokens
        )
        paths = PathRuns(runs, receiving, through, base, feedforward == "frozen")
        return paths.measure(sending, progress)


class PathRuns:
    """The runs that measure paths from heads to receivers taken together."""

    def __init__(
        self,
        runs: RunPair,
        receivers: tuple[Head, ...] | None,
        through: Through,
        base: Base,
        frozen: bool,
    ) -> None:
        self.runs, self.receivers, self.through, self.base = runs, receivers, through, base
        self.scope, self.frozen = runs.scope, frozen
        ends = (runs.clean, runs.corrupted)
        self.base_run, self.other_run = ends if base == "clean" else ends[::-1]

    def measure(self, senders: Sequence[Head], progress: bool) -> tables.ByHead:
        indices = {head: index for index, head in enumerate(self.scope.heads)}
        columns = np.full((2, len(indices)), np.nan)
        complete, layer = True, attrgetter("layer")
        with Progress("patching paths", total=len(senders), unit="heads", enabled=progress) as bar:
            try:
                for group in group_by(layer, sorted(senders, key=layer), self.runs.copies):
                    for head, values in zip(group, self.run(group), strict=True):
                        columns[:, indices[head]] = self.runs.recovered(values, self.base)
                    bar.advance(len(group))
            except KeyboardInterrupt:
                if np.isnan(columns).all():
                    raise
                complete = False
        return tables.ByHead(
            kind="path patching",
            blocks=self.scope.blocks,
            means={"effect": columns[0]},
            errors={"effect": columns[1]},
            metadata={
                "receivers": "logits" if self.receivers is None else list(map(str, self.receivers)),
                "through": self.through,
                "base": self.base,
                "complete": complete,
            },
        )

    def run(self, senders: list[Head]) -> Float[Tensor, "copies b"]:
        """The metric of each text for each sender; all senders are of one layer."""
        copies, layer = len(senders), senders[0].layer
        receivers = [head for head in self.receivers or () if head.layer > layer]
        if self.receivers is not None and not receivers:
            # No receiver is above the senders: nothing changes.
            return self.runs.bound_metric(self.base_run.hidden).expand(copies, -1).double().cpu()
        tap = TAPS[self.through]
        sites = [self.scope.site(above, tap) for above in {head.layer for head in receivers}]
        sent = cached_run.ActivationEditor(self._send(senders), sites)
        hidden = self.base_run.resume(layer, sent, copies)
        if self.receivers is not None:
            received = {site: self._receive(site, receivers, sent[site].values) for site in sites}
            lowest = min(head.layer for head in receivers)
            hidden = self.base_run.resume(lowest, cached_run.ActivationEditor(received), copies)
        return self.runs.bound_metric(hidden, copies).double().cpu()

    def _send(self, senders: list[Head]) -> dict[Site, cached_run.EditFunction]:
        """Freeze all heads from the senders' layer up, and take each sender from the other run."""
        layer = senders[0].layer
        changes: dict[Site, cached_run.EditFunction] = {}
        for site in frozen_sites(self.scope):
            is_head = site.tap is Tap.HEAD_OUTPUT
            if site.layer < layer or not (is_head or self.frozen):
                continue
            values = self.base_run[site].values
            copies = values.expand(len(senders), *values.shape)
            if site == self.scope.site(layer, Tap.HEAD_OUTPUT):
                copies = copies.clone()
                for copy, head in zip(copies, senders, strict=True):
                    copy[:, head.head] = self.other_run[site].values[:, head.head]
            changes[site] = cached_run.replace_by(copies.flatten(0, 1))
        return changes

    def _receive(
        self, site: Site, receivers: list[Head], received: Tensor
    ) -> cached_run.EditFunction:
        config = self.scope.module(site.layer).config
        # The heads of a mixer have keys and values of their own at these sites.
        whole = self.through == "query" or not isinstance(config, AttentionConfig)
        owners = range(config.heads) if whole else config.owners
        heads = sorted({owners[head.head] for head in receivers if head.layer == site.layer})

        def change(values: Tensor) -> Tensor:
            values = values.clone()
            values[:, heads] = received[:, heads]
            return values

        return change


def frozen_sites(scope: cached_run.HeadScope) -> list[Site]:
    """The outputs of all heads and feed-forwards of the stack."""
    sites = []
    for layer, config in enumerate(scope.stack.config.layers):
        for sublayer in config.branches:
            heads = sublayer is not Sublayer.FEEDFORWARD and addresses.heads_in(config, sublayer)
            tap = Tap.HEAD_OUTPUT if heads else Tap.OUTPUT
            sites.append(Site(layer, tap, sublayer, scope.stack_name))
    return sites
