"""Indirect object identification (IOI, arXiv 2211.00593): prompts, and the heads of its circuit.

"When Mary and John went to the shop, John gave a book to": the answer is the name that occurs once.
"""

import math
import random
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.formatting import kind_of
from manyheads.lens.attribution.direct_logits import DirectLogits, attribute_logits
from manyheads.lens.causal import path_patching
from manyheads.lens.causal.ablation import replace_heads
from manyheads.lens.causal.evaluate import group_by
from manyheads.lens.causal.patching import RunPair
from manyheads.lens.inputs import cached_run, metrics, texts
from manyheads.lens.results.tables import ByHead
from manyheads.models import build, decoder
from manyheads.progress import Progress
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

# Fractions of the mean logit difference: by direct logit attribution, by path patching into the
# queries of name movers and subject suppressors, and by the rise of the direct effect without the
# name movers for backups.
DIRECT_ABOVE, INHIBITION_ABOVE, BACKUP_ABOVE = 0.1, 0.05, 0.1
# What ablation must change, as a fraction of a direct effect and in errors.
MIN_EFFECT, MIN_ERRORS = 0.25, 2.0
# The weight on a name that counts as a look at it.
LOOK_ABOVE = 0.1
# Prompts are divided into draws; a head has the role that it has in most of them.
DRAWS, DRAW_PROMPTS = 5, 6
# Heads whose effect in all prompts is above this fraction of a threshold are measured exactly.
CANDIDATE = 0.5
# Heads with a direct effect, by the name they look at and the sign of the effect.
WRITERS = {
    ("object", True): "name movers",
    ("object", False): "negative name movers",
    ("subject", True): "subject suppressors",
    ("subject", False): "subject movers",
    ("neither", True): "other writers",
    ("neither", False): "other writers",
}
ROLES = (*dict.fromkeys(WRITERS.values()), "inhibition heads", "backup name movers")

# By prompt: how much direct effects rise without the name movers, and where heads look then.
Backup = tuple[Tensor, Float[np.ndarray, "b 2 h"]]


@dataclass(frozen=True, slots=True)
class IOIPrompts:
    """Prompts, the same prompts with other names, and the token ids of the names.

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

    "direct" is the direct attribution to the logit difference. "estimate" is how far the difference
    would fall, by the gradient, if the head's output were that on other names, "ablation" how far
    it falls, and "takeover" how much the direct effects of all other heads rise then; the last two
    are known for the candidates. "backup" is the rise of the head's own direct effect when all
    name movers are ablated. "inhibition" is the fraction of the difference that goes through the
    queries of name movers and subject suppressors. "to_object" and "to_subject" are the attention
    of the last token.
    """

    @property
    def roles(self) -> dict[str, list[Head]]:
        """The heads of each role, strongest first; a head has at most one.

        Name movers look at the object and write for it, negative ones against it; subject
        suppressors look at the subject and write against it, subject movers for it; other writers
        look at neither. All of them are confirmed by ablation: the logit difference changes, or
        other heads take over. Those with a direct effect alone are in `unconfirmed`. Inhibition
        heads look at the subject and change where movers and suppressors look; a backup name mover
        takes over when the name movers are ablated (section 3.4 of arXiv 2211.00593). A role must
        hold in most of the draws that the prompts are divided into: `agreement` has their share.
        """
        return {
            name: [Head.parse(head) for head in heads]
            for name, heads in self.metadata["roles"].items()
        }

    @property
    def agreement(self) -> dict[Head, float]:
        """The share of the draws in which a head has its role."""
        shares = self.metadata.get("agreement", {})
        return {Head.parse(head): share for head, share in shares.items()}

    @property
    def unconfirmed(self) -> list[Head]:
        """Heads with a direct effect that ablation does not confirm."""
        return [Head.parse(head) for head in self.metadata["unconfirmed"]]


@wrapping_models
def ioi_prompts(
    model: decoder.Decoder,
    prompts: int = DRAWS * DRAW_PROMPTS,
    seed: int = 0,
    *,
    corrupt: Literal["names", "giver"] = "names",
) -> IOIPrompts:
    """Prompts with names that are single tokens of the model's tokenizer.

    Corrupted prompts have three other names, so that nothing tells the answer, or the receiver in
    place of the giver, so that the other name is the answer (as in MIB, arXiv 2504.13151).
    """
    if not isinstance(model, decoder.Decoder):
        raise InputError(f"{kind_of(model)} does not predict the next token", "use a Decoder")
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
        changed = {"first": a, "second": b, "giver": c}
        if corrupt == "giver":
            changed = {"first": first, "second": second, "giver": receiver}
        corrupted.append(template.format(**changed, **words))
        objects.append(names[receiver])
        subjects.append(names[giver])
    return IOIPrompts(tuple(clean), tuple(corrupted), tuple(objects), tuple(subjects))


