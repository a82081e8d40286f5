"""Indirect object identification (IOI, arXiv 2211.00593): prompts, and the heads of its circuit.

"When Mary and John went to the shop, John gave a book to": the answer is the name that occurs once.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.attribution.direct_logits import DirectLogits, attribute_logits
from manyheads.lens.causal.ablation import replace_heads
from manyheads.lens.causal.path_patching import patch_paths
from manyheads.lens.inputs import cached_run, metrics, texts
from manyheads.lens.results.tables import ByHead
from manyheads.models import build, decoder
from manyheads.taps import Head, Patterns, Site, Tap

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
# patching into the queries of the name movers for the third, and by the rise of the direct effect
# without the name movers for backups.
MOVER_ABOVE = 0.1
NEGATIVE_BELOW = -0.1
INHIBITION_ABOVE = 0.05
BACKUP_ABOVE = 0.1
# What a name mover's ablation must change, as a fraction of its direct effect and in errors.
MIN_EFFECT, MIN_ERRORS = 0.25, 2.0


@dataclass(frozen=True, slots=True)
class IOIPrompts:
    """Prompts, the same prompts with three other names, and the token ids of the names.

    A prompt is a text, or a tuple of token ids.
    """

    clean: tuple[str | tuple[int, ...], ...]
    corrupted: tuple[str | tuple[int, ...], ...]
    objects: tuple[int, ...]
    subjects: tuple[int, ...]

    @property
    def metric(self) -> metrics.LogitDifference:
        """logit(indirect object) - logit(subject) after the last word."""
        return metrics.LogitDifference(answer=self.objects, distractor=self.subjects)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class IOIHeads(ByHead):
    """Scores of each head: "direct", "ablation", "takeover", "inhibition", "to_object", ...

    "direct" is the direct attribution to the logit difference. "ablation" is how far the difference
    falls if the head's output is that on other names, "takeover" how much the direct effects of
    all other heads rise then; both are known for the candidates. "backup" is the rise of the head's
    own direct effect when all name movers are ablated. "inhibition" is the fraction of the
    difference that goes through the name movers' queries. "to_object" and "to_subject" are the
    attention of the last token.
    """

    @property
    def roles(self) -> dict[str, list[Head]]:
        """Name movers, negative name movers, inhibition heads and backup name movers.

        Name movers of either sign are confirmed by ablation: the logit difference changes, or
        other heads take over. Those with a direct effect alone are in `unconfirmed`. A backup name
        mover takes over when the name movers are ablated (section 3.4 of arXiv 2211.00593).
        """
        return {
            name: [Head.parse(head) for head in heads]
            for name, heads in self.metadata["roles"].items()
        }

    @property
    def unconfirmed(self) -> list[Head]:
        """Heads that resemble name movers by direct effect alone."""
        return [Head.parse(head) for head in self.metadata["unconfirmed"]]


@wrapping_models
def ioi_prompts(model: decoder.Decoder, prompts: int = 64, seed: int = 0) -> IOIPrompts:
    """Prompts with names that are single tokens of the model's tokenizer."""
    if not isinstance(model, decoder.Decoder):
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
        first, second, a, b, c = draw.sample(sorted(names), 5)
        words = {"place": draw.choice(PLACES), "thing": draw.choice(THINGS)}
        giver, receiver = (first, second) if number % 2 else (second, first)
        clean.append(template.format(first=first, second=second, giver=giver, **words))
        corrupted.append(template.format(first=a, second=b, giver=c, **words))
        objects.append(names[receiver])
        subjects.append(names[giver])
    return IOIPrompts(tuple(clean), tuple(corrupted), tuple(objects), tuple(subjects))


@wrapping_models
def find_ioi_heads(
    model: decoder.Decoder, task: IOIPrompts | None = None, *, progress: bool = True
) -> IOIHeads:
    """Name movers of either sign, their backups, and inhibition heads, each by its scores."""
    task = ioi_prompts(model) if task is None else task
    scope = cached_run.head_scope(model)
    scope.check_patterns(scope.layers)
    direct = attribute_logits(model, task.clean, task.objects, task.subjects)
    attention = _last_token_attention(scope, task)
    column = direct.heads["logit"].means
    difference = float(direct.logits.mean())
    by_effect = assign_roles(scope.heads, column / abs(difference), attention)
    knockout = _Knockout(scope, task, direct)
    candidates = by_effect["name movers"] + by_effect["negative name movers"]
    confirmed, ablations = set(), np.full((3, len(column)), np.nan)
    for head in candidates:
        index = scope.heads.index(head)
        ablations[:, index] = knockout.alone(head)
        if is_confirmed(float(column[index]), *ablations[:, index].tolist()):
            confirmed.add(head)
    roles = {
        name: [head for head in heads if head in confirmed] for name, heads in by_effect.items()
    }
    movers = roles["name movers"]
    backup, roles["backup name movers"] = knockout.backups(movers)
    inhibition = np.full(len(scope.heads), np.nan)
    if movers:
        prompts = task.clean, task.corrupted
        paths = patch_paths(model, *prompts, task.metric, receivers=movers, progress=progress)
        inhibition = paths["effect"].means
    roles["inhibition heads"] = assign_roles(
        scope.heads, column / abs(difference), attention, inhibition
    )["inhibition heads"]
    return IOIHeads(
        kind="IOI heads",
        blocks=scope.blocks,
        means={
            "direct": column,
            "ablation": ablations[0],
            "takeover": ablations[2],
            "backup": backup[0],
            "inhibition": inhibition,
            "to_object": attention[0],
            "to_subject": attention[1],
        },
        errors={
            "direct": direct.heads["logit"].errors,
            "ablation": ablations[1],
            "backup": backup[1],
        },
        metadata={
            "logit_difference": difference,
            # Of the prompts where the object is more likely than the subject.
            "accuracy": float((direct.logits > 0).double().mean()),
            "prompts": len(task.clean),
            "roles": {name: [str(head) for head in heads] for name, heads in roles.items()},
            "unconfirmed": [str(head) for head in candidates if head not in confirmed],
        },
    )


