"""Few-shot prompts: words with their answers, the same with shuffled answers, and one word alone.

"Q: hot\\nA: cold\\n\\nQ: big\\nA:": from the examples the model knows that opposites are meant.
"""

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import cycle, islice

from manyheads.bridge.automatic import wrapping_models
from manyheads.encoding.text_reader import check_continues, require_text_model, resolve_max_length
from manyheads.errors import InputError
from manyheads.lens.inputs.synthetic import SpecialTokens, single_token
from manyheads.models import build
from manyheads.tokenizers import plain_tokenizer

SHOTS, PROMPTS = 6, 8
# A task needs more words than a prompt has, so that prompts differ.
MIN_PAIRS, MIN_TASKS = 12, 2
QUESTION, END = "Q: {word}\nA:", "\n\n"
Tasks = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class FewShotPrompts:
    """Prompts as token ids, three for each query: with examples, shuffled, and without any.

    In `shuffled` prompts the answers of the examples are exchanged. `answers` are the right next
    tokens, `tasks` the names of the prompts' tasks; `missing` has the tasks that were left out,
    and why.
    """

    clean: tuple[tuple[int, ...], ...]
    shuffled: tuple[tuple[int, ...], ...]
    zero_shot: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]
    tasks: tuple[str, ...]
    missing: Mapping[str, str]

    def __post_init__(self) -> None:
        parts = (self.clean, self.shuffled, self.zero_shot, self.answers, self.tasks)
        if len(set(map(len, parts))) > 1 or not self.clean:
            counts = ", ".join(str(len(part)) for part in parts)
            raise InputError(f"the prompts have {counts} items", "pass as many of each, at least 1")


@cache
def few_shot_tasks() -> dict[str, dict[str, str]]:
    """The words and answers of each task that comes with manyheads.

    >>> tasks = few_shot_tasks()
    >>> list(tasks)[:3], tasks["opposites"]["hot"], min(map(len, tasks.values())) >= 25
    (['capitals', 'opposites', 'plurals'], 'cold', True)
    """
    text = files(__package__).joinpath("few_shot.toml").read_text("utf-8")
    return tomllib.loads(text)


@wrapping_models
def few_shot_prompts(
    model: build.Model,
    tasks: Tasks | None = None,
    *,
    prompts: int = PROMPTS,
    shots: int = SHOTS,
    seed: int = 0,
) -> FewShotPrompts:
    """So many `prompts` of each task, with `shots` examples each.

    `tasks` has the words and answers of each task by its name, by default capitals, opposites,
    plurals, past tense, comparatives, participles, colors and categories. Answers must be single
    tokens after a space; a task with fewer than 12 such pairs is left out.
    """
    reader = require_text_model(model)
    check_continues(model)
    if reader.tokenizer is None:
        raise InputError(
            "this model has no tokenizer", "load it from a folder with one, or set model.tokenizer"
        )
    for name, value, least in (("prompts", prompts, 2), ("shots", shots, 2)):
        if value < least:
            raise InputError(
                f"{name} must be at least {least}, got {value}", f"use {least} or more"
            )
    tokenizer, prefix = plain_tokenizer(reader.tokenizer), SpecialTokens.of(reader).prefix
    limit = resolve_max_length(reader, None)
    draw = random.Random(seed)
    columns: tuple[list[tuple[int, ...]], ...] = ([], [], [])
    answers, names, missing = [], [], {}

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    between = encode(END)
    for name, words in (few_shot_tasks() if tasks is None else tasks).items():
        # Words that a tokenizer does not know look alike: one of them is enough.
        tokens = {
            tuple(encode(QUESTION.format(word=word))): token
            for word, answer in words.items()
            if (token := single_token(tokenizer, answer)) is not None
        }
        pairs = list(tokens.items())
        if len(pairs) < max(MIN_PAIRS, shots + 1):
            missing[name] = (
                f"only {len(pairs)} of {len(words)} pairs have a single token as their answer"
            )
            continue
        own = []
        for query, right in islice(cycle(draw.sample(pairs, len(pairs))), prompts):
            examples = draw.sample([pair for pair in pairs if pair[0] != query], shots)
            labels = exchange([label for _, label in examples], draw)
            own.append((query, right, examples, labels))
        longest = len(prefix) + max(
            len(query) + sum(len(word) + 1 + len(between) for word, _ in examples)
            for query, _, examples, _ in own
        )
        if limit is not None and longest > limit:
            missing[name] = f"a prompt has {longest} tokens, and the context {limit}"
            continue
        for query, right, examples, labels in own:
            shuffled = [(word, label) for (word, _), label in zip(examples, labels, strict=True)]
            for column, included in zip(columns, (examples, shuffled, []), strict=True):
                before = [token for word, label in included for token in (*word, label, *between)]
                column.append((*prefix, *before, *query))
            answers.append(right)
            names.append(name)
    if len(set(names)) < MIN_TASKS:
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise InputError(
            f"only {len(set(names))} tasks fit this model ({reasons})",
            "use fewer shots, a model with a larger vocabulary, or tasks of your own",
        )
    clean, shuffled_prompts, zero_shot = map(tuple, columns)
    return FewShotPrompts(clean, shuffled_prompts, zero_shot, tuple(answers), tuple(names), missing)


def exchange(labels: Sequence[int], draw: random.Random, tries: int = 20) -> list[int]:
    """The labels in another order, in which as few as possible are where they were.

    >>> exchange([1, 2, 3], random.Random(0))
    [2, 3, 1]
    """
    orders = [draw.sample(labels, len(labels)) for _ in range(tries)]
    return min(orders, key=lambda order: sum(a == b for a, b in zip(order, labels, strict=True)))
