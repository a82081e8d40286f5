"""Recall from long contexts: needles, and one of several keys, at multiples of a base length.

The texts are made here and nothing is downloaded: articles of any length, statements hidden in
them, and the question for one of these at the end. The heads that read the answer are measured in
the same pass, and switched off in another.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from manyheads.bridge.automatic import wrapping_models
from manyheads.encoding.text_reader import check_continues, require_text_model
from manyheads.errors import InputError
from manyheads.formatting import listed, percent, plain_table, pluralise, without_nan
from manyheads.lens.causal.ablation import HeadAblation
from manyheads.lens.causal.replacements import Replacement
from manyheads.lens.head_kinds import criteria, scores_by_text
from manyheads.lens.inputs import cached_run, synthetic
from manyheads.lens.results.files import Metadata
from manyheads.lens.results.tables import ByHead
from manyheads.lens.task_heads.task_heads import MAX_NAMES
from manyheads.models import build
from manyheads.models.model_interface import ModelInputs
from manyheads.parts.positions import Axial, Learned
from manyheads.progress import Progress
from manyheads.taps import Head, Site, Tap
from manyheads.tokenizers import plain_copy

# Statements in the texts of a task, of which one is asked for.
KEYS = {"needle": 1, "multi-key": 8}
DEFAULT_TIMES = (1, 2, 4, 8, 16)
DEFAULT_BASE = 512
# Less of an article hides nothing.
MIN_HAYSTACK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallScore:
    """How much of the answers a model recalls in texts of one length, by task.

    `copied` is the mean fraction of an answer's tokens that are the most likely ones, with its
    standard `error`, and `exact` the fraction of answers copied whole. `by_depth` has a value for
    each text, the one whose statement comes first first. `without` is `copied` when the retrieval
    heads are off, and `without_random` when as many others are.
    """

    task: str
    times: float
    tokens: int
    copied: float
    error: float
    exact: float
    by_depth: tuple[float, ...]
    without: float | None = None
    without_random: float | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class LongContextRecall(ByHead):
    """Recall by task and length, and the retrieval score of each head in each, as "needle 4x".

    `heads` are the retrieval heads, chosen on other texts of the shortest length.
    """

    heads: tuple[Head, ...] = ()
    scores: tuple[RecallScore, ...] = ()

    def recall_table(self) -> Any:
        """A rich table of recall by task and length."""
        rows = []
        for score in self.scores:
            copied = f"{percent(score.copied)} ±{percent(score.error)}"
            off = [
                "" if value is None else percent(value)
                for value in (score.without, score.without_random)
            ]
            row = [score.task, f"{score.times:g}x", f"{score.tokens:,}", copied]
            rows.append([*row, percent(score.exact), *off])
        titles = ["length", "tokens", "recalled", "whole", "without heads", "without random"]
        return plain_table(["task"], titles, rows)

    def _lines(self) -> Iterator[str]:
        for score in self.scores:
            yield f"{score.task} {score.times:g}x ({score.tokens:,} tokens): " + percent(
                score.copied
            )
        names = listed([*map(str, self.heads)], MAX_NAMES) if self.heads else "none"
        yield f"retrieval heads: {names}"

    def _summary(self) -> Metadata:
        return dict(without_nan({"scores": [asdict(score) for score in self.scores]}))


@wrapping_models
def long_context_recall(
    model: build.Model,
    times: Sequence[float | int] = DEFAULT_TIMES,
    *,
    base: int | None = None,
    tasks: Sequence[str] = tuple(KEYS),
    samples: int = 8,
    ablate: bool = True,
    replace_with: Replacement = "mean",
    seed: int = 0,
    progress: bool = True,
) -> LongContextRecall:
    """How well a model recalls statements in texts of `times` a base length, and by which heads.

    `base` is the length in tokens of texts of 1x, by default the trained length, or 512 where that
    is not known. A "needle" text hides one statement of five random words, a "multi-key" text
    eight, and asks for one of them. Statements are at `samples` depths, from first to last.

    With `ablate` the retrieval heads, which are chosen on other needles of the shortest length, are
    switched off in every text, and as many random heads. Lengths beyond learned positions are left
    out; `metadata["skipped"]` names them.

    >>> from manyheads import load
    >>> long_context_recall(load("house-gpt"), [1, 2], base=128)  # doctest: +SKIP
    """
    check_continues(model)
    if base is None:
        base = model.trained_length or DEFAULT_BASE
    if samples < 2:
        raise InputError(f"samples must be at least 2, got {samples}", "use 2 or more")
    if not times or min(times) <= 0:
        raise InputError(f"times must be above 0, got {list(times)}", "use 1, 2, 4 or so")
    if not tasks or not set(tasks) <= set(KEYS):
        raise InputError(f"tasks must be of {', '.join(KEYS)}, got {list(tasks)}", "use these")
    lengths = {time: round(base * time) for time in sorted(times)}
    fitting = {time: tokens for time, tokens in lengths.items() if _fits(model, tokens)}
    skipped = [f"{time:g}x" for time in lengths if time not in fitting]
    if not fitting:
        raise InputError(
            f"texts of {min(lengths.values()):,} tokens are longer than the model's positions",
            "use a smaller base",
        )
    maker = RecallTexts(model, seed)
    shortest = min(fitting.values())
    texts = {
        (task, time): maker.texts(length, KEYS[task], samples)
        for task in tasks
        for time, length in fitting.items()
    }
    chosen_on = maker.texts(shortest, 1, samples)
    tokens = sum(fitting.values()) * samples * len(tasks)
    total = tokens * (3 if ablate else 1) + shortest * samples
    bar = Progress("recalling", total=total, unit="tokens", enabled=progress)
    with bar, build.eval_mode(model), torch.inference_mode():
        run = _RecallRun(model, bar)
        heads = run.retrieval_heads(chosen_on)
        bar.expect(total if heads else shortest * samples + tokens)
        measured = {key: run.measure(needles) for key, needles in texts.items()}
        off: dict[Any, list[float | None]] = {key: [None, None] for key in texts}
        if ablate and heads:
            draw = random.Random(seed)
            rest = [head for head in run.scope.heads if head not in heads]
            drawn = tuple(draw.sample(rest, min(len(heads), len(rest))))
            ids = [list(needle.ids) for needle in chosen_on]
            with torch.inference_mode(False):
                ablation = HeadAblation.of(model, ids, replace_with=replace_with, progress=False)
            for key, needles in texts.items():
                off[key] = [run.copied_without(ablation, own, needles) for own in (heads, drawn)]
    scores = []
    for (task, time), (copied, _) in measured.items():
        without, random_off = off[task, time]
        score = RecallScore(
            task=task,
            times=float(time),
            tokens=fitting[time],
            copied=float(copied.mean()),
            error=float(copied.std(ddof=1) / len(copied) ** 0.5),
            exact=float((copied == 1).mean()),
            by_depth=tuple(copied.tolist()),
            without=without,
            without_random=random_off,
        )
        scores.append(score)
    named = {f"{task} {time:g}x": values for (task, time), (_, values) in measured.items()}
    return LongContextRecall(
        kind="long-context recall",
        blocks=run.scope.blocks,
        means={name: np.nanmean(values, axis=0) for name, values in named.items()},
        errors={
            name: np.nanstd(values, axis=0, ddof=1) / len(values) ** 0.5
            for name, values in named.items()
        },
        heads=heads,
        scores=tuple(scores),
        metadata={
            "base": base,
            "samples": samples,
            "trained_length": model.trained_length,
            "skipped": skipped,
            "replace_with": replace_with,
        },
    )


def _fits(model: build.Model, tokens: int) -> bool:
    position = require_text_model(model).config.embedding.position
    return not isinstance(position, Learned | Axial) or tokens <= position.longest


class RecallTexts:
    """Makes texts of any length that hide statements and ask for one of them."""

    def __init__(self, model: build.Model, seed: int = 0) -> None:
        reader = require_text_model(model)
        if reader.tokenizer is None:
            raise InputError(
                "this model has no tokenizer",
                "load it from a folder with one, or set model.tokenizer",
            )
        self._tokenizer = plain_copy(reader.tokenizer)
        self._prefix = synthetic.SpecialTokens.of(reader).prefix
        self._draw = random.Random(seed)
        articles = " ".join(synthetic.passages())
        written = {word.strip(".,").lower() for word in articles.split()}
        plain = synthetic.plain_words(self._tokenizer, seed=seed)
        words = [word for word in plain if word not in written]
        self._words = words if len(words) > synthetic.ANSWER_WORDS else plain
        self._article = self._encode(" " + articles)

    def texts(self, tokens: int, keys: int, count: int) -> list[synthetic.Needle]:
        """So many texts of exactly this length, with statements at depths from first to last."""
        return [self._text(tokens, keys, (place + 0.5) / count) for place in range(count)]

    def _text(self, tokens: int, keys: int, depth: float) -> synthetic.Needle:
        draw, stop = self._draw, self._encode(".")
        statements = []
        for name in draw.sample(synthetic.NEEDLE_NAMES, keys):
            question = self._encode(synthetic.NEEDLE.format(name=name))
            answer = self._encode(" " + " ".join(draw.sample(self._words, synthetic.ANSWER_WORDS)))
            statements.append((question, answer))
        question, answer = statements[0]
        written = sum(len(ask) + len(reply) + 2 * len(stop) for ask, reply in statements)
        outside = len(self._prefix) + written + len(stop) + len(question) + len(answer)
        if tokens - outside < MIN_HAYSTACK:
            raise InputError(
                f"{tokens} tokens are too few for {pluralise(keys, 'statement')} and a question",
                f"use a base of at least {outside + MIN_HAYSTACK}",
            )
        filler = self._filler(tokens - outside)
        places = [
            round(depth * len(filler)),
            *(draw.randint(0, len(filler)) for _ in range(keys - 1)),
        ]
        ids, needle, at = list(self._prefix), 0, 0
        for place, (ask, reply) in sorted(zip(places, statements, strict=True)):
            ids += [*filler[at:place], *stop, *ask]
            if reply is answer:
                needle = len(ids)
            ids += [*reply, *stop]
            at = place
        ids += [*filler[at:], *stop, *question]
        last = len(ids) - 1
        copies = tuple((last + index, needle + index) for index in range(len(answer)))
        return synthetic.Needle((*ids, *answer), copies)

    def _filler(self, tokens: int) -> list[int]:
        """A piece of the articles, which begin again where they end."""
        first = self._draw.randrange(len(self._article))
        rounds = (first + tokens) // len(self._article) + 1
        return (self._article * rounds)[first : first + tokens]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class _RecallRun:
    """A model that reads needles one at a time, so that memory is linear in the longest."""

    def __init__(self, model: build.Model, bar: Progress) -> None:
        self.model, self.bar = model, bar
        self.scope = cached_run.head_scope(model)

    def measure(self, needles: Sequence[synthetic.Needle]) -> tuple[np.ndarray, np.ndarray]:
        """The fraction copied of each text, and the retrieval score of each head in it."""
        copied, scores = [], []
        for needle in needles:
            measured, _ = scores_by_text.measure_needles(self.model, [needle], [1], progress=False)
            copied.append(measured.facts["copied"])
            scores.append(measured.values[0])
            self.bar.advance(len(needle.ids))
        return np.array(copied), np.array(scores)

    def retrieval_heads(self, needles: Sequence[synthetic.Needle]) -> tuple[Head, ...]:
        """The heads above the threshold of retrieval heads, strongest first."""
        _, values = self.measure(needles)
        chance = float(np.mean([1 / len(set(needle.ids)) for needle in needles]))
        least = criteria.threshold_table()["retrieval"].over_uniform(np.array([chance]))[0]
        scores = np.nan_to_num(values.mean(0))
        order = np.argsort(-scores, kind="stable")
        return tuple(self.scope.heads[index] for index in order if scores[index] >= least)

    def copied_without(
        self, ablation: HeadAblation, heads: tuple[Head, ...], needles: Sequence[synthetic.Needle]
    ) -> float:
        """The mean fraction copied when heads are off."""
        final = Site(-1, Tap.FINAL, stack=self.model.readout_stack)
        special = synthetic.SpecialTokens.of(self.model)
        copied = []
        for needle in needles:
            editor = cached_run.ActivationEditor(ablation.changes(heads), [final])
            inputs: ModelInputs = synthetic.inputs_from_ids(self.model, special, [needle.ids])
            self.model.run_hidden(inputs, editor)
            right = synthetic.copied_tokens(self.model, editor[final].of(0), needle)
            copied.append(float(right.float().mean()))
            self.bar.advance(len(needle.ids))
        return float(np.mean(copied))
