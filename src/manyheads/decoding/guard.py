"""A guard: an encoder reads what a decoder writes, sentence by sentence, and stops or marks it."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NamedTuple

from manyheads.annotations import Probability
from manyheads.argument_checks import check_fields
from manyheads.encoding import encode, text_reader, text_scores
from manyheads.encoding.filter_rule import TextRule
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import Model

GuardAction = Literal["stop", "mark"]

# Names of classes that are refused where the user names none.
REFUSED_CLASSES = frozenset(
    ("unsafe", "toxic", "harmful", "spam", "hate", "offensive", "nsfw", "jailbreak", "injection")
)
DEFAULT_THRESHOLD = 0.5
# The end of a sentence: a mark before white space, one of Chinese or Japanese, or a line's end.
SENTENCE_END = re.compile(r"""[.!?…]+["')\]»”’]*(?=\s)|[。！？]+|\n+""")
# A text without marks is read in pieces of this many characters.
LONGEST_SENTENCE = 600


@check_fields
@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """A classifier and what it refuses.

    `refuse` is one of its classes, refused from the probability `threshold` (0.5) on, or a rule
    such as `score >= 3` or `label == "toxic" and probability > 0.8`. Without it the one class is
    refused that is named unsafe, toxic, harmful, spam, hate, offensive, nsfw, jailbreak or
    injection. `action="stop"` ends a text before the refused sentence, which is never shown;
    "mark" only names it in the result.

    >>> from manyheads.models.build import build
    >>> from manyheads.checkpoints.classification_head import with_classes
    >>> from manyheads.checkpoints.folder import load
    >>> model = with_classes(load("house-bert"), ("fine", "toxic"))
    >>> Guard(model).rule.text, Guard(model, refuse="fine", threshold=0.9).rule.text
    ('probability["toxic"] >= 0.5', 'probability["fine"] >= 0.9')
    """

    model: Model
    _: KW_ONLY
    refuse: str | None = None
    action: GuardAction = "stop"
    threshold: Probability | None = None
    rule: TextRule = field(init=False)
    label: str | None = field(init=False)

    def __post_init__(self) -> None:
        classes = text_scores.scored_classes(self.model)
        if text_reader.require_text_model(self.model).tokenizer is None:
            raise InputError("the guard has no tokenizer", "load it from a folder that has one")
        label = self.refuse
        if label is None:
            labels = [name for name in classes if name.lower() in REFUSED_CLASSES]
            if len(labels) != 1:
                names = ", ".join(classes) or "score, which is compared in a rule"
                remedy = f"pass Guard(model, refuse=...), one of {names}"
                raise InputError("the guard does not say what it refuses", remedy)
            label = labels[0]
        object.__setattr__(self, "label", label if label in classes else None)
        object.__setattr__(self, "rule", self._rule(label, classes))

    def _rule(self, refuse: str, classes: Sequence[str]) -> TextRule:
        if refuse in classes:
            name = refuse.replace("\\", "\\\\").replace('"', '\\"')
            threshold = DEFAULT_THRESHOLD if self.threshold is None else self.threshold
            return TextRule.parse(f'probability["{name}"] >= {float(threshold)}', "refuse")
        if not re.search(r"[<>=]|\bin\b|^truncated$", refuse):
            remedy = f"use {', '.join(classes)}, or a rule" if classes else "use 'score >= 0.5'"
            problem = f"refuse={refuse!r} is neither a class of the guard nor a rule"
            raise InputError(problem, remedy)
        if self.threshold is not None:
            raise ConfigError(
                f"threshold={self.threshold} is for a class, and refuse={refuse!r} is a rule",
                "write the number into the rule",
            )
        rule = TextRule.parse(refuse, "refuse")
        rule.refuse_columns("a generated text has no columns")
        rule.check_classes(classes)
        return rule


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSentence:
    """A sentence that the guard refused: its number, its characters and what the guard said.

    `label` and `probability` are those of the refused class, or of the most likely one where a
    rule refused; a regression model has neither.
    """

    sentence: int
    start: int
    end: int
    text: str
    label: str | None
    probability: float | None
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardReport:
    """What the guard found in one text, and what it cost.

    `seconds` is its time for all texts of the call, and `fraction` its share of the call's time.
    """

    action: GuardAction
    sentences: int
    refused: tuple[RefusedSentence, ...]
    seconds: float
    fraction: float


