"""Why this word: what each layer would say, what heads and tokens add, and which place matters."""

from collections.abc import Callable
from functools import wraps
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError, ManyheadsError
from manyheads.lens.attribution.attribute import find_token
from manyheads.lens.attribution.direct_logits import logit_lens
from manyheads.lens.attribution.link_reasons import LinkReasons, why
from manyheads.lens.attribution.source_tokens import TokenRoutes, token_routes
from manyheads.lens.causal.patching import Component, Patch, patch
from manyheads.lens.inputs.cached_run import EditFunction
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.progress import Progress, listening
from manyheads.studio import views
from manyheads.studio.handlers import INPUT, Handlers, edit_functions
from manyheads.studio.models import LoadedModel, StudioInput
from manyheads.studio.requests import LIMITS, DisconnectedError, HeadEdits, RequestBody
from manyheads.studio.run_cache import IsCancelled, TracedRun
from manyheads.taps import Site, Sublayer, Tap

CANDIDATES = 8
ROUTES = 40
# How many pairs and writers of a link are sent.
LINK_PARTS = 6
# What the page calls the parts of a layer that can be patched.
COMPONENTS: tuple[Component, ...] = ("residual", "attention", "feedforward")

Handler = Callable[["WhyHandlers", RequestBody, IsCancelled], dict[str, Any]]


