"""The requests that a studio answers, one method each; all of them run on one thread."""

import time
from dataclasses import asdict, replace
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor

from manyheads.decoding.generation_config import GenerationConfig
from manyheads.decoding.sampling import Greedy, Sample
from manyheads.errors import InputError
from manyheads.lens.causal.attention_links import read_links
from manyheads.lens.causal.patching import patch
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.inputs.cached_run import EditFunction
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.lens.measure.statistics import statistics
from manyheads.lens.results.addresses import heads_in
from manyheads.lens.results.measure_names import describe_measure
from manyheads.progress import Progress, listening
from manyheads.studio import explain, views
from manyheads.studio.generation import WatchedGeneration
from manyheads.studio.models import LoadedModel, ModelStore, StudioInput
from manyheads.studio.requests import LIMITS, HeadEdits, RequestBody
from manyheads.studio.run_cache import IsCancelled, RunCache, TracedRun, trace_run
from manyheads.studio.worth import HeadWorth
from manyheads.taps import Site, Sublayer, Tap

MAX_CACHED_STATISTICS = 16
# The fields of every request about one text or image.
INPUT = ("model", "text", "image", "edits")


class Handlers:
    """Answers requests with the models of a store and a cache of recent runs.

    Every request names its model and carries its text: the server keeps no state of a page, so any
    number of pages can be open, and a closed one leaves nothing behind.
    """

    def __init__(self, store: ModelStore) -> None:
        self.store = store
        self.cache = RunCache(LIMITS.cache_bytes)
        self._statistics: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._kinds: dict[str, dict[str, Any]] = {}
        self._measuring: dict[str, Any] = {}

    def models(self) -> dict[str, Any]:
        return {
            "models": [loaded.describe() for loaded in self.store.models.values()],
            "limits": {
                "max_new_tokens": LIMITS.max_new_tokens,
                "temperature": LIMITS.temperature,
                "patching_tokens": LIMITS.patching_tokens,
            },
        }

    def tokens(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """The tokens of a text."""
        loaded, text = self._open(body, *INPUT)
        run = self._run(loaded, text, body.edits(loaded.model), cancelled)
        return views.tokens(loaded, text, run)

    def token_count(self, body: RequestBody, _: IsCancelled) -> dict[str, Any]:
        """The number of tokens of a text, without running the model."""
        body.check_fields("model", "text")
        return {"tokens": self.store[body.name("model")].count_tokens(body.text())}

    def statistics(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """Every statistic of every head on a text."""
        loaded, text = self._open(body, "model", "text", "image")
        if text.key not in self._statistics:
            if cancelled():
                return {}
            limit = LIMITS.statistics_tokens
            result = statistics(loaded.model, text.truncate(limit).inputs, progress=False)
            while len(self._statistics) >= MAX_CACHED_STATISTICS:
                self._statistics.pop(next(iter(self._statistics)))
            self._statistics[text.key] = {
                "tokens": min(len(text), limit),
                "heads": [str(address) for address in result.addresses],
                "statistics": {
                    name: [views.rounded(value) for value in result[name].means.tolist()]
                    for name in result.names
                },
                "measures": {
                    name: asdict(describe_measure(name)) for name in (*result.names, "patching")
                },
            }
        return self._statistics[text.key]

    def kinds(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """The kinds of every head, measured once per model on synthetic texts."""
        body.check_fields("model")
        loaded = self.store[body.name("model")]
        if loaded.name not in self._kinds:
            if cancelled():
                return {}
            begun = time.monotonic()

            def report(bar: Progress) -> None:
                total = bar.total or 0
                self._measuring = {
                    "model": loaded.name,
                    "label": bar.label,
                    "fraction": views.rounded(min(1.0, bar.done / total)) if total else None,
                    "seconds": round(time.monotonic() - begun),
                }

            try:
                with listening(report):
                    result = kinds(loaded.model, progress=False)
            finally:
                self._measuring = {}
            self._kinds[loaded.name] = {
                "heads": {
                    str(address): [label.record() for label in labels]
                    for address, labels in result.labels.items()
                },
                "nearest": {
                    str(address): label.record() for address, label in result.nearest.items()
                },
            }
        return self._kinds[loaded.name]

    def kinds_progress(self) -> dict[str, Any]:
        """How far the measurement of kinds is; empty while there is none."""
        return self._measuring

    def attention_rows(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """The largest weights of a range of queries."""
        loaded, text = self._open(body, *INPUT, "heads", "rows", "top_k")
        rows = body.span("rows", len(text), LIMITS.rows)
        top_k = body.integer("top_k", 1, LIMITS.top_k, 12)
        run = self._run(loaded, text, body.edits(loaded.model), cancelled)
        return views.attention_rows(run, body.heads(loaded.model), rows, top_k, cancelled)

    def attention_map(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """A window of the patterns, reduced to at most `cells` per side."""
        loaded, text = self._open(body, *INPUT, "heads", "rows", "keys", "cells")
        rows, keys = (body.span(side, len(text), LIMITS.tokens) for side in ("rows", "keys"))
        cells = body.integer("cells", 1, LIMITS.cells, 256)
        run = self._run(loaded, text, body.edits(loaded.model), cancelled)
        heads = body.heads(loaded.model)
        maps = [views.attention_map(run, head, rows, keys, cells, cancelled) for head in heads]
        return {"maps": maps}

    def comparison(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """The heads that two sides have in common, those whose patterns differ most first."""
        sides = body.check_fields("sides").objects("sides", 2)
        opened = [self._open(side, *INPUT) for side in sides]
        runs = [
            self._run(loaded, text, side.edits(loaded.model), cancelled)
            for side, (loaded, text) in zip(sides, opened, strict=True)
        ]
        lengths = [run.length for run in runs]
        if len(set(lengths)) > 1 or lengths[0] > LIMITS.patching_tokens:
            raise InputError(
                f"the texts have {lengths[0]:,} and {lengths[1]:,} tokens",
                f"use texts with the same number of tokens, at most {LIMITS.patching_tokens}",
            )
        overlaps = views.overlaps(runs, cancelled)
        order = sorted(overlaps, key=overlaps.__getitem__)
        return {"heads": order, "overlap": [views.rounded(overlaps[head]) for head in order]}

    def predictions(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """The predictions at a position, with the edits and without."""
        loaded, text = self._open(body, *INPUT, "position", "top_k")
        position = body.integer("position", 0, len(text) - 1, len(text) - 1)
        top_k = body.integer("top_k", 1, LIMITS.predictions, 8)
        edits = body.edits(loaded.model)
        run = self._run(loaded, text, edits, cancelled)
        before = None if edits.empty else self._run(loaded, text, HeadEdits(), cancelled)
        return views.predictions(loaded, run, position, top_k, before)

    def patching(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """The fraction of another prompt's answer that each head alone restores.

        The metric is a difference of two logits after the last token: the top prediction for the
        other prompt minus that for this one.
        """
        loaded, text = self._open(body, "model", "text", "source")
        source = loaded.read_text(body.text("source"))
        if loaded.output != "next token":
            raise InputError(f"{loaded.name} does not predict the next token", "use a decoder")
        if max(len(text), len(source)) > LIMITS.patching_tokens:
            raise InputError(
                f"the prompts have {max(len(text), len(source)):,} tokens",
                f"use at most {LIMITS.patching_tokens}",
            )
        _check_lengths(len(text), len(source))
        answer, distractor = (
            self._top_token(loaded, prompt, len(prompt) - 1, cancelled) for prompt in (source, text)
        )
        if answer == distractor:
            raise InputError(
                f"the model predicts {loaded.output_text(answer)!r} for both prompts",
                "change something that its prediction depends on",
            )
        metric = LogitDifference(answer=(answer,), distractor=(distractor,))
        result = patch(loaded.model, source.inputs, text.inputs, metric, progress=False)
        return {
            "answer": loaded.output_text(answer),
            "distractor": loaded.output_text(distractor),
            "clean": views.rounded(result.clean),
            "corrupted": views.rounded(result.corrupted),
            "heads": [f"L{patched.layer}H{patched.head}" for patched in result.recovered],
            "recovered": [views.rounded(fraction) for fraction in result.recovered.values()],
        }

    def generation(self, body: RequestBody, cancelled: IsCancelled) -> WatchedGeneration:
        """A generation that is ready to start."""
        settings = ("max_new_tokens", "temperature", "seed")
        loaded, text = self._open(body, "model", "text", "edits", "heads", *settings)
        if not loaded.generates:
            raise InputError(f"{loaded.name} cannot generate text", "use a decoder")
        edits = body.edits(loaded.model)
        temperature = body.number("temperature", 0.0, LIMITS.temperature, 0.0)
        if edits.links:
            raise InputError(
                "links are cut between tokens of the prompt only",
                "restore them before generating",
            )
        clean = self._run(loaded, text, HeadEdits(), cancelled)
        config = GenerationConfig(
            max_new_tokens=body.integer("max_new_tokens", 1, LIMITS.max_new_tokens, 24),
            sampling=Sample(temperature=temperature) if temperature > 0 else Greedy(),
            seed=body.integer("seed", 0, 2**31, 0),
        )
        # Patched heads have outputs for the tokens of the prompt only; those after it run as usual.
        source = self._source(loaded, edits, cancelled)
        in_prompt = edit_functions(edits, clean, source)
        later = edit_functions(replace(edits, patched=()), clean, None)
        heads = body.heads(loaded.model)
        return WatchedGeneration(
            loaded, text, config, heads=heads, prompt_edits=in_prompt, edits=later
        )

    def worth(self, body: RequestBody, cancelled: IsCancelled) -> HeadWorth:
        """What the heads are worth for the top prediction at a position, ready to be measured."""
        loaded, text = self._open(body, "model", "text", "position")
        if loaded.output not in ("next token", "masked token"):
            raise InputError(f"{loaded.name} predicts no tokens", "use a language model")
        position = body.integer("position", 0, len(text) - 1, len(text) - 1)
        needed = position + 1 if loaded.generates else len(text)
        if needed > LIMITS.worth_tokens:
            raise InputError(
                f"the worth of heads depends on {needed:,} tokens",
                f"use at most {LIMITS.worth_tokens:,}",
            )
        token = self._top_token(loaded, text, position, cancelled)
        return HeadWorth(loaded, body.text(), position, token)

    def explain_layer(self, body: RequestBody, _: IsCancelled) -> dict[str, Any]:
        """The numbers of one head and its layer, step by step."""
        loaded, text = self._open(body, "model", "text", "image", "layer", "head")
        layers = explain.only_stack(loaded).config.layers
        layer = body.integer("layer", 0, len(layers) - 1, 0)
        heads = heads_in(layers[layer], Sublayer.ATTENTION)
        head = body.integer("head", 0, max(0, heads - 1), 0)
        return explain.explain_layer(loaded, text, layer, head)

    def explain_batch(self, body: RequestBody, _: IsCancelled) -> dict[str, Any]:
        """The lines of a text as one batch, padded and end to end."""
        body.check_fields("model", "text", "layer")
        loaded = self.store[body.name("model")]
        depth = len(explain.only_stack(loaded).config.layers)
        layer = body.integer("layer", 0, depth - 1, 0)
        texts = [line for line in body.text().splitlines() if line.strip()]
        return explain.explain_batch(loaded, texts, layer)

    def _attention_at(
        self, body: RequestBody, cancelled: IsCancelled, *, incoming: bool
    ) -> dict[str, Any]:
        loaded, text = self._open(body, *INPUT, "heads", "position", "top_k")
        position = body.integer("position", 0, len(text) - 1)
        top_k = body.integer("top_k", 1, LIMITS.top_k, 24)
        run = self._run(loaded, text, body.edits(loaded.model), cancelled)
        heads = body.heads(loaded.model)
        return views.attention_at(run, heads, position, top_k, cancelled, incoming=incoming)

    # The tokens that one token attends to, and those that attend to it.
    attention_from = partialmethod(_attention_at, incoming=False)
    attention_to = partialmethod(_attention_at, incoming=True)

    def _open(self, body: RequestBody, *fields: str) -> tuple[LoadedModel, StudioInput]:
        """The model and the input of a request that has no other fields than these."""
        body.check_fields(*fields)
        loaded, image = self.store[body.name("model")], body.image()
        return loaded, loaded.read_text(body.text()) if image is None else loaded.read_image(image)

    def _run(
        self, loaded: LoadedModel, text: StudioInput, edits: HeadEdits, cancelled: IsCancelled
    ) -> TracedRun:
        trace = partial(trace_run, loaded.model, cancelled=cancelled)
        clean = self.cache.get(text.key, partial(trace, text.inputs))
        if edits.empty:
            return clean

        def run_edited() -> TracedRun:
            source = self._source(loaded, edits, cancelled)
            functions = edit_functions(edits, clean, source)
            links = read_links(loaded.model, edits.links, 1) if edits.links else ()
            return trace(text.inputs, functions, links=links, keep=edits.layers)

        return self.cache.get((text.key, edits), run_edited)

    def _source(
        self, loaded: LoadedModel, edits: HeadEdits, cancelled: IsCancelled
    ) -> TracedRun | None:
        """The run that patched heads take their outputs from, if there are any."""
        if not edits.patched:
            return None
        assert edits.source is not None
        layers = frozenset(head.layer for head in edits.patched)
        inputs = loaded.read_text(edits.source).inputs
        return trace_run(loaded.model, inputs, keep=layers, cancelled=cancelled)

    def _top_token(
        self, loaded: LoadedModel, text: StudioInput, position: int, cancelled: IsCancelled
    ) -> int:
        run = self._run(loaded, text, HeadEdits(), cancelled)
        logits = run.logits(torch.tensor([position], device=run.hidden.device))
        assert logits is not None
        return int(logits[0].argmax())


def edit_functions(
    edits: HeadEdits, clean: TracedRun, source: TracedRun | None
) -> dict[Site, EditFunction]:
    """The changes to head outputs, by site.

    "mean" is a head's mean over the tokens of this text, as `lens.ablate` takes it over all texts.
    `source` is the run that patched heads come from; it must have as many tokens.
    """
    if source is not None:
        _check_lengths(clean.length, source.length)
    functions: dict[Site, EditFunction] = {}
    for layer in sorted({head.layer for head in (*edits.ablated, *edits.patched)}):
        ablated, patched = (
            [head.head for head in heads if head.layer == layer]
            for heads in (edits.ablated, edits.patched)
        )
        replacement = clean.means[layer][ablated] if edits.replace_with == "mean" else 0.0
        outputs = source.outputs[layer][:, patched] if source is not None and patched else None

        def edit(
            values: Tensor,
            ablated: list[int] = ablated,
            replacement: Tensor | float = replacement,
            patched: list[int] = patched,
            outputs: Tensor | None = outputs,
        ) -> Tensor:
            edited = torch.clone(values)
            edited[:, ablated] = replacement
            if outputs is not None:
                edited[:, patched] = outputs
            return edited

        functions[Site(layer, Tap.HEAD_OUTPUT)] = edit
    return functions


def _check_lengths(length: int, source_length: int) -> None:
    if length != source_length:
        raise InputError(
            f"the other prompt has {source_length} tokens and this one {length}",
            "use prompts with the same number of tokens",
        )