def is_confirmed(direct: float, change: float, error: float, takeover: float) -> bool:
    """Whether ablation agrees with a direct effect.

    The logit difference must fall by `change` beyond its error, or other heads must take over.

    >>> is_confirmed(1.0, 0.8, 0.1, 0.0), is_confirmed(1.0, 0.0, 0.1, 0.9)
    (True, True)
    >>> is_confirmed(1.0, 0.02, 0.1, 0.0), is_confirmed(-1.0, 0.8, 0.1, 0.0)
    (False, False)
    """
    sign = np.sign(direct)
    moves = sign * change > max(MIN_ERRORS * error, MIN_EFFECT * abs(direct))
    return bool(moves or sign * takeover > MIN_EFFECT * abs(direct))


class _Knockout:
    """Runs in which some heads write what they write on the prompts with other names."""

    def __init__(self, scope: cached_run.HeadScope, task: IOIPrompts, direct: DirectLogits) -> None:
        self.scope, self.task, self.direct = scope, task, direct
        sites = [scope.site(layer, Tap.HEAD_OUTPUT) for layer in scope.layers]
        self._corrupted = cached_run.ActivationEditor({}, sites)
        with build.eval_mode(scope.model), torch.no_grad():
            scope.model.run_inputs(
                texts.read_inputs(scope.model, list(task.corrupted)), self._corrupted
            )
        self._index = {head: index for index, head in enumerate(scope.heads)}
        self._weights = torch.ones(len(task.clean))

    def alone(self, head: Head) -> tuple[float, float, float]:
        """How far the logit difference falls without a head, its error, and what others add."""
        ablated = self._run([head])
        fall = self.direct.logits - ablated.logits
        change, error = map(float, metrics.weighted_mean(fall, self._weights))
        rises = ablated.by_head - self.direct.by_head
        rises[:, self._index[head]] = 0
        return change, error, float(rises.sum(1).mean())

    def backups(self, movers: Sequence[Head]) -> tuple[Float[np.ndarray, "2 h"], list[Head]]:
        """How much direct effects rise without the name movers, and the heads that take over."""
        rise = np.full((2, len(self._index)), np.nan)
        if not movers:
            return rise, []
        rises = self._run(movers).by_head - self.direct.by_head
        rise[:] = torch.stack(metrics.weighted_mean(rises, self._weights)).numpy()
        rise[:, [self._index[head] for head in movers]] = np.nan
        to_object, to_subject = _last_token_attention(self.scope, self.task, self._edits(movers))
        least = BACKUP_ABOVE * abs(float(self.direct.logits.mean()))
        mean, error = np.nan_to_num(rise)
        takes = (mean >= least) & (mean > MIN_ERRORS * error) & (to_object > to_subject)
        return rise, _ranked(self.scope.heads, takes, mean)

    def _run(self, heads: Sequence[Head]) -> DirectLogits:
        task = self.task
        return attribute_logits(
            self.scope.model, task.clean, task.objects, task.subjects, edits=self._edits(heads)
        )

    def _edits(self, heads: Sequence[Head]) -> dict[Site, cached_run.EditFunction]:
        edits: dict[Site, cached_run.EditFunction] = {}
        for layer in {head.layer for head in heads}:
            site = self.scope.site(layer, Tap.HEAD_OUTPUT)
            own = [head.head for head in heads if head.layer == layer]
            edits[site] = replace_heads([own], self._corrupted[site].values)
        return edits


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
        effect = np.nan_to_num(inhibition)
        inhibits = (effect >= INHIBITION_ABOVE) & (to_subject > to_object)
        roles["inhibition heads"] = _ranked(heads, inhibits, effect)
    return roles


def _ranked(heads: tuple[Head, ...], chosen: Any, scores: Float[np.ndarray, " h"]) -> list[Head]:
    return [heads[index] for index in np.argsort(-scores, kind="stable") if chosen[index]]


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


def _last_token_attention(
    scope: cached_run.HeadScope,
    task: IOIPrompts,
    edits: Mapping[Site, cached_run.EditFunction] | None = None,
) -> Float[np.ndarray, "2 h"]:
    """The attention of the last token to the object, and to the last mention of the subject."""
    inputs = texts.read_inputs(scope.model, list(task.clean))
    assert inputs.ids is not None
    sites = [scope.site(layer, Tap.PATTERN) for layer in scope.layers]
    editor = cached_run.ActivationEditor(edits or {}, sites)
    with build.eval_mode(scope.model), torch.no_grad():
        scope.model.run_inputs(inputs, editor)
    sums = np.zeros((2, len(scope.heads)))
    for text, pair in enumerate(zip(task.objects, task.subjects, strict=True)):
        positions = [int((inputs.ids.of(text) == name).nonzero()[-1]) for name in pair]
        rows = []
        for layer in scope.layers:
            patterns = editor.recorded[scope.site(layer, Tap.PATTERN)]
            assert isinstance(patterns, Patterns)
            rows.append(patterns.shares(text)[:, -1, positions])
        sums += torch.cat(rows).T.double().cpu().numpy()
    return sums / len(task.clean)
