"""A model set by hand that learns a task from examples, by one head that carries the task.

Words x0 to x7 have answers a0 to a7; in task t the answer of xi is a(i + t). Layer 0 puts the word
before at each token. In layer 1 head t sees that an answer is that of task t. In layer 2 head 0
gathers this evidence at the last token: it is the function-vector head. In layer 3 head t reads
the word and writes its answer, if the evidence is for task t.
"""

import random
from typing import Any

import torch

from manyheads.lens.inputs.few_shot import FewShotPrompts, exchange
from manyheads.parts.masks import Causal
from tests.lens.planted import SHARP, Look, Stream, attention_of, model_of_looks, offset_look

TASKS, WORDS, SHOTS = 4, 8, 6
VOCABULARY, PLACES = 1 + 2 * WORDS, 2 + 2 * SHOTS


class TaskStream(Stream):
    """With room for the evidence at each answer, and for the task at the last token."""

    __slots__ = ()

    @property
    def evidence(self) -> slice:
        return slice(self.match_slice.stop, self.match_slice.stop + self.words)

    @property
    def task(self) -> slice:
        return slice(self.evidence.stop, self.evidence.stop + self.words)

    @property
    def width(self) -> int:
        return self.task.stop


def word(index: int) -> int:
    return 1 + index


def answer(index: int, task: int) -> int:
    return 1 + WORDS + (index + task) % WORDS


def task_model() -> Any:
    stream = TaskStream(VOCABULARY, PLACES)
    here = SHARP * torch.eye(PLACES)
    detectors, appliers = [], []
    for task in range(TASKS):
        matches, evidence, answers = (torch.zeros(VOCABULARY, VOCABULARY) for _ in range(3))
        for index in range(WORDS):
            matches[answer(index, task), word(index)] = SHARP
            evidence[task, answer(index, task)] = 1.0
            answers[answer(index, task), word(index)] = 1.0
        # The first token is read unless both the place and the word before match.
        matches[:, 0] = 1.5 * SHARP
        detectors.append(
            Look(words=matches, places=here, words_before=True, writes=evidence, to="evidence")
        )
        appliers.append(Look(words=first_word(), places=here, writes=answers))
    layers = [
        [Look(places=offset_look(-1, PLACES).places, to="before"), Look()],
        detectors,
        [Look(to="task"), Look(writes=0.1 * torch.eye(VOCABULARY))],
        appliers,
    ]
    model = model_of_looks(stream, layers, Causal())
    with torch.no_grad():
        model.readout.weight.zero_()
        model.readout.weight[:, stream.match_slice] = 8 * torch.eye(VOCABULARY)
        size = stream.size
        gather = attention_of(model.stack, 2)
        value = gather.projections()["value"]
        value[:VOCABULARY] = 0
        value[:VOCABULARY, stream.evidence] = 2 * torch.eye(VOCABULARY)
        query = attention_of(model.stack, 3).projections()["query"]
        for task in range(TASKS):
            query[task * size, stream.task.start + task] = -20.0
    return model


def first_word() -> torch.Tensor:
    scores = torch.zeros(VOCABULARY, VOCABULARY)
    scores[:, 0] = SHARP + 10.0
    return scores


def task_prompts(prompts: int = 8, seed: int = 0) -> FewShotPrompts:
    draw = random.Random(seed)
    columns: tuple[list[Any], ...] = ([], [], [], [], [])
    for task in range(TASKS):
        for _ in range(prompts):
            query, *included = draw.sample(range(WORDS), SHOTS + 1)
            right = [answer(index, task) for index in included]
            for column, labels in zip(columns, (right, exchange(right, draw), []), strict=False):
                pairs = zip(included, labels, strict=False)
                column.append(
                    (
                        0,
                        *(token for index, label in pairs for token in (word(index), label)),
                        word(query),
                    )
                )
            columns[3].append(answer(query, task))
            columns[4].append(f"add {task}")
    clean, shuffled, zero_shot, answers, tasks = map(tuple, columns)
    return FewShotPrompts(clean, shuffled, zero_shot, answers, tasks, {})
