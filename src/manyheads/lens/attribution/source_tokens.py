"""Routes of a prediction: what each head adds to a logit, divided among the tokens it reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.attention import Attention
from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.kernels import reference
from manyheads.kernels.contract import Request
from manyheads.lens.attribution import direct_logits
from manyheads.lens.attribution.stream_parts import frozen_norm
from manyheads.lens.causal import attention_links
from manyheads.lens.inputs import cached_run
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.results import addresses, files
from manyheads.models.build import Model
from manyheads.parts import norms
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Tap


@dataclass(frozen=True, slots=True)
class TokenRoute:
    """What a head adds to the logit by reading one token, and its attention weight there."""

    head: addresses.Address
    token: int
    value: float
    weight: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenRoutes(files.Result):
    """What each head adds to the logit of one text, by the token that it reads.

    A row of `values` and the head's `rest` sum to what the head adds in `direct`. The rest is not
    read from tokens: biases of head norms, additive gates, outputs that were edited, and all of a
    mixer's head. `weights` are those of attention, averaged where a model reads several positions.
    """

    direct: direct_logits.DirectLogits
    values: Float[Tensor, "heads s"]
    weights: Float[Tensor, "heads s"]
    rest: Float[Tensor, " heads"]

    @property
    def heads(self) -> tuple[addresses.Address, ...]:
        return self.direct.heads.addresses

    def ranked(self, top_k: int | None = None) -> list[TokenRoute]:
        """Routes by the absolute value of what they add, largest first."""
        tokens, flat = self.values.shape[1], self.values.flatten()
        count = len(flat) if top_k is None else min(top_k, len(flat))
        return [
            TokenRoute(
                self.heads[index // tokens],
                index % tokens,
                float(flat[index]),
                float(self.weights.flatten()[index]),
            )
            for index in flat.abs().topk(count).indices.tolist()
        ]

    def __str__(self) -> str:
        logit = float(self.direct.logits[0])
        routes = (f"  {route.token} → {route.head}  {route.value:+.4f}" for route in self.ranked(5))
        return "\n".join((f"logit {logit:.4f}; its strongest routes from tokens:", *routes))

    __repr__ = __str__


@wrapping_models
def token_routes(
    model: Model,
    text: Inputs,
    answer: int | None = None,
    distractor: int | None = None,
    *,
    at: int | Literal["last"] = "last",
    edits: Mapping[Site, cached_run.EditFunction] | None = None,
    links: Sequence[Any] = (),
) -> TokenRoutes:
    """Divide what each head adds to a logit among the tokens that it reads.

    The direct effect of a token through a head is its attention weight times its value, projected
    by the head's output weights onto the direction of the logit; norms and gates are frozen, as in
    `attribute_logits`, whose result is part of this one. `edits` change activations of the run,
    and `links` are cut as `lens.cut` does it.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> routes = token_routes(model, [[1, 2, 3]])
    >>> bool((routes.values.sum(1) - routes.direct.by_head[0]).abs().max() < 1e-5)
    True
    """
    inputs = read_inputs(model, text)
    if inputs.source is not None or len(inputs) != 1:
        raise InputError(
            "routes are traced in one text, of a model with one stack of layers", "pass one text"
        )
    resolved = attention_links.read_links(model, links, 1) if links else ()
    recorder: list[_RouteRecorder] = []

    def record(sites: list[Site]) -> _RouteRecorder:
        recorder.append(_RouteRecorder(model, edits or {}, sites, resolved))
        return recorder[0]

    walk = direct_logits.walk_back(
        model,
        inputs,
        None if answer is None else [answer],
        None if distractor is None else [distractor],
        at=at if isinstance(at, str) else [at],
        recorder=record,
    )
    direct, values, weights = walk.result(), [], []
    with torch.no_grad():
        for block in direct.heads.blocks:
            by_token = recorder[0].routes(walk, block)
            values.append(by_token[0].cpu())
            weights.append(by_token[1].cpu())
    joined = torch.cat(values)
    return TokenRoutes(
        direct=direct,
        values=joined,
        weights=torch.cat(weights),
        rest=direct.by_head[0] - joined.sum(1),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """The queries, keys and values of one attention, as its kernel received them."""

    inputs: dict[Tap, Tensor]
    request: Request


class _RouteRecorder(cached_run.ActivationEditor):
    """Records what the walk needs and what heads read; cuts links and edits activations."""

    def __init__(
        self,
        model: Model,
        edits: Mapping[Site, cached_run.EditFunction],
        sites: list[Site],
        links: Sequence[attention_links.Link],
    ) -> None:
        self.scope = cached_run.head_scope(model)
        super().__init__(edits, [*sites, *self._sites_within()])
        self.cutter = attention_links.LinkCutter(model, links, range(1), renormalize=True)
        self.readings: dict[int, _Reading] = {}
        self.changed: dict[int, Tensor] = {}
        self._inputs: dict[Tap, Ragged] = {}

    def _sites_within(self) -> Iterator[Site]:
        """Where norms and gates change what a head mixed before it is projected."""
        for layer in self.scope.layers:
            config = self.scope.config(layer)
            if config is None or not self.scope.model.native:
                continue
            if not isinstance(config.output_norm, norms.NoNorm):
                yield self.scope.site(layer, Tap.MIXED)
            if any(gate.at == "output" for gate in config.gates):
                yield self.scope.site(layer, Tap.GATE_OUTPUT)

    def _reads(self, site: Site) -> bool:
        if site.tap not in attention_links.INPUTS:
            return False
        own = site == self.scope.site(site.layer, site.tap)
        return own and self.scope.config(site.layer) is not None

    def wants(self, site: Site) -> bool:
        return super().wants(site) or self._reads(site) or self.cutter.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns:
        assert isinstance(value, Ragged), "patterns are not watched"
        if self._reads(site):
            self._inputs[site.tap] = value
            if len(self._inputs) == len(attention_links.INPUTS):
                query, key = (self._inputs[tap] for tap in (Tap.QUERY, Tap.KEY))
                request = attention_links.full_request(self.scope.stack, site, query, key)
                tensors = {tap: ragged.values for tap, ragged in self._inputs.items()}
                self.readings[site.layer] = _Reading(tensors, request)
                self._inputs = {}
        before = value
        if self.cutter.wants(site):
            value = self.cutter.see(site, value) or value
        edited = super().see(site, value)
        if site.tap is Tap.HEAD_OUTPUT and site in self.edits:
            assert isinstance(edited, Ragged)
            self.changed[site.layer] = edited.values != before.values
        return edited

    def routes(
        self, walk: direct_logits.BackwardWalk, block: addresses.Block
    ) -> tuple[Float[Tensor, "h s"], Float[Tensor, "h s"]]:
        """What the heads of a block add by reading each token, and their weights."""
        directions, places = walk.directions[block], walk.rows.places
        tokens = walk.record[Site(-1, Tap.FINAL, stack=block.stack)].lengths.total
        values = directions.new_zeros(block.heads, tokens)
        weights = torch.zeros_like(values)
        reading = self.readings.get(block.layer)
        if reading is None or block.sublayer is not self.scope.sublayer:
            return values, weights
        site, request = self.scope.site(block.layer, Tap.MIXED), reading.request
        query, key, value = (reading.inputs[tap] for tap in attention_links.INPUTS)
        towards = self._before_norms(walk, block, directions)
        removals = self.cutter.removals(site, request)
        read = reference.per_query_head(value, query.shape[1], request).double()
        for place, own in zip(places.tolist(), towards, strict=True):
            removed = torch.zeros(block.heads, tokens, dtype=torch.bool, device=query.device)
            for head, cut_key in removals.get((0, place), ()):
                removed[head, cut_key] = True
            seen = reference.weights_without(
                query, key, request, (0, place), removed, renormalize=True
            ).double()
            values += seen * torch.einsum("shd,hd->hs", read, own)
            weights += seen / len(places)
        if block.layer in self.changed:
            # The output of an edited head does not come from what it reads.
            edited = self.changed[block.layer][places].any(-1).any(0)
            values[edited] = 0.0
        return values, weights

    def _before_norms(
        self,
        walk: direct_logits.BackwardWalk,
        block: addresses.Block,
        directions: Float[Tensor, "m h d"],
    ) -> Float[Tensor, "m h d"]:
        """Directions for what the heads mix, in front of their gates, scales and norms."""
        if not self.scope.model.native:
            return directions
        attention = self.scope.attention(block.layer)
        assert isinstance(attention, Attention), "mixers have no readings"
        for gate in attention.config.gates:
            if gate.at == "output" and gate.operation == "multiply":
                opened = self[self.scope.site(block.layer, Tap.GATE_OUTPUT)].values
                directions = directions * opened[walk.rows.places].double()
        if attention.head_scale is not None:
            directions = directions * attention.head_scale.double()[:, None]
        norm = attention.output_norm
        if isinstance(norm, norms.Normalize):
            mixed = self[self.scope.site(block.layer, Tap.MIXED)].values[walk.rows.places].double()
            rows = frozen_norm(norm, mixed.flatten(0, 1)).pull(directions.flatten(0, 1))
            directions = rows.unflatten(0, directions.shape[:2])
        return directions