def with_reason(handler: Handler) -> Handler:
    """Return the reason, as {"reason": ...}, where a view has no meaning for a model or a text."""

    @wraps(handler)
    def answer(self: "WhyHandlers", body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        try:
            return handler(self, body, cancelled)
        except _NoViewError as error:
            return {"reason": str(error.__cause__)}

    return answer


class _NoViewError(Exception):
    """The lens refuses the model or the text, for the reason that caused this."""


class WhyHandlers(Handlers):
    """The handlers of a studio, with those behind the card "Why this word?"."""

    @with_reason
    def why_lens(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """The most likely words before and after each layer, and the probability of the target."""
        question = self._question(body, cancelled, "top_k")
        top_k = body.integer("top_k", 1, LIMITS.predictions, 3)
        if question.loaded.output == "classes":
            raise _NoViewError from InputError(
                "this model reads one class from the end of its last layer, and the layers before "
                "it have no words to show",
                "see which heads spoke for the class",
            )
        # What was edited is replaced by what the edited run computed.
        outputs = {
            Site(layer, Tap.HEAD_OUTPUT): _replacement(values)
            for layer, values in question.run.outputs.items()
        }
        result = _ask_lens(
            logit_lens,
            question.loaded.model,
            question.text.inputs,
            [question.target],
            at=[question.position],
            top_k=top_k,
            edits=outputs,
        )
        ranks = result.answer_ranks[:, 0].tolist()
        later = [index for index, rank in enumerate(ranks) if rank > 0]
        settled = later[-1] + 1 if later else 0
        columns = (
            result.answers[:, 0].tolist(),
            result.log_probabilities[:, 0].exp().tolist(),
            result.answer_log_probabilities[:, 0].exp().tolist(),
            ranks,
        )
        return {
            "target": question.word(question.target),
            "settled": settled if settled < len(ranks) else None,
            "steps": [
                {
                    "top": [
                        question.word(token) | {"probability": views.rounded(probability)}
                        for token, probability in zip(tokens, probabilities, strict=True)
                    ],
                    "probability": views.rounded(own),
                    "rank": rank,
                }
                for tokens, probabilities, own, rank in zip(*columns, strict=True)
            ],
        }

    @with_reason
    def why_parts(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """What each part adds to the target's logit minus the foil's, and by which tokens.

        The foil is by default the most likely other word; with `alone` there is none.
        """
        question = self._question(body, cancelled, "foil", "alone")
        foil = None if body.flag("alone") else question.foil(body.token("foil"))
        clean = self._run(question.loaded, question.text, HeadEdits(), cancelled)
        edits = body.edits(question.loaded.model)
        result = _ask_lens(
            token_routes,
            question.loaded.model,
            question.text.inputs,
            question.target,
            foil,
            at=question.position,
            edits=edit_functions(edits, clean, self._source(question.loaded, edits, cancelled)),
            links=edits.links,
        )
        readout = question.loaded.model.readout
        return {
            "target": question.word(question.target),
            "foil": None if foil is None else question.word(foil),
            "candidates": question.candidates(),
            "capped": readout is not None and readout.softcap is not None,
            **_parts(result),
            **_routes(result),
        }

    @with_reason
    def why_places(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """How much of another prompt's answer each token of one layer restores.

        The metric is a difference of two logits at the position: the other prompt's most likely
        word minus the target.
        """
        question = self._question(body, cancelled, "source", "component", "layer", edits=False)
        loaded, text, at = question.loaded, question.text, question.position
        if loaded.model.reads_images:
            raise _NoViewError from InputError(
                "patching compares two prompts, and this model reads images", "use a text model"
            )
        component = body.choice("component", COMPONENTS)
        source = loaded.read_text(body.text("source"))
        _check_prompts(len(text), len(source))
        depth = len(loaded.model.stacks()[loaded.model.readout_stack].layers)
        layer = body.integer("layer", 0, depth - 1)
        other_run = self._run(loaded, source, HeadEdits(), cancelled)
        answer = int(_logits(loaded, other_run, at).argmax())
        if answer == question.target:
            raise _NoViewError from InputError(
                f"the model predicts {loaded.output_text(answer)!r} for both prompts",
                "change something that its prediction depends on",
            )
        metric = LogitDifference(answer=(answer,), distractor=(question.target,), at=(at,))

        places = list(range(len(text)))
        if loaded.output == "next token":
            # Tokens before the first difference are the same, and later ones are not read.
            pairs = zip(*(_ids(prompt) for prompt in (text, source)), strict=True)
            first = next((place for place, (own, new) in enumerate(pairs) if own != new), 0)
            places = places[first : at + 1]

        def check(_: Progress) -> None:
            if cancelled():
                raise DisconnectedError

        with listening(check):
            result = _ask_lens(
                patch,
                loaded.model,
                source.inputs,
                text.inputs,
                metric,
                components=(component,),
                positions=places,
                layers=[layer],
                progress=False,
            )
        recovered = [0.0] * len(text)
        for place in places:
            recovered[place] = result[Patch(component, layer, position=place)]
        return {
            "answer": question.word(answer),
            "target": question.word(question.target),
            "layers": depth,
            "layer": layer,
            "source": list(source.tokens),
            "clean": views.rounded(result.clean),
            "corrupted": views.rounded(result.corrupted),
            "recovered": [views.rounded(fraction) for fraction in recovered],
        }

    @with_reason
    def why_link(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """Why a head looks at a token: its score minus the mean of all that it sees, in parts."""
        loaded, text = self._open(body, *INPUT, "head", "query", "key")
        body.name("head")
        (head,) = body.heads(loaded.model, "head", 1)
        query, key = (body.integer(name, 0, len(text) - 1) for name in ("query", "key"))
        _check_length(text)
        edits = body.edits(loaded.model)
        changed = None
        if edits.ablated or edits.patched:
            clean = self._run(loaded, text, HeadEdits(), cancelled)
            changed = edit_functions(edits, clean, self._source(loaded, edits, cancelled))
        result: LinkReasons = _ask_lens(
            why,
            *(loaded.model, text.inputs, head, query, key),
            against="mean",
            edits=changed,
            links=edits.links,
        )
        return {
            "score": _exact(result.score),
            "position": _exact(result.position),
            "capped": result.capped is not None,
            "pairs": [
                {"query": query_writer, "key": key_writer, "value": _exact(value)}
                for query_writer, key_writer, value in result.ranked(LINK_PARTS)
            ],
            "query_side": _side(result.query_side),
            "key_side": _side(result.key_side),
        }

    def _question(
        self, body: RequestBody, cancelled: IsCancelled, *fields: str, edits: bool = True
    ) -> "WordQuestion":
        """The run that a request is about, its position and its target."""
        names = INPUT if edits else tuple(name for name in INPUT if name != "edits")
        loaded, text = self._open(body, *names, "position", "target", *fields)
        position = body.integer("position", 0, len(text) - 1, len(text) - 1)
        if loaded.output == "none":
            raise _NoViewError from InputError(
                "this model outputs vectors and predicts no word", "use a model that does"
            )
        _check_length(text)
        run = self._run(loaded, text, body.edits(loaded.model), cancelled)
        return WordQuestion(loaded, text, run, position, body.token("target"))


class WordQuestion:
    """Why a model predicts a word, the most likely one if none is named, at a position."""

    def __init__(
        self,
        loaded: LoadedModel,
        text: StudioInput,
        run: TracedRun,
        position: int,
        target: int | str | None,
    ) -> None:
        self.loaded, self.text, self.run, self.position = loaded, text, run, position
        self.logits = _logits(loaded, run, position)
        self.target = int(self.logits.argmax()) if target is None else self._find(target)

    def _find(self, word: int | str) -> int:
        count = len(self.logits)
        if isinstance(word, str) and self.loaded.output in ("classes", "token classes"):
            names = [self.loaded.output_text(number) for number in range(count)]
            if word not in names:
                raise InputError(f"there is no class {word!r}", f"use {', '.join(names[:20])}")
            return names.index(word)
        if isinstance(word, str):
            before = "".join(self.text.tokens[: self.position + 1])
            return find_token(self.loaded.model.tokenizer, word, before)
        if not 0 <= word < count:
            raise InputError(f"there is no token {word}", f"use 0 to {count - 1:,}")
        return word

    def foil(self, word: int | str | None) -> int:
        """The word that the target is compared with: the most likely other one by default."""
        if word is not None:
            foil = self._find(word)
            if foil == self.target:
                raise InputError("a word cannot be compared with itself", "choose another word")
            return foil
        best = self.logits.topk(min(2, len(self.logits))).indices.tolist()
        return int(next((token for token in best if token != self.target), best[0]))

    def word(self, token: int) -> dict[str, Any]:
        return {"id": token, "text": self.loaded.output_text(token)}

    def candidates(self) -> list[dict[str, Any]]:
        """The most likely words, to choose a target or a foil from."""
        best = self.logits.softmax(-1).topk(min(CANDIDATES, len(self.logits)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [self.word(token) | {"probability": views.rounded(value)} for token, value in pairs]


def _logits(loaded: LoadedModel, run: TracedRun, position: int) -> Float[Tensor, " v"]:
    if loaded.output == "classes":
        assert run.model.readout is not None
        logits = run.model.readout(run.hidden, run.model.table)
        assert isinstance(logits, Tensor), "one class per input"
        return logits[0].float()
    at = run.logits(torch.tensor([position], device=run.hidden.device))
    assert at is not None, "the model has a readout"
    return at[0]


def _ids(text: StudioInput) -> list[int]:
    assert text.inputs.ids is not None, "it is a text"
    return text.inputs.ids.values.tolist()


def _ask_lens(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of the lens; a refusal is a reason to show."""
    try:
        return function(*arguments, **options)
    except ManyheadsError as error:
        raise _NoViewError from error


def _replacement(output: Tensor) -> EditFunction:
    return lambda _: output


def _exact(value: float | Tensor) -> float:
    """With digits enough for sums to hold."""
    return round(float(value), 6)


def _parts(result: TokenRoutes) -> dict[str, Any]:
    """The parts of a logit, layer by layer; they sum to `value`."""
    direct = result.direct
    heads = zip(result.heads, direct.by_head[0].tolist(), strict=True)
    by_layer = {
        layer: [{"head": str(address), "value": _exact(value)} for address, value in group]
        for layer, group in groupby(heads, key=lambda pair: pair[0].head.layer)
    }
    last = max((layer for _, layer in direct.layers), default=-1)
    layers = []
    for layer in range(last + 1):
        added = {
            sublayer.value: _exact(direct.layers[sublayer, layer][0])
            for sublayer in (Sublayer.FEEDFORWARD, Sublayer.MIXER)
            if (sublayer, layer) in direct.layers
        }
        layers.append({"layer": layer, "heads": by_layer.get(layer, []), **added})
    return {
        "value": _exact(direct.logits[0]),
        "embedding": _exact(direct.embedding[0]),
        "biases": _exact(direct.bias[0]),
        "layers": layers,
    }


def _routes(result: TokenRoutes) -> dict[str, Any]:
    """The strongest routes, what heads read from each token, and what they read from none."""
    strongest = [route for route in result.ranked(ROUTES) if route.value]
    return {
        "routes": [
            {
                "head": str(route.head),
                "token": route.token,
                "value": _exact(route.value),
                "weight": views.rounded(route.weight),
            }
            for route in sorted(strongest, key=attrgetter("value"), reverse=True)
        ],
        "tokens": [_exact(value) for value in result.values.sum(0).tolist()],
        "rest": _exact(float(result.rest.sum())),
    }


def _side(parts: dict[str, float]) -> list[dict[str, Any]]:
    """The strongest writers of one side of a link."""
    strongest = list(parts.items())[:LINK_PARTS]
    return [{"writer": writer, "value": _exact(value)} for writer, value in strongest]


def _check_length(text: StudioInput) -> None:
    if len(text) > LIMITS.attribution_tokens:
        raise _NoViewError from InputError(
            f"the text has {len(text):,} tokens, and every layer is recorded at each of them",
            f"use at most {LIMITS.attribution_tokens:,}",
        )


def _check_prompts(length: int, source_length: int) -> None:
    if length != source_length:
        raise _NoViewError from InputError(
            f"the other prompt has {source_length} tokens and this one {length}",
            "use prompts with the same number of tokens",
        )
    if length > LIMITS.patching_tokens:
        raise _NoViewError from InputError(
            f"the prompts have {length:,} tokens", f"use at most {LIMITS.patching_tokens}"
        )