@wrapping_models
def find_ioi_heads(
    model: decoder.Decoder, task: IOIPrompts | None = None, *, progress: bool = True
) -> IOIHeads:
    """The heads that find the indirect object, each with the role that it has in most draws."""
    task = ioi_prompts(model) if task is None else task
    scope = cached_run.head_scope(model)
    scope.check_patterns(scope.layers)
    with (
        build.eval_mode(model),
        Progress("IOI heads", total=6, unit="parts", enabled=progress) as bar,
    ):
        measured = _Measured(scope, task)
        bar.advance(3)
        by_draw = [measured.writers(draw) for draw in measured.draws]
        writers = _majority(by_draw, measured)
        movers = writers["name movers"]
        backup = measured.rises(movers)
        bar.advance()
        receivers = [*movers, *writers["subject suppressors"]]
        inhibition = measured.inhibition(receivers)
        bar.advance()
        for draw, own in zip(measured.draws, by_draw, strict=True):
            measured.add_others(draw, own, inhibition, backup)
        roles = _majority(by_draw, measured)
        bar.advance()
    agreement = {
        head: sum(draw.get(head) == name for draw in by_draw) / len(by_draw)
        for name, heads in roles.items()
        for head in heads
    }
    columns = measured.columns(backup, inhibition)
    return IOIHeads(
        kind="IOI heads",
        blocks=scope.blocks,
        means={name: mean for name, (mean, _) in columns.items()},
        errors={name: error for name, (_, error) in columns.items() if error is not None},
        metadata={
            "logit_difference": measured.difference,
            # Of the prompts where the object is more likely than the subject.
            "accuracy": float((measured.direct.logits > 0).double().mean()),
            "prompts": len(task.clean),
            "draws": len(measured.draws),
            "roles": {name: [str(head) for head in heads] for name, heads in roles.items()},
            "agreement": {str(head): share for head, share in agreement.items()},
            "unconfirmed": [str(head) for head in measured.unconfirmed(agreement)],
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


def writer_role(direct: float, to_object: float, to_subject: float) -> str | None:
    """The role of a direct effect, which is a fraction of the logit difference.

    >>> writer_role(0.5, 0.6, 0.1), writer_role(-0.3, 0.5, 0.2), writer_role(0.05, 0.9, 0.0)
    ('name movers', 'negative name movers', None)
    >>> writer_role(0.5, 0.05, 0.6), writer_role(-0.5, 0.1, 0.6), writer_role(0.2, 0.01, 0.02)
    ('subject suppressors', 'subject movers', 'other writers')
    """
    if abs(direct) < DIRECT_ABOVE:
        return None
    look = "object" if to_object > to_subject else "subject"
    return WRITERS[look if max(to_object, to_subject) >= LOOK_ABOVE else "neither", direct > 0]


class _Measured:
    """The scores of every prompt, from which those of any draw follow."""

    def __init__(self, scope: cached_run.HeadScope, task: IOIPrompts) -> None:
        self.scope, self.task, self.heads = scope, task, scope.heads
        prompts = list(task.clean), list(task.corrupted)
        with torch.no_grad():
            sites = path_patching.frozen_sites(scope)
            self.runs = RunPair.of(scope, *prompts, task.metric, keep=sites)
        self.direct = attribute_logits(scope.model, task.clean, task.objects, task.subjects)
        self.difference = float(self.direct.logits.mean())
        self.scale = self._scale(range(len(task.clean)))
        self.attention = _last_token_attention(scope, task)
        self.estimates = self._estimates()
        count = len(task.clean)
        draws = DRAWS if count >= 2 * DRAWS else 1
        self.draws = [part.tolist() for part in torch.arange(count).tensor_split(draws)]
        self.index = {head: index for index, head in enumerate(self.heads)}
        self.falls = self._falls()
        self.takeovers = {
            head: self._takeover(head)
            for head in self.falls
            if abs(self._effect(head)) >= CANDIDATE * DIRECT_ABOVE and not self._is_confirmed(head)
        }

    def _scale(self, draw: Sequence[int]) -> float:
        """What effects are fractions of: the difference in a draw, or infinity if there is none."""
        return abs(float(self.direct.logits[draw].mean())) or math.inf

    def _effect(self, head: Head) -> float:
        """The direct effect in all prompts, as a fraction of the difference."""
        return float(self.direct.by_head[:, self.index[head]].mean()) / self.scale

    def _is_confirmed(self, head: Head, takeover: float = 0.0) -> bool:
        change, error = (value / self.scale for value in _mean(self.falls[head]))
        return is_confirmed(self._effect(head), change, error, takeover / self.scale)

    def _estimates(self) -> Float[Tensor, "b h"]:
        """How far the difference would fall without each head, by its gradient."""
        clean, corrupted = self.runs.clean, self.runs.corrupted
        sites = [self.scope.site(layer, Tap.HEAD_OUTPUT) for layer in self.scope.layers]
        with torch.enable_grad():
            run = cached_run.CachedRun(
                self.scope, clean.inputs, edits=dict.fromkeys(sites, _tracked)
            )
            outputs = [run[site].values for site in sites]
            value = self.runs.bound_metric(run.hidden)[0].sum()
            gradients = torch.autograd.grad(value, outputs)
        lengths, products = self.runs.lengths, []
        for site, gradient in zip(sites, gradients, strict=True):
            change = clean[site].values - corrupted[site].values
            products.append((change * gradient).sum(-1).double().cpu())
        by_token = torch.cat(products, dim=1)
        return torch.stack([part.sum(0) for part in by_token.split(list(lengths.each))])

    def _falls(self) -> dict[Head, Float[Tensor, " b"]]:
        """How far the difference of each prompt falls without a head, for the candidates."""
        least = CANDIDATE * DIRECT_ABOVE * self.scale
        large = np.abs(self.estimates.mean(0).numpy()) >= least
        large |= np.abs(self.direct.by_head.mean(0).numpy()) >= least
        layer = attrgetter("layer")
        falls: dict[Head, Tensor] = {}
        candidates = sorted((self.heads[index] for index in large.nonzero()[0]), key=layer)
        for group in group_by(layer, candidates, self.runs.copies):
            site = self.scope.site(group[0].layer, Tap.HEAD_OUTPUT)
            own = [[head.head] for head in group]
            edit = replace_heads(own, self.runs.corrupted[site].values)
            editor = cached_run.ActivationEditor({site: edit})
            with torch.no_grad():
                hidden = self.runs.clean.resume_after_heads(group[0].layer, editor, len(group))
                values = self.runs.bound_metric(hidden, len(group)).double().cpu()
            falls |= dict(zip(group, self.runs.ends[0] - values, strict=True))
        return falls

    def _takeover(self, head: Head) -> Float[Tensor, " b"]:
        """What the direct effects of all other heads add without a head."""
        rises = self._ablated([head]).by_head - self.direct.by_head
        rises[:, self.index[head]] = 0
        return rises.sum(1)

    def _ablated(self, heads: Sequence[Head]) -> DirectLogits:
        task = self.task
        return attribute_logits(
            self.scope.model, task.clean, task.objects, task.subjects, edits=self._edits(heads)
        )

    def _edits(self, heads: Sequence[Head]) -> dict[Site, cached_run.EditFunction]:
        edits: dict[Site, cached_run.EditFunction] = {}
        for layer in {head.layer for head in heads}:
            site = self.scope.site(layer, Tap.HEAD_OUTPUT)
            own = [head.head for head in heads if head.layer == layer]
            edits[site] = replace_heads([own], self.runs.corrupted[site].values)
        return edits

    def writers(self, draw: Sequence[int]) -> dict[Head, str]:
        """The heads that write to the difference in a draw; all prompts together confirm them."""
        direct = self.direct.by_head[draw].mean(0) / self._scale(draw)
        roles = {}
        for head in self.falls:
            index, takeover = self.index[head], self.takeovers.get(head, torch.zeros(1))
            role = writer_role(float(direct[index]), *self.attention[draw, :, index].mean(0))
            if role and self._is_confirmed(head, float(takeover.mean())):
                roles[head] = role
        return roles

    def rises(self, movers: Sequence[Head]) -> Backup | None:
        """By prompt: how much direct effects rise without the name movers, and where heads look."""
        if not movers:
            return None
        rises = self._ablated(movers).by_head - self.direct.by_head
        rises[:, [self.index[head] for head in movers]] = math.nan
        return rises, _last_token_attention(self.scope, self.task, self._edits(movers))

    def inhibition(self, receivers: Sequence[Head]) -> dict[Head, Float[Tensor, " b"]]:
        """How far the difference of each prompt falls through the receivers' queries."""
        if not receivers:
            return {}
        to_object, to_subject = self.attention.mean(0)
        least = CANDIDATE * INHIBITION_ABOVE * self.scale
        senders = [
            head
            for head, index in self.index.items()
            if head not in receivers
            and to_subject[index] > to_object[index]
            and abs(float(self.estimates[:, index].mean())) >= least
            and head.layer < max(receiver.layer for receiver in receivers)
        ]
        paths = path_patching.PathRuns(self.runs, tuple(receivers), "query", "clean", False)
        falls: dict[Head, Tensor] = {}
        with torch.no_grad():
            for group in group_by(attrgetter("layer"), senders, self.runs.copies):
                falls |= dict(zip(group, self.runs.ends[0] - paths.run(group), strict=True))
        return falls

    def add_others(
        self,
        draw: Sequence[int],
        roles: dict[Head, str],
        inhibition: Mapping[Head, Tensor],
        backup: Backup | None,
    ) -> None:
        """Inhibition heads and backup name movers of a draw.

        A writer becomes a backup only if it then writes more than it changes otherwise.
        """
        whole = float((self.runs.ends[0] - self.runs.ends[1])[draw].mean())
        for head, fall in inhibition.items():
            if float(fall[draw].mean()) / whole >= INHIBITION_ABOVE:
                roles.setdefault(head, "inhibition heads")
        if backup is None:
            return
        least = BACKUP_ABOVE * self._scale(draw)
        for head, index in self.index.items():
            rise, error = _mean(backup[0][draw, index])
            to_object, to_subject = backup[1][draw, :, index].mean(0)
            own = abs(float(self.direct.by_head[draw, index].mean())) if head in roles else 0.0
            if rise >= max(least, own) and rise > MIN_ERRORS * error and to_object > to_subject:
                roles[head] = "backup name movers"

    def unconfirmed(self, named: Container[Head]) -> list[Head]:
        """Heads without a role whose direct effect in all prompts is above the threshold."""
        large = [head for head in self.heads if abs(self._effect(head)) >= DIRECT_ABOVE]
        return [head for head in large if head not in named]

    def columns(
        self, backup: Backup | None, inhibition: Mapping[Head, Tensor]
    ) -> dict[str, tuple[Float[np.ndarray, " h"], Float[np.ndarray, " h"] | None]]:
        """Means over all prompts, and their errors, by name."""
        whole = self.runs.ends[0] - self.runs.ends[1]
        fractions = {head: fall / whole.mean() for head, fall in inhibition.items()}
        columns = {
            "direct": _means(self.direct.by_head),
            "estimate": _means(self.estimates),
            "ablation": self._spread(self.falls),
            "takeover": self._spread(self.takeovers),
            "backup": self._spread({}) if backup is None else _means(backup[0]),
            "inhibition": self._spread(fractions),
        }
        looks = zip(("to_object", "to_subject"), self.attention.mean(0), strict=True)
        return columns | {name: (mean, None) for name, mean in looks}

    def _spread(self, by_head: Mapping[Head, Tensor]) -> tuple[np.ndarray, np.ndarray]:
        columns = np.full((2, len(self.heads)), np.nan)
        for head, values in by_head.items():
            columns[:, self.index[head]] = _mean(values)
        return columns[0], columns[1]


def _tracked(values: Tensor) -> Tensor:
    return values if values.requires_grad else values.detach().requires_grad_()


def _means(values: Float[Tensor, "b h"]) -> tuple[np.ndarray, np.ndarray]:
    mean, error = metrics.weighted_mean(values, torch.ones(len(values)))
    return mean.numpy(), error.numpy()


def _mean(values: Float[Tensor, " b"]) -> tuple[float, float]:
    mean, error = metrics.weighted_mean(values, torch.ones(len(values)))
    return float(mean), float(error)


def _majority(by_draw: Sequence[Mapping[Head, str]], measured: _Measured) -> dict[str, list[Head]]:
    """The heads of each role that have it in most draws, strongest first."""
    votes = Counter((head, role) for draw in by_draw for head, role in draw.items())
    chosen = [pair for pair, count in votes.items() if 2 * count > len(by_draw)]
    strength = measured.estimates.mean(0).abs()
    chosen.sort(key=lambda pair: -float(strength[measured.index[pair[0]]]))
    return {role: [head for head, own in chosen if own == role] for role in ROLES}


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
) -> Float[np.ndarray, "b 2 h"]:
    """The attention of the last token to the object, and to the last mention of the subject."""
    inputs = texts.read_inputs(scope.model, list(task.clean))
    assert inputs.ids is not None
    sites = [scope.site(layer, Tap.PATTERN) for layer in scope.layers]
    editor = cached_run.ActivationEditor(edits or {}, sites)
    with build.eval_mode(scope.model), torch.no_grad():
        scope.model.run_inputs(inputs, editor)
    by_text = np.zeros((len(task.clean), 2, len(scope.heads)))
    for text, pair in enumerate(zip(task.objects, task.subjects, strict=True)):
        positions = [int((inputs.ids.of(text) == name).nonzero()[-1]) for name in pair]
        rows = []
        for layer in scope.layers:
            patterns = editor.recorded[scope.site(layer, Tap.PATTERN)]
            assert isinstance(patterns, Patterns)
            rows.append(patterns.shares(text)[:, -1, positions])
        by_text[text] = torch.cat(rows).T.double().cpu().numpy()
    return by_text