class GuardInput(NamedTuple):
    """The pieces of one text so far, and whether it is complete."""

    sequence: int
    pieces: Sequence[str]
    complete: bool


@dataclass(slots=True)
class GuardedText:
    """One text as far as the guard has read it."""

    text: str = ""
    pieces: int = 0
    # Characters up to here were read; with "stop" the text may end at `end`.
    checked: int = 0
    sentences: int = 0
    refused: list[RefusedSentence] = field(default_factory=list)
    end: int | None = None

    def take(self, pieces: Sequence[str], complete: bool) -> list[tuple[int, int]]:
        """The sentences that are complete now and were not before."""
        self.text += "".join(pieces[self.pieces :])
        self.pieces = len(pieces)
        spans = list(sentence_spans(self.text, self.checked, complete))
        if spans:
            self.checked = spans[-1][1]
        return [span for span in spans if self.text[slice(*span)].strip()]


def sentence_spans(text: str, start: int, complete: bool) -> Iterable[tuple[int, int]]:
    """The sentences of a text from `start` on; what follows the last mark only if it is complete.

    >>> list(sentence_spans("One. Two costs 3.5! And", 0, complete=False))
    [(0, 4), (4, 19)]
    """
    while True:
        match = SENTENCE_END.search(text, start)
        end = match.end() if match else len(text)
        if end - start > LONGEST_SENTENCE:
            cut = text.rfind(" ", start + 1, start + LONGEST_SENTENCE)
            end = cut if cut > start else start + LONGEST_SENTENCE
        elif not match:
            if complete and start < end:
                yield start, end
            return
        yield start, end
        start = end


class GuardRun:
    """The guard during one call: the state of every text, and the time it takes."""

    def __init__(self, guard: Guard, count: int) -> None:
        self.guard = guard
        self.texts = [GuardedText() for _ in range(count)]
        self.seconds = 0.0

    def check(self, inputs: Iterable[GuardInput]) -> set[int]:
        """Read new sentences of all texts in one batch; returns the texts that must stop."""
        started = time.perf_counter()
        spans = [
            (index, span)
            for index, pieces, complete in inputs
            for span in self.texts[index].take(pieces, complete)
        ]
        if spans:
            model = self.guard.model
            sentences = [self.texts[index].text[slice(*span)].strip() for index, span in spans]
            tokens = text_scores.tokenize_texts(model, sentences, None)
            scores = text_scores.score_texts(model, tokens, encode.Options(progress=False))
            for place, (index, span) in enumerate(spans):
                self._judge(self.texts[index], span, scores, place)
        self.seconds += time.perf_counter() - started
        return {index for index, _ in spans if self.texts[index].end is not None}

    def released(self, index: int) -> str:
        """The text that may be shown."""
        text = self.texts[index]
        if self.guard.action == "mark":
            return text.text
        return text.text[: text.checked if text.end is None else text.end]

    def report(self, index: int, seconds: float) -> GuardReport:
        text = self.texts[index]
        return GuardReport(
            action=self.guard.action,
            sentences=text.sentences,
            refused=tuple(text.refused),
            seconds=self.seconds,
            fraction=self.seconds / max(seconds, self.seconds, 1e-9),
        )

    def _judge(
        self, text: GuardedText, span: tuple[int, int], scores: text_scores.TextScores, place: int
    ) -> None:
        if text.end is not None:
            return
        text.sentences += 1
        decide = self.guard.rule.decide
        if not (scores.tokens[place] and decide(lambda name: scores.value(name, place))):
            return
        label, probability = self.guard.label, None
        if scores.classes:
            label = label or scores.label(place)
            probability = scores.probabilities[place][scores.classes.index(label)]
        text.refused.append(
            RefusedSentence(
                sentence=text.sentences,
                start=span[0],
                end=span[1],
                text=text.text[slice(*span)].strip(),
                label=label,
                probability=probability,
                score=scores.scores[place],
            )
        )
        if self.guard.action == "stop":
            text.end = span[0]
