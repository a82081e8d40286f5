"""Indirect object identification (IOI, arXiv 2211.00593): prompts, and the heads of its circuit.

"When Mary and John went to the shop, John gave a book to": the answer is the name that occurs once.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.lens.attribution.direct_logits import DirectLogits, attribute_logits
from manyheads.lens.causal.path_patching import patch_paths
from manyheads.lens.inputs.cached_run import HeadScope, head_scope
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.lens.inputs.texts import forward, read_inputs
from manyheads.lens.results.tables import ByHead
from manyheads.models.build import eval_mode
from manyheads.models.decoder import Decoder
from manyheads.taps import Head, Patterns, Record, Tap

NAMES = (
    *("Mary", "John", "Tom", "James", "Dan", "Martin", "Amy", "Anna", "Paul", "Mark", "Sarah"),
    *("Laura", "Peter", "David", "Emma", "Alice", "Robert", "Kate", "George", "Jack", "Rose"),
    *("Simon", "Lisa", "Adam", "Ruth", "Henry", "Jane", "Kevin", "Helen", "Frank", "Lucy"),
    *("Michael", "Susan", "Andrew", "Rachel", "Thomas", "Linda", "Charles", "Grace", "Daniel"),
)
PLACES = ("shop", "park", "school", "station", "house", "office", "garden", "hospital")
THINGS = ("book", "ring", "drink", "ball", "letter", "key", "hat", "flower")
TEMPLATES = (
    "When {first} and {second} went to the {place}, {giver} gave a {thing} to",
    "Then {first} and {second} met at the {place}. {giver} handed a {thing} to",
    "After {first} and {second} had left the {place}, {giver} passed a {thing} to",
)

# Fractions of the mean logit difference: by direct logit attribution for the first two, by path
# patching into the queries of the name movers for the third.
MOVER_ABOVE = 0.1
NEGATIVE_BELOW = -0.1
INHIBITION_ABOVE = 0.05


@dataclass(frozen=True, slots=True)
class IOIPrompts:
    """Prompts, the same prompts with three other names, and the token ids of the names."""

    clean: tuple[str, ...]
    corrupted: tuple[str, ...]
    objects: tuple[int, ...]
    subjects: tuple[int, ...]

    @property
    def metric(self) -> LogitDifference:
        """logit(indirect object) - logit(subject) after the last word."""
        return LogitDifference(answer=self.objects, distractor=self.subjects)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class IOIHeads(ByHead):
    """Scores of each head: "direct", "inhibition", and attention "to_object" and "to_subject".

    "direct" is the direct attribution to the logit difference, "inhibition" the fraction of it that
    goes through the name movers' queries, and attention is that of the last token.
    """

    @property
    def roles(self) -> dict[str, list[Head]]:
        """Name movers, negative name movers and inhibition heads."""
        return {
            name: [Head.parse(each) for each in heads]
            for name, heads in self.metadata["roles"].items()
        }


def ioi_prompts(model: Decoder, prompts: int = 64, seed: int = 0) -> IOIPrompts:
    """Prompts with names that are single tokens of the model's tokenizer."""
    if not isinstance(model, Decoder):
        raise InputError(
            f"a {type(model).__name__} does not predict the next token", "use a Decoder"
        )
    if prompts < 1:
        raise InputError(f"prompts must be at least 1, got {prompts}", "use 1 or more")
    names = _single_tokens(model.tokenizer)
    draw = random.Random(seed)
    clean, corrupted, objects, subjects = [], [], [], []
    for number in range(prompts):
        template = TEMPLATES[number % len(TEMPLATES)]
        one, other, *strangers = draw.sample(sorted(names), 5)
        words = {"place": draw.choice(PLACES), "thing": draw.choice(THINGS)}
        giver = one if number % 2 else other
        clean.append(template.format(first=one, second=other, giver=giver, **words))
        a, b, c = strangers
        corrupted.append(template.format(first=a, second=b, giver=c, **words))
        objects.append(names[other if number % 2 else one])
        subjects.append(names[giver])
    return IOIPrompts(tuple(clean), tuple(corrupted), tuple(objects), tuple(subjects))


