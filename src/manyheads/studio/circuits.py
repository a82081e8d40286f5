"""Circuits of the model on two texts: found in the background, and evaluated edge by edge."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import ne
from typing import Any

import numpy as np
import torch

from manyheads.errors import InputError, ManyheadsError
from manyheads.lens.circuit_discovery.circuit import circuit
from manyheads.lens.circuit_discovery.circuit_pairs import CircuitPairs
from manyheads.lens.circuit_discovery.edge_scores import Method
from manyheads.lens.circuit_discovery.scrubbing import random_mask
from manyheads.lens.inputs.aligned_pairs import check_aligned
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.pictures.circuit_layout import STOPS, circuit_view
from manyheads.progress import Progress, listening
from manyheads.studio import views
from manyheads.studio.models import LoadedModel, StudioInput
from manyheads.studio.requests import LIMITS, DisconnectedError, HeadEdits, RequestBody
from manyheads.studio.run_cache import IsCancelled, trace_run
from manyheads.studio.why import WhyHandlers, WordQuestion

METHODS: tuple[Method, ...] = ("eap-ig", "eap", "eap-ig-activations", "atp*", "relp", "exact")
PAIR = ("model", "text", "source", "position", "answer", "foil")
# Circuits of random edges, beside which a circuit is judged.
RANDOM_CIRCUITS = 5
# Tokens before the position that a suggestion may replace, and words tried in place of one.
REPLACED_TOKENS, REPLACEMENTS = 32, 20


@dataclass(frozen=True, slots=True, eq=False)
class ComparedTexts:
    """The open text, a corrupted one, and two words whose logits are compared at a position."""

    loaded: LoadedModel
    clean: StudioInput
    corrupted: StudioInput
    position: int
    # The predictions on both texts, and the numbers of both words.
    questions: tuple[WordQuestion, WordQuestion]
    answer: int
    foil: int

    @property
    def metric(self) -> LogitDifference:
        return LogitDifference(answer=(self.answer,), distractor=(self.foil,), at=(self.position,))

    def words(self) -> dict[str, Any]:
        question = self.questions[0]
        return {"answer": question.word(self.answer), "foil": question.word(self.foil)}


class CircuitHandlers(WhyHandlers):
    """The handlers of a studio, with those behind the card "Circuit"."""

    def circuit_words(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """The words that two texts set apart, or the reason why these texts cannot be compared."""
        try:
            pair = self._pair(body, cancelled)
        except ManyheadsError as error:
            return {"reason": str(error)}
        answers, foils = (question.candidates() for question in pair.questions)
        return pair.words() | {"answers": answers, "foils": foils}

    def circuit_suggestion(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """The text with one token replaced, that which makes the prediction least likely."""
        loaded, text = self._open(body, "model", "text", "position")
        position = _position(loaded, text, body)
        answer = self._top_token(loaded, text, position, cancelled)
        best, least = "", float("inf")
        for variant in self._variants(loaded, text, position, cancelled):
            if cancelled():
                raise DisconnectedError
            run = trace_run(loaded.model, loaded.read_text(variant).inputs, cancelled=cancelled)
            logits = run.logits(torch.tensor([position], device=run.hidden.device))
            assert logits is not None, "the model predicts tokens"
            likely = float(logits[0].log_softmax(-1)[answer])
            best, least = (variant, likely) if likely < least else (best, least)
        return {"text": best}

    def circuit(
        self, body: RequestBody, report: Callable[[float], None], cancelled: IsCancelled
    ) -> dict[str, Any]:
        """The strongest edges between the parts of the model, laid out for the page."""
        method = body.choice("method", METHODS)
        pair = self._pair(body, cancelled, "method")

        def watch(bar: Progress) -> None:
            if cancelled():
                raise DisconnectedError
            if bar.total:
                report(min(1.0, bar.done / bar.total))

        with listening(watch):
            result = circuit(
                pair.loaded.model,
                pair.clean.inputs,
                pair.corrupted.inputs,
                pair.metric,
                method,
                progress=False,
            )
        if result.clean == result.corrupted:
            raise InputError(
                "both texts give the same difference of logits",
                "change a word that the answer depends on",
            )
        ranked = result.ranked(STOPS[-1])
        edges = [(edge.writer, edge.reader, score) for edge, score, _ in ranked]
        errors = [error for _, _, error in ranked]
        view = circuit_view(edges, errors, int((~np.isnan(result.scores)).sum()))
        view["edges"] = [
            [*names, views.rounded(score), views.rounded(error)]
            for *names, score, error in view["edges"]
        ]
        return pair.words() | {
            "method": method,
            "clean": views.rounded(result.clean),
            "corrupted": views.rounded(result.corrupted),
            "warning": result.warning,
            "view": view,
        }

    def circuit_evaluation(self, body: RequestBody, cancelled: IsCancelled) -> dict[str, Any]:
        """How much of the difference these edges alone keep, and as many random ones."""
        edges = body.edges()
        pair = self._pair(body, cancelled, "edges")

        def check(_: Progress) -> None:
            if cancelled():
                raise DisconnectedError

        with listening(check):
            texts = pair.clean.inputs, pair.corrupted.inputs
            pairs = CircuitPairs.of(pair.loaded.model, *texts, pair.metric, None, None)
            mask, generator = pairs.graph.mask(edges), np.random.default_rng(0)
            count = int(mask.sum())
            masks = [random_mask(pairs.graph, count, generator) for _ in range(RANDOM_CIRCUITS)]
            values = pairs.evaluate([mask, *masks], "corrupted", False)
            points = [views.rounded(pairs.faithfulness(row)[0]) for row in values]
        clean, corrupted = pairs.end_means
        return {
            "edges": count,
            "faithfulness": points[0],
            "random": points[1:],
            "value": views.rounded(float(values[0, 0])),
            "clean": views.rounded(clean),
            "corrupted": views.rounded(corrupted),
        }

    def _pair(self, body: RequestBody, cancelled: IsCancelled, *fields: str) -> ComparedTexts:
        loaded, text = self._open(body, *PAIR, *fields)
        position = _position(loaded, text, body)
        source = loaded.read_text(body.text("source"))
        check_aligned(loaded.model, text.inputs, source.inputs)
        if text.key == source.key:
            raise InputError("both texts are the same", "change a word that the answer depends on")
        if len(text) > LIMITS.patching_tokens:
            raise InputError(
                f"the texts have {len(text):,} tokens", f"use at most {LIMITS.patching_tokens}"
            )
        runs = [self._run(loaded, part, HeadEdits(), cancelled) for part in (text, source)]
        clean = WordQuestion(loaded, text, runs[0], position, body.token("answer"))
        corrupted = WordQuestion(loaded, source, runs[1], position, None)
        foil = body.token("foil")
        if foil is None and corrupted.target != clean.target:
            foil = corrupted.target
        words = clean.target, clean.foil(foil)
        return ComparedTexts(loaded, text, source, position, (clean, corrupted), *words)

    def _variants(
        self, loaded: LoadedModel, text: StudioInput, position: int, cancelled: IsCancelled
    ) -> Iterator[str]:
        """The text with one token replaced by a likely one, at most once per place."""
        run = self._run(loaded, text, HeadEdits(), cancelled)
        # The next token is predicted at the token before it, a masked one at its place.
        before = int(loaded.output == "next token")
        last = position if before else len(text)
        letters = text.letters or ()
        for place in range(max(before, last - REPLACED_TOKENS), last):
            own = letters[place]
            if own is None or not own.strip().isalnum() or place == position:
                continue
            logits = run.logits(torch.tensor([place - before], device=run.hidden.device))
            assert logits is not None, "the model predicts tokens"
            for token in logits[0].topk(REPLACEMENTS).indices.tolist():
                word = loaded.output_text(token)
                if word.strip().lower() == own.strip().lower() or _form(word) != _form(own):
                    continue
                parts = [*letters[:place], word, *letters[place + 1 :]]
                variant = "".join(part or "" for part in parts)
                key = loaded.read_text(variant).key
                changed = sum(map(ne, key, text.key))
                if len(key) == len(text.key) and changed == 1:
                    yield variant
                    break


def _position(loaded: LoadedModel, text: StudioInput, body: RequestBody) -> int:
    if loaded.output not in ("next token", "masked token"):
        raise InputError(f"{loaded.name} predicts no tokens", "use a language model")
    return body.integer("position", 0, len(text) - 1, len(text) - 1)


def _form(word: str) -> tuple[bool, bool, bool, bool]:
    """What a word has in common with those that can take its place."""
    text = word.strip()
    return word[:1].isspace(), text.isalpha(), text[:1].isupper(), len(text) > 1
