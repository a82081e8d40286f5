"""Texts whose last token alone is computed again, with other activations, by the cached keys."""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.cache import DynamicCache
from manyheads.lens.inputs import cached_run
from manyheads.models import decoder
from manyheads.models.model_interface import ModelInputs
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Patterns, Site, Tap


def last_rows(lengths: Lengths) -> Tensor:
    """Where the last token of each sequence is in the packed batch."""
    return lengths.offsets[1:].long() - 1


class LastTokenRecord:
    """A watcher that records the last token of each sequence at some sites."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = set(sites)
        self.recorded: dict[Site, Tensor] = {}

    def wants(self, site: Site) -> bool:
        return site in self._sites

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "patterns are not recorded here"
        self.recorded[site] = value.values[last_rows(value.lengths)]


class LastTokenRuns:
    """One batch of texts; `run` computes its last tokens again from any layer on.

    In a causal model a change at the last token leaves all others as they are, so that native
    decoders run that token alone. Wrapped models, and those with mixers, run the whole texts.
    """

    def __init__(self, scope: cached_run.HeadScope, inputs: ModelInputs) -> None:
        self.scope, model, stack = scope, scope.model, scope.stack
        layers = range(len(stack.layers))
        self._final = Site(-1, Tap.FINAL, stack=model.readout_stack)
        self._entries = {layer: cached_run.entry_sites(stack, layer) for layer in layers}
        sites = [self._final, *(site for entry in self._entries.values() for site in entry)]
        sites += [scope.site(layer, Tap.HEAD_OUTPUT) for layer in scope.layers]
        record = LastTokenRecord(sites)
        self._cached: cached_run.CachedRun | None = None
        if decodes_last_token(scope):
            assert isinstance(model, decoder.Decoder)
            assert inputs.ids is not None
            self._cache = model.new_cache(DynamicCache(ring_buffers=False))
            plan = self._cache.plan(inputs.ids.lengths)
            x = model.embedding.embed(inputs.ids, plan.positions)
            stack(x, positions=plan.positions, cache=self._cache, plan=plan, watch=record)
            # The last tokens are not seen yet: every run writes their keys again.
            self._cache.seen = tuple(length - 1 for length in inputs.ids.lengths.each)
            self._single = Lengths.of([1] * len(inputs), inputs.ids.device)
        else:
            self._cached = cached_run.CachedRun(scope, inputs, layers=layers)
            for site in sites:
                record.see(site, self._cached[site])
        self._record = record.recorded

    @property
    def hidden(self) -> Float[Tensor, "b c"]:
        """The input of the readout at the last tokens."""
        return self._record[self._final]

    def head_outputs(self, layer: int) -> Float[Tensor, "b h d"]:
        return self._record[self.scope.site(layer, Tap.HEAD_OUTPUT)]

    def run(
        self,
        layer: int,
        edits: Mapping[Site, cached_run.EditFunction] | None = None,
        added: Float[Tensor, "b c"] | None = None,
    ) -> Float[Tensor, "b c"]:
        """The input of the readout when the last tokens run from a layer on with edits.

        `added` is added to the residual stream that enters the layer.
        """
        if self._cached is not None:
            return self._run_texts(self._cached, layer, edits or {}, added)
        x = torch.cat([self._record[site] for site in self._entries[layer]], dim=-1)
        x = x if added is None else x + added.to(x.dtype)
        final, _ = self.scope.stack.resume(
            Ragged(x, self._single),
            layer,
            cache=self._cache,
            plan=self._cache.plan(self._single),
            watch=cached_run.ActivationEditor(edits or {}),
        )
        return final.values

    def _run_texts(
        self,
        cached: cached_run.CachedRun,
        layer: int,
        edits: Mapping[Site, cached_run.EditFunction],
        added: Tensor | None,
    ) -> Float[Tensor, "b c"]:
        entering = cached.entering(layer)
        rows = last_rows(entering.lengths)

        def at_last(edit: cached_run.EditFunction) -> cached_run.EditFunction:
            return lambda values: values.index_copy(0, rows, edit(values[rows]))

        if added is not None:
            values = entering.values.index_add(0, rows, added.to(entering.values.dtype))
            entering = entering.with_values(values)
        editor = cached_run.ActivationEditor({site: at_last(edit) for site, edit in edits.items()})
        return cached.continue_from(entering, layer, editor).values[rows]


def decodes_last_token(scope: cached_run.HeadScope) -> bool:
    """Whether the model can run one more token by the keys of those before it."""
    model = scope.model
    if not isinstance(model, decoder.Decoder) or not model.native:
        return False
    config = model.config.stack
    # The state of a mixer moves on with each token and is not set back.
    return config.halting is None and all(
        layer.mixer is None and layer.convolution is None for layer in config.layers
    )
