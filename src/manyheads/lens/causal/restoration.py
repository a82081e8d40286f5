"""Causal tracing: noise on some tokens, and one state at a time restored as it was without it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.encoding import text_reader
from manyheads.errors import InputError, check_int
from manyheads.lens.causal.evaluate import default_batch_tokens
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.inputs.annotated import align_words
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.results.addresses import check_one_stream
from manyheads.lens.results.tables import Tabular, format_change
from manyheads.models import build
from manyheads.models.model_interface import ModelInputs
from manyheads.models.readout import ClassHead
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Site, Sublayer, Tap
from manyheads.tokenizers import token_text

RestoredState = Literal["residual", "attention", "feedforward"]
STATES: tuple[RestoredState, ...] = get_args(RestoredState)
Map = Float[np.ndarray, "l t"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Restoration(Tabular):
    """The metric when one state is restored in the noisy run, by state, layer and position.

    `restored` and `errors` have a row per layer and a column per token; NaN where nothing was
    restored. `errors` are the standard errors of the effect over samples of noise. `noise` is the
    standard deviation of what was added at the `corrupt` positions.
    """

    tokens: tuple[str, ...]
    corrupt: tuple[int, ...]
    clean: float
    corrupted: float
    corrupted_error: float
    restored: dict[str, Map]
    errors: dict[str, Map]
    metric: str
    noise: float
    samples: int
    window: int
    complete: bool = True

    def effects(self, state: RestoredState = "residual") -> Map:
        """How far each restored state moves the metric from that of the noisy run."""
        if state not in self.restored:
            raise InputError(f"{state!r} was not restored", f"use {' or '.join(self.restored)}")
        effects: Map = self.restored[state] - self.corrupted
        return effects

    def ranked(
        self, state: RestoredState = "residual", top_k: int | None = None
    ) -> list[tuple[int, int, float]]:
        """(layer, position, effect) of a state, those nearest to the clean run first."""
        effects, sign = self.effects(state), np.sign(self.clean - self.corrupted)
        measured = [
            (layer, position, float(effects[layer, position]))
            for layer, position in np.argwhere(~np.isnan(effects)).tolist()
        ]
        return sorted(measured, key=lambda item: -sign * item[2])[:top_k]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "state": state,
                "layer": layer,
                "position": position,
                "token": self.tokens[position],
                "restored": float(values[layer, position]),
                "effect": float(values[layer, position]) - self.corrupted,
                "effect_error": float(self.errors[state][layer, position]),
            }
            for state, values in self.restored.items()
            for layer, position in np.argwhere(~np.isnan(values)).tolist()
        ]

    def _lines(self) -> Iterator[str]:
        noisy = ", ".join(f"{self.tokens[position]!r}" for position in self.corrupt)
        yield (
            f"{self.metric} {self.clean:.4f}, with noise on {noisy} {self.corrupted:.4f} "
            f"({self.samples} samples); restored:"
        )
        for state in self.restored:
            for layer, position, effect in self.ranked(state, 3):  # type: ignore[arg-type]
                error = float(self.errors[state][layer, position])
                where = f"{state} L{layer} at {position} {self.tokens[position]!r}"
                yield f"  {where}  {format_change(effect, error)}"
        if not self.complete:
            yield "  interrupted before all states were restored"


@wrapping_models
def restore(
    model: build.Model,
    text: Inputs,
    corrupt: str | Sequence[int],
    *,
    answer: str | int | None = None,
    at: int | Literal["last"] = "last",
    metric: metrics.Metric | None = None,
    states: Sequence[RestoredState] | None = None,
    positions: Sequence[int] | None = None,
    window: int = 1,
    noise: float = 3.0,
    samples: int = 10,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Restoration:
    """Causal tracing (ROME, arXiv 2202.05262): which states bring an answer back in a noisy run.

    Noise is added to the embeddings of the `corrupt` tokens: their positions, or a part of the text
    such as its subject (where it first occurs). Its standard deviation is `noise` times that of the
    token embeddings. Then the state of one layer and position at a time is as in the run without
    noise: "residual" is the stream after a layer, "attention" and "feedforward" what they add to
    it, in a `window` of layers around that layer (the paper takes 10 of 48 layers). By default all
    states that the model shows, at all positions.

    The metric is the probability of the `answer` (by default the likeliest token) at the token
    `at`, or any other. Means are over `samples` of noise. Ctrl-C keeps the results so far.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = restore(model, [[1, 2, 3, 4]], corrupt=[1], samples=2, progress=False)
    >>> list(result.restored), result.restored["residual"].shape
    (['residual', 'attention', 'feedforward'], (2, 4))
    """
    for name, count in (("window", window), ("samples", samples)):
        check_int(name, count, minimum=1)
    if not noise > 0:
        raise InputError(f"noise must be above 0, got {noise}", "use 3, as the paper does")
    inputs = read_inputs(model, text)
    if inputs.ids is None or inputs.source is not None or inputs.examples or len(inputs) != 1:
        raise InputError(
            "causal tracing needs one text for a model of texts", "pass one string or list of ids"
        )
    scope = cached_run.head_scope(model, headless=True)
    check_one_stream(scope.stack)
    length = inputs.ids.lengths.total
    places = _positions(model, text, inputs, corrupt)
    chosen = range(length) if positions is None else _checked(positions, length)
    if metric is None:
        metric, name = _probability(model, inputs, answer, at, length), "probability"
    else:
        name = metrics.metric_name(metric)
    with build.eval_mode(model), torch.no_grad():
        deviation = noise * _embedding_deviation(model)
        tracing = _Tracing.of(scope, inputs, metric, places, deviation, samples, seed)
        clean = float(tracing.metric(tracing.clean.hidden)[0, 0])
        limit = default_batch_tokens(model) if batch_tokens is None else batch_tokens
        restored, errors, complete = tracing.measure(
            tracing.select(states), list(chosen), window, limit, progress
        )
    corrupted = tracing.values
    return Restoration(
        tokens=_token_texts(model, inputs.ids),
        corrupt=tuple(places),
        clean=clean,
        corrupted=float(corrupted.mean()),
        corrupted_error=_error(corrupted),
        restored=restored,
        errors=errors,
        metric=name,
        noise=deviation,
        samples=samples,
        window=window,
        complete=complete,
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Tracing:
    """The run without noise, the runs with it side by side, and the metric of each of these."""

    clean: cached_run.CachedRun
    noisy: cached_run.CachedRun
    metric: metrics.BoundMetric
    sites: list[dict[RestoredState, Site]]
    values: Float[Tensor, " samples"]

    @classmethod
    def of(
        cls,
        scope: cached_run.HeadScope,
        inputs: ModelInputs,
        metric: metrics.Metric,
        places: Sequence[int],
        deviation: float,
        samples: int,
        seed: int,
    ) -> "_Tracing":
        layers = range(len(scope.stack.layers))
        sites = [_sites(scope, layer) for layer in layers]
        every = [site for by_state in sites for site in by_state.values()]
        clean = cached_run.CachedRun(scope, inputs, layers=layers, record=every)
        start = Site(-1, Tap.EMBEDDINGS, stack=scope.stack_name)
        generator = torch.Generator().manual_seed(seed)

        def add_noise(values: Tensor) -> Tensor:
            copies = values.unflatten(0, (samples, -1)).clone()
            drawn = torch.randn(samples, len(places), values.shape[1], generator=generator)
            copies[:, list(places)] += (deviation * drawn).to(copies)
            return copies.flatten(0, 1)

        noisy = cached_run.CachedRun(
            scope, inputs.repeat(samples), layers=layers, edits={start: add_noise}
        )
        bound = metrics.bind_metric(scope.model, inputs, range(1), metric)
        values = bound(noisy.hidden, samples)[:, 0].double().cpu()
        return cls(clean=clean, noisy=noisy, metric=bound, sites=sites, values=values)

    def select(self, states: Sequence[RestoredState] | None) -> tuple[RestoredState, ...]:
        """The requested states, or all that some layer has."""
        available = tuple(state for state in STATES if any(state in own for own in self.sites))
        for state in states or ():
            if state not in available:
                raise InputError(
                    f"this model shows no {state!r} to restore", f"use {' or '.join(available)}"
                )
        return available if states is None else tuple(states)

    def measure(
        self,
        states: Sequence[RestoredState],
        positions: list[int],
        window: int,
        batch_tokens: int,
        progress: bool,
    ) -> tuple[dict[str, Map], dict[str, Map], bool]:
        """The mean metric with each state restored, the error of its effect, and if it is all."""
        shape = (len(self.sites), self.clean.hidden.lengths.total)
        restored, errors = (
            {str(state): np.full(shape, np.nan) for state in states} for _ in range(2)
        )
        step, complete = max(1, batch_tokens // self.noisy.hidden.lengths.total), True
        cells = [
            (state, layer)
            for state in states
            for layer, own in enumerate(self.sites)
            if state in own
        ]
        total = len(cells) * len(positions)
        with Progress("restoring", total=total, unit="states", enabled=progress) as bar:
            try:
                for state, layer in cells:
                    for start in range(0, len(positions), step):
                        group = positions[start : start + step]
                        values = self._restore(state, layer, window, group)
                        restored[state][layer, group] = values.mean(1).numpy()
                        effects = values - self.values
                        errors[state][layer, group] = [_error(own) for own in effects]
                        bar.advance(len(group))
            except KeyboardInterrupt:
                if all(np.isnan(own).all() for own in restored.values()):
                    raise
                complete = False
        return restored, errors, complete

    def _restore(
        self, state: RestoredState, layer: int, window: int, positions: list[int]
    ) -> Float[Tensor, "copies samples"]:
        """The metric with the state restored at one position in each copy."""
        # A restored stream needs no other layer; of a window, half lies below.
        first = layer if state == "residual" else max(0, layer - window // 2)
        last = first if state == "residual" else min(len(self.sites), layer - window // 2 + window)
        samples, edits = len(self.values), {}
        for index in range(first, max(last, first + 1)):
            if state in self.sites[index]:
                site = self.sites[index][state]
                clean = self.clean[site].values

                def change(values: Tensor, clean: Tensor = clean) -> Tensor:
                    copies = values.unflatten(0, (len(positions), samples, -1)).clone()
                    for copy, position in zip(copies, positions, strict=True):
                        copy[:, position] = clean[position]
                    return copies.flatten(0, 2)

                edits[site] = change
        watch = cached_run.ActivationEditor(edits)
        hidden = self.noisy.resume(first, watch, len(positions))
        values = self.metric(hidden, len(positions) * samples)
        return values.double().cpu().reshape(len(positions), samples)


def _sites(scope: cached_run.HeadScope, layer: int) -> dict[RestoredState, Site]:
    """The site of each state of a layer that the model shows."""
    config, name = scope.stack.config.layers[layer], scope.stack_name
    sites: dict[RestoredState, Site] = {
        "residual": cached_run.layer_output_site(scope.stack, layer)
    }
    if config.attention is not None or config.mixer is not None:
        sites["attention"] = Site(layer, Tap.OUTPUT, Sublayer.ATTENTION, name)
    if config.feedforward is not None:
        sites["feedforward"] = Site(layer, Tap.OUTPUT, Sublayer.FEEDFORWARD, name)
    return sites


def _positions(
    model: build.Model, text: Any, inputs: ModelInputs, corrupt: str | Sequence[int]
) -> list[int]:
    """The tokens that receive noise."""
    assert inputs.ids is not None, "checked by the caller"
    length = inputs.ids.lengths.total
    if not isinstance(corrupt, str):
        return _checked(corrupt, length)
    listed = [text] if isinstance(text, str) else text
    string = listed[0] if isinstance(listed, list | tuple) else None
    if not isinstance(string, str):
        raise InputError(
            f"corrupt={corrupt!r} is looked for in a string, and the text is token ids",
            "pass the positions of the tokens",
        )
    start = string.find(corrupt)
    if start < 0 or not corrupt:
        raise InputError(f"{corrupt!r} does not occur in the text", "pass a part of it")
    reader = text_reader.require_text_model(model)
    limit = text_reader.resolve_max_length(reader, None)
    encoded = text_reader.truncating_tokenizer(reader, limit).encode(string)
    [places] = align_words(encoded, string, [(start, start + len(corrupt))])
    if not places:
        raise InputError(f"no token begins in {corrupt!r}", "pass positions of tokens")
    return list(places)


def _checked(positions: Sequence[int], length: int) -> list[int]:
    """Positions of tokens, each once."""
    for position in positions:
        if not 0 <= position < length:
            raise InputError(f"there is no token {position}", f"use 0 to {length - 1}")
    if not len(positions):
        raise InputError("there are no positions", "name at least one")
    return sorted(set(positions))


def _probability(
    model: build.Model,
    inputs: ModelInputs,
    answer: str | int | None,
    at: int | Literal["last"],
    length: int,
) -> metrics.StateMetric:
    """The probability of the answer at one token, or of a class."""
    readout = model.readout
    if readout is None:
        raise InputError(
            f"this {type(model).__name__} has no readout", "pass a metric such as StateMetric"
        )
    whole = isinstance(readout.config, ClassHead)
    if at == "last" and not (model.generates or whole):
        raise InputError(
            f"this {type(model).__name__} predicts at every token", "set at to one position"
        )
    row = length - 1 if at == "last" else _checked([at], length)[0]

    def probabilities(states: Ragged) -> Float[Tensor, " v"]:
        if isinstance(readout.config, ClassHead):
            x = readout.config.pooled(states.values, states.lengths)
        else:
            x = states.values[row : row + 1]
        return readout.logits(x, model.table)[0].float().softmax(-1)

    token = _answer_id(model, answer)
    if token is None:
        with build.eval_mode(model), torch.no_grad():
            hidden = model.run_inputs(inputs).hidden
            assert isinstance(hidden, Ragged), "ragged in, ragged out"
            token = int(probabilities(hidden).argmax())

    def probability(states: Ragged, _: Sequence[int]) -> Float[Tensor, " b"]:
        return probabilities(states)[[token]]

    return metrics.StateMetric(probability)


def _answer_id(model: build.Model, answer: str | int | None) -> int | None:
    if not isinstance(answer, str):
        return answer
    if model.tokenizer is None:
        raise InputError("this model has no tokenizer", "pass the token id of the answer")
    ids = model.tokenizer.encode(answer, add_special_tokens=False).ids
    if len(ids) != 1:
        raise InputError(
            f"the answer {answer!r} has {len(ids)} tokens",
            "pass one token, with the space before it if it has one",
        )
    return int(ids[0])


def _embedding_deviation(model: build.Model) -> float:
    """The standard deviation of all values of the token embeddings, as the layers receive them."""
    assert model.table is not None, "it reads tokens"
    scale = getattr(getattr(model.config, "embedding", None), "scale", 1.0)
    return float(model.table.float().std()) * float(scale)


def _token_texts(model: build.Model, ids: Ragged) -> tuple[str, ...]:
    tokens = ids.values.tolist()
    if model.tokenizer is None:
        return tuple(map(str, tokens))
    return tuple(token_text(model.tokenizer, token) for token in tokens)


def _error(values: Float[Tensor, " samples"]) -> float:
    """The standard error of a mean; NaN of a single value."""
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")