def find_ioi_heads(
    model: Decoder, task: IOIPrompts | None = None, *, progress: bool = True
) -> IOIHeads:
    """Name movers, negative name movers and inhibition heads, each by its scores."""
    task = ioi_prompts(model) if task is None else task
    scope = head_scope(model)
    direct = attribute_logits(model, task.clean, task.objects, task.subjects)
    attention = _last_token_attention(scope, task)
    column = direct.heads["logit"].means
    difference = float(direct.logits.mean())
    movers = assign_roles(scope.heads, column / abs(difference), attention)
    inhibition = np.full(len(scope.heads), np.nan)
    if movers["name movers"]:
        paths = patch_paths(
            model,
            task.clean,
            task.corrupted,
            task.metric,
            receivers=movers["name movers"],
            through="query",
            progress=progress,
        )
        inhibition = paths["effect"].means
    roles = assign_roles(scope.heads, column / abs(difference), attention, inhibition)
    return IOIHeads(
        kind="IOI heads",
        blocks=scope.blocks,
        means={
            "direct": column,
            "inhibition": inhibition,
            "to_object": attention[0],
            "to_subject": attention[1],
        },
        errors={"direct": direct.heads["logit"].errors},
        metadata={
            "logit_difference": difference,
            "accuracy": _accuracy(direct),
            "prompts": len(task.clean),
            "roles": {name: [str(head) for head in heads] for name, heads in roles.items()},
        },
    )


def assign_roles(
    heads: tuple[Head, ...],
    direct: Float[np.ndarray, " h"],
    attention: Float[np.ndarray, "2 h"],
    inhibition: Float[np.ndarray, " h"] | None = None,
) -> dict[str, list[Head]]:
    """The heads of each role, strongest first; `direct` is a fraction of the logit difference.

    Name movers of either sign attend more to the object than to the subject, inhibition heads the
    other way round.
    """
    to_object, to_subject = attention
    movers = (direct >= MOVER_ABOVE) & (to_object > to_subject)
    negative = (direct <= NEGATIVE_BELOW) & (to_object > to_subject)
    roles = {
        "name movers": _ranked(heads, movers, direct),
        "negative name movers": _ranked(heads, negative, -direct),
        "inhibition heads": [],
    }
    if inhibition is not None:
        known = np.nan_to_num(inhibition)
        inhibits = (known >= INHIBITION_ABOVE) & (to_subject > to_object)
        roles["inhibition heads"] = _ranked(heads, inhibits, known)
    return roles


def _ranked(heads: tuple[Head, ...], chosen: Any, scores: Float[np.ndarray, " h"]) -> list[Head]:
    return [heads[index] for index in np.argsort(-scores, kind="stable") if chosen[index]]


def _accuracy(direct: DirectLogits) -> float:
    """The fraction of prompts where the object is more likely than the subject."""
    return float((direct.logits > 0).double().mean())


def _single_tokens(tokenizer: Any) -> dict[str, int]:
    if tokenizer is None:
        raise InputError(
            "this model has no tokenizer", "load it from a folder with one, or set model.tokenizer"
        )
    names: dict[str, int] = {}
    for name in NAMES:
        ids = tokenizer.encode(f" {name}", add_special_tokens=False).ids
        if len(ids) == 1 and ids[0] not in names.values():
            names[name] = ids[0]
    if len(names) < 5:
        raise InputError(
            f"only {len(names)} of {len(NAMES)} names are single tokens of this tokenizer",
            "use one with a larger vocabulary",
        )
    return names


def _last_token_attention(scope: HeadScope, task: IOIPrompts) -> Float[np.ndarray, "2 h"]:
    """The attention of the last token to the object, and to the last mention of the subject."""
    inputs = read_inputs(scope.model, list(task.clean))
    assert inputs.ids is not None
    record = Record([scope.site(layer, Tap.PATTERN) for layer in scope.layers])
    with eval_mode(scope.model), torch.no_grad():
        forward(scope.model, inputs, record)
    sums = np.zeros((2, len(scope.heads)))
    for text, pair in enumerate(zip(task.objects, task.subjects, strict=True)):
        ids = inputs.ids.of(text)
        positions = [int((ids == name).nonzero()[-1]) for name in pair]
        rows = []
        for layer in scope.layers:
            patterns = record[scope.site(layer, Tap.PATTERN)]
            assert isinstance(patterns, Patterns)
            rows.append(patterns.of(text)[:, -1, positions])
        sums += torch.cat(rows).T.double().cpu().numpy()
    return sums / len(task.clean)
