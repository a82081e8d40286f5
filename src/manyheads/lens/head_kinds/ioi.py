"""Indirect objects: a ready-made task, and the heads that solve it told by what they do.

"When Mary and John went to the shop, John gave a book to": the answer is the name said once
(arXiv 2211.00593).
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
from manyheads.lens.inputs.cached_run import Part, part_of
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.lens.inputs.texts import read, run
from manyheads.lens.results.by_head import ByHead
from manyheads.models.decoder import Decoder
from manyheads.models.eval_mode import resting
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

# A head is named by shares of the mean logit difference, in the direct logit attribution for the
# first two, by path patching into the name movers' queries for the third.
MOVES = 0.1
OPPOSES = -0.1
INHIBITS = 0.05


@dataclass(frozen=True, slots=True)
class IndirectObjects:
    """Prompts, the same with three other names, the ids of the names, and where they stand."""

    clean: tuple[str, ...]
    corrupted: tuple[str, ...]
    objects: tuple[int, ...]
    subjects: tuple[int, ...]

    @property
    def metric(self) -> LogitDifference:
        """logit(indirect object) - logit(subject) after the last word."""
        return LogitDifference(answer=self.objects, distractor=self.subjects)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class NameHeads(ByHead):
    """Scores of each head: "direct", "inhibition", and attention "to_object" and "to_subject".

    "direct" is the direct logit attribution on the logit difference, "inhibition" the share of it
    that reaches the name movers' queries, and attention is that of the last word.
    """

    @property
    def roles(self) -> dict[str, list[Head]]:
        """Name movers, negative name movers and inhibition heads."""
        return {
            name: [Head.parse(each) for each in heads]
            for name, heads in self.facts["roles"].items()
        }


def indirect_objects(model: Decoder, prompts: int = 64, seed: int = 0) -> IndirectObjects:
    """Prompts with names that are single tokens of the model's tokenizer."""
    if not isinstance(model, Decoder):
        raise InputError(f"a {type(model).__name__} writes no next word", "use a Decoder")
    if prompts < 1:
        raise InputError(f"prompts={prompts} is no task", "use 1 or more")
    names = _single_tokens(model.tokenizer)
    draw = random.Random(seed)
    clean, corrupted, objects, subjects = [], [], [], []
    for place in range(prompts):
        template = TEMPLATES[place % len(TEMPLATES)]
        one, other, *strangers = draw.sample(sorted(names), 5)
        words = {"place": draw.choice(PLACES), "thing": draw.choice(THINGS)}
        giver = one if place % 2 else other
        clean.append(template.format(first=one, second=other, giver=giver, **words))
        a, b, c = strangers
        corrupted.append(template.format(first=a, second=b, giver=c, **words))
        objects.append(names[other if place % 2 else one])
        subjects.append(names[giver])
    return IndirectObjects(tuple(clean), tuple(corrupted), tuple(objects), tuple(subjects))


def find_name_heads(
    model: Decoder, task: IndirectObjects | None = None, *, progress: bool = True
) -> NameHeads:
    """Name movers, negative name movers and inhibition heads, each by its scores."""
    task = indirect_objects(model) if task is None else task
    part = part_of(model)
    direct = attribute_logits(model, task.clean, task.objects, task.subjects)
    looks = _looks(part, task)
    column = direct.heads["logit"].means
    difference = float(direct.logits.mean())
    movers = tell_roles(part.heads, column / abs(difference), looks)
    inhibition = np.full(len(part.heads), np.nan)
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
        inhibition = paths["share"].means
    roles = tell_roles(part.heads, column / abs(difference), looks, inhibition)
    return NameHeads(
        kind="name heads",
        blocks=part.blocks,
        means={
            "direct": column,
            "inhibition": inhibition,
            "to_object": looks[0],
            "to_subject": looks[1],
        },
        errors={"direct": direct.heads["logit"].errors},
        facts={
            "logit_difference": difference,
            "accuracy": _accuracy(direct),
            "prompts": len(task.clean),
            "roles": {name: [str(head) for head in heads] for name, heads in roles.items()},
        },
    )


def tell_roles(
    heads: tuple[Head, ...],
    direct: Float[np.ndarray, " h"],
    looks: Float[np.ndarray, "2 h"],
    inhibition: Float[np.ndarray, " h"] | None = None,
) -> dict[str, list[Head]]:
    """Which head is what, strongest first; `direct` is in units of the logit difference.

    Movers of either sign look at the object more than at the subject, inhibition heads the other
    way round.
    """
    to_object, to_subject = looks
    movers = (direct >= MOVES) & (to_object > to_subject)
    negative = (direct <= OPPOSES) & (to_object > to_subject)
    found = {
        "name movers": _ranked(heads, movers, direct),
        "negative name movers": _ranked(heads, negative, -direct),
        "inhibition heads": [],
    }
    if inhibition is not None:
        known = np.nan_to_num(inhibition)
        inhibits = (known >= INHIBITS) & (to_subject > to_object)
        found["inhibition heads"] = _ranked(heads, inhibits, known)
    return found


def _ranked(heads: tuple[Head, ...], chosen: Any, scores: Float[np.ndarray, " h"]) -> list[Head]:
    return [heads[place] for place in np.argsort(-scores, kind="stable") if chosen[place]]


def _accuracy(direct: DirectLogits) -> float:
    """How often the object is found likelier than the subject."""
    return float((direct.logits > 0).double().mean())


def _single_tokens(tokenizer: Any) -> dict[str, int]:
    if tokenizer is None:
        raise InputError(
            "this model has no tokenizer", "load it from a folder with one, or set model.tokenizer"
        )
    found: dict[str, int] = {}
    for name in NAMES:
        ids = tokenizer.encode(f" {name}", add_special_tokens=False).ids
        if len(ids) == 1 and ids[0] not in found.values():
            found[name] = ids[0]
    if len(found) < 5:
        raise InputError(
            f"only {len(found)} of {len(NAMES)} names are single tokens of this tokenizer",
            "use one with a larger vocabulary",
        )
    return found


def _looks(part: Part, task: IndirectObjects) -> Float[np.ndarray, "2 h"]:
    """How much the last word looks at the object, and at the second naming of the subject."""
    given = read(part.model, list(task.clean))
    assert given.ids is not None
    record = Record([part.site(layer, Tap.PATTERN) for layer in part.layers])
    with resting(part.model), torch.no_grad():
        run(part.model, given, record)
    sums = np.zeros((2, len(part.heads)))
    for text, pair in enumerate(zip(task.objects, task.subjects, strict=True)):
        ids = given.ids.of(text)
        places = [int((ids == name).nonzero()[-1]) for name in pair]
        rows = []
        for layer in part.layers:
            patterns = record[part.site(layer, Tap.PATTERN)]
            assert isinstance(patterns, Patterns)
            rows.append(patterns.of(text)[:, -1, places])
        sums += torch.cat(rows).T.double().cpu().numpy()
    return sums / len(task.clean)
