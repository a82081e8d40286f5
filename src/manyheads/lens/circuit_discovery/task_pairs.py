"""Tasks to find circuits for: pairs of prompts that align, and the metric that tells them apart."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from manyheads.bridge.automatic import wrapping_models
from manyheads.data.sources.rows import FileRows
from manyheads.errors import InputError
from manyheads.lens.attribution.attribute import find_token
from manyheads.lens.head_kinds.ioi import ioi_prompts
from manyheads.lens.inputs.aligned_pairs import check_aligned, unaligned_pairs
from manyheads.lens.inputs.metrics import LogitDifference, ProbabilityDifference
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models import build, decoder

# Greater-than (arXiv 2305.00586): "The war lasted from the year 1741 to the year 17".
EVENTS = (
    *("war", "siege", "trial", "journey", "project", "reign", "work", "voyage", "marriage"),
    *("campaign", "conflict", "dispute", "treaty", "study", "tour", "feud", "alliance"),
)
CENTURIES = tuple(range(11, 18))
# The start of corrupted prompts: every year comes after it.
EARLY = 1

# Agreement: "The keys to the cabinet", singular and plural.
SUBJECTS = (
    *("key", "author", "student", "friend", "boy", "girl", "book", "tree", "soldier", "officer"),
    *("teacher", "letter", "cat", "dog", "door", "film", "song", "picture", "leader", "player"),
    *("member", "artist", "writer", "guard", "nurse", "doctor", "idea", "law", "problem", "plan"),
    *("painting", "report", "river", "island", "road", "house", "school", "king", "event", "part"),
)
RELATIONS = ("near", "behind", "of", "from", "in")
PLACES = ("cabinet", "garden", "school", "city", "house", "office", "group", "town", "church")
VERBS = (("is", "are"), ("was", "were"), ("has", "have"))


class PromptPair(NamedTuple):
    """A clean and a corrupted prompt, and the tokens that the metric adds and subtracts."""

    clean: str
    corrupted: str
    answers: tuple[int, ...]
    wrong: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CircuitTask:
    """Clean and corrupted prompts that align pair by pair, and a metric that tells them apart.

    The metric reads the logits after the last token. `skipped` is how many pairs of a file did not
    align and were left out.
    """

    name: str
    clean: tuple[str, ...]
    corrupted: tuple[str, ...]
    metric: LogitDifference | ProbabilityDifference
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.clean)


@wrapping_models
def circuit_task(
    model: build.Model, task: str | Path, count: int = 32, seed: int = 0, *, skip: bool = False
) -> CircuitTask:
    """`count` pairs of prompts that align in the model's tokens.

    "ioi": which name comes next (arXiv 2211.00593), corrupted by three other names; "ioi-giver" is
    corrupted by the receiver in place of the giver, as in MIB (arXiv 2504.13151).
    "greater-than": a year after that of the prompt (arXiv 2305.00586), corrupted by the year 01.
    The metric is the probability of later years minus that of the others; where a token is one
    digit, that of the next digit, without the digit of the prompt itself.
    "agreement": the number of a verb, corrupted by the other number of its subject.
    A path is a .jsonl file with rows of "clean", "corrupted", "answer" and "wrong", the last two
    words of one token, of which the first `count` are read. With `skip` those that do not align
    are left out.
    """
    if not isinstance(model, decoder.Decoder):
        raise InputError(
            f"this {type(model).__name__} does not predict the next token", "use a Decoder"
        )
    if model.tokenizer is None:
        raise InputError(
            "this model has no tokenizer", "load it from a folder with one, or set model.tokenizer"
        )
    if count < 1:
        raise InputError(f"count must be at least 1, got {count}", "use 1 or more")
    name = str(task)
    if name in TASKS:
        pairs = list(TASKS[name](model, count, random.Random(seed)))
    elif Path(name).suffix == ".jsonl":
        pairs = list(_file(model, Path(name), count))
    else:
        raise InputError(
            f"the task {name!r} is unknown", f"use {', '.join(TASKS)} or the path of a .jsonl file"
        )
    inputs = [read_inputs(model, [pair[side] for pair in pairs]) for side in (0, 1)]
    dropped = unaligned_pairs(model, *inputs) if skip else []
    if len(dropped) == len(pairs) or not skip:
        check_aligned(model, *inputs)
    pairs = [pair for number, pair in enumerate(pairs) if number not in dropped]
    clean, corrupted, answers, wrong = zip(*pairs, strict=True)
    metric: LogitDifference | ProbabilityDifference
    if name == "greater-than":
        metric = ProbabilityDifference(answers=answers, distractors=wrong)
    else:
        first = [tuple(tokens[0] for tokens in side) for side in (answers, wrong)]
        metric = LogitDifference(answer=first[0], distractor=first[1])
    return CircuitTask(
        name=Path(name).name,
        clean=clean,
        corrupted=corrupted,
        metric=metric,
        skipped=len(dropped),
    )


def _file(model: decoder.Decoder, path: Path, count: int) -> Iterator[PromptPair]:
    rows = list(islice(FileRows((path,)), count))
    if not rows:
        raise InputError(f"{path} has no rows", 'write {"clean": ..., "corrupted": ..., ...}')
    for row in rows:
        clean, corrupted = row.text("clean"), row.text("corrupted")
        words = row.text("answer"), row.text("wrong")
        try:
            answer, wrong = (find_token(model.tokenizer, word, clean) for word in words)
        except InputError as error:
            raise InputError(f"{row.location}: {error.problem}", error.remedy) from None
        if answer == wrong:
            raise InputError(
                f"{row.location}: answer and wrong are the same token", "give another word"
            )
        yield PromptPair(clean, corrupted, (answer,), (wrong,))


def _ioi(
    model: decoder.Decoder,
    count: int,
    draw: random.Random,
    corrupt: Literal["names", "giver"] = "names",
) -> Iterator[PromptPair]:
    task = ioi_prompts(model, count, draw.getrandbits(32), corrupt=corrupt)
    tokens = zip(task.objects, task.subjects, strict=True)
    for clean, corrupted, (name, giver) in zip(task.clean, task.corrupted, tokens, strict=True):
        yield PromptPair(str(clean), str(corrupted), (name,), (giver,))


def _greater_than(model: decoder.Decoder, count: int, draw: random.Random) -> Iterator[PromptPair]:
    years = {century: dict(_year_tokens(model.tokenizer, century)) for century in CENTURIES}
    centuries = [century for century in CENTURIES if years[century]]
    if not centuries:
        raise InputError(
            "this tokenizer does not split years into a century and the rest",
            "use another task, or a .jsonl file",
        )
    for _ in range(count):
        event, century = draw.choice(EVENTS), draw.choice(centuries)
        start = draw.choice(list(years[century]))
        text = f"The {event} lasted from the year {century}{{:02d}} to the year {century}"
        yield PromptPair(text.format(start), text.format(EARLY), *years[century][start])


def _year_tokens(
    tokenizer: Any, century: int
) -> Iterator[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """For each start year the next tokens of later years only, and of those up to it only.

    A token of one digit may stand for both, and is neither then.
    """

    def encode(year: str) -> list[int]:
        return list(tokenizer.encode(f" {century}{year}", add_special_tokens=False).ids)

    stem = encode("")
    ids = {year: encode(f"{year:02d}") for year in range(100)}
    years: dict[int, list[int]] = defaultdict(list)
    for year, tokens in ids.items():
        if tokens[: len(stem)] == stem and len(tokens) == len(ids[EARLY]) > len(stem):
            years[tokens[len(stem)]].append(year)
    for start in range(EARLY + 1, 99):
        later = tuple(token for token in years if min(years[token]) > start)
        earlier = tuple(token for token in years if max(years[token]) <= start)
        if later and earlier and any(start in same for same in years.values()):
            yield start, (later, earlier)


def _agreement(model: decoder.Decoder, count: int, draw: random.Random) -> Iterator[PromptPair]:
    tokenizer = model.tokenizer

    def size(word: str) -> int:
        return len(tokenizer.encode(f" {word}", add_special_tokens=False).ids)

    subjects = [noun for noun in SUBJECTS if size(noun) == size(f"{noun}s")]
    verbs = [pair for pair in VERBS if size(pair[0]) == size(pair[1]) == 1]
    if not subjects or not verbs:
        raise InputError(
            "this tokenizer has no noun whose plural has as many tokens as its singular",
            "use another task, or a .jsonl file",
        )
    for number in range(count):
        noun, verb = draw.choice(subjects), draw.choice(verbs)
        rest = f"{draw.choice(RELATIONS)} the {draw.choice(PLACES)}"
        texts = [f"The {noun} {rest}", f"The {noun}s {rest}"]
        tokens = [(find_token(tokenizer, form, rest),) for form in verb]
        own = number % 2
        yield PromptPair(texts[own], texts[1 - own], tokens[own], tokens[1 - own])


TASKS: dict[str, Callable[[decoder.Decoder, int, random.Random], Iterator[PromptPair]]] = {
    "ioi": _ioi,
    "ioi-giver": partial(_ioi, corrupt="giver"),
    "greater-than": _greater_than,
    "agreement": _agreement,
}
