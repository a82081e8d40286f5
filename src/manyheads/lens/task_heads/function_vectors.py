"""Function-vector heads (arXiv 2310.15213): heads that carry what few-shot examples ask for.

A head is scored by causal mediation: its mean output over few-shot prompts of a task replaces its
output at the last token of a prompt whose answers are shuffled, and the score is how much the right
answer gains.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.attention import Attention
from manyheads.bridge import structure, wrapped_parts
from manyheads.bridge.automatic import wrapping_models
from manyheads.bridge.residual_writes import FrozenNorm
from manyheads.errors import InputError
from manyheads.lens.causal.ablation import HeadAblation
from manyheads.lens.causal.evaluate import default_batch_tokens
from manyheads.lens.causal.last_token_runs import LastTokenRuns, last_rows
from manyheads.lens.head_kinds.significance import benjamini_hochberg, chance_above
from manyheads.lens.inputs import cached_run, metrics, synthetic
from manyheads.lens.inputs.few_shot import FewShotPrompts, few_shot_prompts
from manyheads.lens.inputs.texts import batch_ranges
from manyheads.lens.results.addresses import check_one_stream
from manyheads.lens.task_heads.task_heads import (
    HeldOutEffect,
    InductionScores,
    TaskHeads,
    random_sets,
)
from manyheads.models import build
from manyheads.models.layer import Residual
from manyheads.models.model_interface import ModelInputs
from manyheads.parts.linear_layout import column_major_weights
from manyheads.parts.norms import ChannelScale
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Head, Site, Sublayer, Tap

# A fiftieth of all heads, as the publication has for its models, but not fewer than these.
SHARE, MIN_HEADS = 0.02, 4
# What right examples must add to the answer, and the least effect of a head as a fraction of it.
MIN_GAP, MIN_EFFECT = 0.01, 0.01
MEASURE = "probability of the right answer"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class FunctionVectorHeads(TaskHeads):
    """The average indirect effect of each head ("effect") on the right answer, and its heads.

    `vectors` has the function vector of each task: the sum of what the heads write on average at
    the end of its few-shot prompts. Added to the residual stream that enters `layer`, at the last
    token of a prompt without examples, it raises the right answer.
    """

    vectors: dict[str, Float[np.ndarray, " c"]] = field(default_factory=dict)
    layer: int = 0


@wrapping_models
def find_function_vector_heads(
    model: build.Model,
    prompts: FewShotPrompts | None = None,
    *,
    top: int | None = None,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> FunctionVectorHeads:
    """The heads that carry a task from few-shot examples to the answer.

    The score of a head, its average indirect effect, is measured on `prompts`, by default eight
    tasks that come with manyheads: how much the probability of the right answer rises if the head's
    mean output over right prompts of the task (all but this one) replaces its output at the end of
    a prompt with shuffled answers. The `top` heads (by default a fiftieth) whose effect is more
    than chance are the function-vector heads.

    The tasks are then divided into two halves. The heads chosen by one half are measured on the
    tasks of the other: patched together into shuffled prompts; as a function vector, added to
    prompts without examples at the layer where it did most for the first half; and ablated (their
    mean in their place, at all tokens), or instead as many of the strongest induction heads that
    are not among them, or as many random heads.

    >>> from manyheads import load
    >>> find_function_vector_heads(load("house-gpt"), progress=False)  # doctest: +SKIP
    """
    prompts = few_shot_prompts(model, seed=seed) if prompts is None else prompts
    if top is not None and top < 1:
        raise InputError(f"top must be at least 1, got {top}", "use 1 or more")
    scope = cached_run.head_scope(model)
    limit = default_batch_tokens(model) if batch_tokens is None else batch_tokens
    tokens = sum(map(len, prompts.clean))
    tables = [] if model.table is None else [model.table]
    with build.eval_mode(model), torch.no_grad(), column_major_weights(model, tokens, *tables):
        mediation = Mediation(scope, prompts, limit, progress)
        count = len(scope.heads)
        top = max(MIN_HEADS, round(SHARE * count)) if top is None else top
        chosen = mediation.choose(sorted(set(prompts.tasks)), top)
        induction = InductionScores.of(model, seed, progress)
        held_out: dict[str, HeldOutEffect] = {}
        vectors: dict[str, np.ndarray] = {}
        layer = 0
        if chosen:
            held_out = mediation.hold_out(top, induction, seed)
            vectors, layer = mediation.vectors(chosen)
    by_task = torch.from_numpy(mediation.by_task(mediation.effects))
    effects, errors = metrics.weighted_mean(by_task, torch.ones(len(by_task)))
    return FunctionVectorHeads(
        kind="function-vector heads",
        blocks=scope.blocks,
        means={"effect": effects.numpy(), "induction": induction.scores},
        errors={"effect": errors.numpy()},
        heads=tuple(scope.heads[index] for index in chosen),
        induction_heads=tuple(np.array(scope.heads, dtype=object)[induction.passes]),
        held_out=held_out,
        vectors=vectors,
        layer=layer,
        metadata={
            "measure": MEASURE,
            "layers": len(scope.stack.layers),
            "tasks": {
                task: {
                    name: float(values[mediation.rows(task)].mean())
                    for name, values in mediation.probabilities.items()
                }
                for task in dict.fromkeys(prompts.tasks)
            },
            "missing": dict(prompts.missing),
            "prompts": len(prompts.clean),
            "problem": "" if chosen else mediation.problem,
        },
    )


class Mediation:
    """The probability of the right answers, and how much each head's mean output adds to it."""

    def __init__(
        self, scope: cached_run.HeadScope, prompts: FewShotPrompts, limit: int, progress: bool
    ) -> None:
        self.scope, self.prompts, self.limit, self.progress = scope, prompts, limit, progress
        self.answers = torch.tensor(prompts.answers, device=next(scope.model.parameters()).device)
        self.tasks = np.array(prompts.tasks)
        self.names = list(dict.fromkeys(prompts.tasks))
        self.probabilities: dict[str, Float[np.ndarray, " b"]] = {}
        self.means = self._mean_outputs()
        self.effects = self._effects()

    def rows(self, *tasks: str) -> np.ndarray:
        """The prompts of some tasks."""
        return np.flatnonzero(np.isin(self.tasks, tasks))

    def by_task(self, values: Float[np.ndarray, "b *h"]) -> Float[np.ndarray, "tasks *h"]:
        return np.stack([values[self.rows(task)].mean(0) for task in self.names])

    def _batches(
        self, texts: Sequence[Sequence[int]], rows: np.ndarray | None = None
    ) -> Iterator[tuple[list[int], LastTokenRuns]]:
        """Batches of some prompts, or of all, and their numbers."""
        numbers = list(range(len(texts))) if rows is None else rows.tolist()
        for batch in batch_ranges([len(texts[number]) for number in numbers], self.limit):
            own = numbers[batch.start : batch.stop]
            yield own, LastTokenRuns(self.scope, self._inputs([texts[number] for number in own]))

    def _inputs(self, texts: Sequence[Sequence[int]]) -> ModelInputs:
        model = self.scope.model
        return synthetic.inputs_from_ids(model, synthetic.SpecialTokens.of(model), texts)

    def _probability(self, hidden: Float[Tensor, "b c"], rows: Sequence[int]) -> Tensor:
        readout = self.scope.model.readout
        assert readout is not None, "models that continue a text have a readout"
        logits = readout.logits(hidden, self.scope.model.table).float()
        return logits.softmax(-1).gather(1, self.answers[list(rows), None]).squeeze(1).double()

    def _mean_outputs(self) -> dict[int, Float[Tensor, "b h d"]]:
        """By layer, for each prompt the mean over all other right prompts of its task."""
        outputs: dict[int, list[Tensor]] = {layer: [] for layer in self.scope.layers}
        right, texts = [], self.prompts.clean
        bar = Progress("few-shot prompts", total=len(texts), unit="prompts", enabled=self.progress)
        with bar:
            for rows, runs in self._batches(texts):
                for layer in self.scope.layers:
                    outputs[layer].append(runs.head_outputs(layer))
                right.append(self._probability(runs.hidden, rows))
                bar.advance(len(rows))
        self.probabilities["few-shot"] = torch.cat(right).cpu().numpy()
        means = {layer: torch.cat(by_batch).float() for layer, by_batch in outputs.items()}
        for values in means.values():
            for task in self.names:
                own = self.rows(task)
                values[own] = (values[own].sum(0) - values[own]) / max(1, len(own) - 1)
        return means

    def patch(
        self, heads: Sequence[Head], rows: Sequence[int]
    ) -> dict[Site, cached_run.EditFunction]:
        """The edits that put the mean outputs of some heads in place, at the last tokens."""
        edits: dict[Site, cached_run.EditFunction] = {}
        for layer in {head.layer for head in heads}:
            own = [head.head for head in heads if head.layer == layer]
            means = self.means[layer][list(rows)][:, own]

            def edit(values: Tensor, own: list[int] = own, means: Tensor = means) -> Tensor:
                values = values.clone()
                values[:, own] = means.to(values.dtype)
                return values

            edits[self.scope.site(layer, Tap.HEAD_OUTPUT)] = edit
        return edits

    def _effects(self) -> Float[np.ndarray, "b h"]:
        """What the mean output of each head adds to the answer of each shuffled prompt."""
        texts, heads = self.prompts.shuffled, self.scope.heads
        effects, shuffled = np.zeros((len(texts), len(heads))), np.zeros(len(texts))
        total = len(texts) * len(heads)
        with Progress("patching heads", total=total, unit="patches", enabled=self.progress) as bar:
            for rows, runs in self._batches(texts):
                before = self._probability(runs.hidden, rows)
                shuffled[rows] = before.cpu().numpy()
                for index, head in enumerate(heads):
                    hidden = runs.run(head.layer, self.patch([head], rows))
                    after = self._probability(hidden, rows)
                    effects[rows, index] = (after - before).cpu().numpy()
                    bar.advance(len(rows))
        self.probabilities["shuffled"] = shuffled
        return effects

    @property
    def gap(self) -> tuple[float, float]:
        """What right examples add to the answer, and its standard error over tasks."""
        gaps = self.by_task(self.probabilities["few-shot"] - self.probabilities["shuffled"])
        mean, error = metrics.weighted_mean(torch.from_numpy(gaps), torch.ones(len(gaps)))
        return float(mean), float(error)

    @property
    def _learns(self) -> bool:
        gap, error = self.gap
        return gap > MIN_GAP and not gap < 2 * error

    @property
    def problem(self) -> str:
        """Why no head was chosen."""
        few, shuffled = (self.probabilities[name].mean() for name in ("few-shot", "shuffled"))
        if not self._learns:
            return (
                "the model does not learn these tasks from examples: the right answer has "
                f"{few:.3f} after right examples and {shuffled:.3f} after shuffled ones"
            )
        return "no head's effect is more than chance"

    def choose(self, tasks: Sequence[str], top: int) -> list[int]:
        """The heads with the largest effects in some tasks that are more than chance."""
        rows = self.rows(*tasks)
        if not self._learns:
            return []
        means, errors = metrics.weighted_mean(
            torch.from_numpy(self.effects[rows]), torch.ones(len(rows))
        )
        scores, count = means.numpy(), np.full(len(means), float(len(rows)))
        p = chance_above(scores, np.zeros_like(scores), errors.numpy(), count)
        large = benjamini_hochberg(p) & (scores >= MIN_EFFECT * self.gap[0])
        order = np.argsort(-scores, kind="stable")
        return [int(index) for index in order if large[index]][:top]

    def _heads(self, indices: Sequence[int]) -> list[Head]:
        return [self.scope.heads[index] for index in indices]

    def hold_out(self, top: int, induction: InductionScores, seed: int) -> dict[str, HeldOutEffect]:
        """The effects of heads that the other half of the tasks has chosen, by task."""
        halves = [self.names[0::2], self.names[1::2]]
        values: dict[str, np.ndarray] = {}
        with Progress("held-out halves", total=2, unit="halves", enabled=self.progress) as bar:
            for tasks, others in (halves, halves[::-1]):
                heads, rows = self.choose(others, top), self.rows(*tasks)
                if not heads:
                    return {}
                for name, measured in self._measure(heads, rows, others, induction, seed):
                    values.setdefault(name, np.full(len(self.tasks), np.nan))[rows] = measured
                bar.advance()
        return {name: HeldOutEffect.of(self.by_task(by_text)) for name, by_text in values.items()}

    def _measure(
        self,
        heads: list[int],
        rows: np.ndarray,
        chosen_by: Sequence[str],
        induction: InductionScores,
        seed: int,
    ) -> Iterator[tuple[str, np.ndarray]]:
        own = self._heads(heads)
        yield "few-shot prompts", self.probabilities["few-shot"][rows]
        sets = [heads, induction.strongest(len(heads), heads)]
        sets += random_sets(len(self.scope.heads), len(heads), heads, seed)
        ablated = self._ablate([self._heads(members) for members in sets], rows)
        yield "without these heads", ablated[0]
        yield "without as many induction heads", ablated[1]
        yield "without as many random heads", np.mean(ablated[2:], axis=0)
        yield "shuffled prompts", self.probabilities["shuffled"][rows]
        first = min(head.layer for head in own)
        yield (
            "shuffled, with these heads patched",
            self._run(self.prompts.shuffled, rows, first, own),
        )
        yield "zero-shot prompts", self._run(self.prompts.zero_shot, rows)
        try:
            layer = self._best_layer(own, self.rows(*chosen_by))
        except InputError:
            return
        yield (
            "zero-shot, with the function vector",
            self._run(self.prompts.zero_shot, rows, layer, added=self._writes(own)),
        )

    def _run(
        self,
        texts: Sequence[Sequence[int]],
        rows: np.ndarray,
        layer: int | None = None,
        heads: Sequence[Head] = (),
        added: Tensor | None = None,
    ) -> np.ndarray:
        """The probability in some prompts with heads patched, or with a vector added."""
        results = []
        for own, runs in self._batches(texts, rows):
            hidden = runs.hidden
            if layer is not None:
                vector = None if added is None else added[own]
                hidden = runs.run(layer, self.patch(heads, own), vector)
            results.append(self._probability(hidden, own))
        return torch.cat(results).cpu().numpy()

    def _ablate(self, sets: Sequence[Sequence[Head]], rows: np.ndarray) -> np.ndarray:
        """The probability in right prompts without each set of heads."""

        def probability(states: Ragged, texts: Sequence[int]) -> Tensor:
            own = [int(rows[text]) for text in texts]
            return self._probability(states.values[last_rows(states.lengths)], own).float()

        ablation = HeadAblation.of(
            self.scope.model,
            self._inputs([self.prompts.clean[row] for row in rows]),
            replace_with="mean",
            metric=metrics.StateMetric(probability),
            batch_tokens=self.limit,
            progress=self.progress,
        )
        return ablation.measure([tuple(heads) for heads in sets]).values.T.numpy()

    def _writes(self, heads: Sequence[Head]) -> Float[Tensor, "b c"]:
        """The sum of what some heads write on average, for each prompt."""
        total: Tensor | float = 0.0
        for head in heads:
            total = (
                total + head_writes(self.scope, head.layer, self.means[head.layer])[:, head.head]
            )
        assert isinstance(total, Tensor), "there are heads"
        return total

    def _best_layer(self, heads: Sequence[Head], rows: np.ndarray) -> int:
        """The layer where the function vector does most for prompts without examples."""
        added, layers = self._writes(heads), range(len(self.scope.stack.layers))
        gains = np.zeros(len(layers))
        for own, runs in self._batches(self.prompts.zero_shot, rows):
            for layer in layers:
                hidden = runs.run(layer, added=added[own])
                gains[layer] += float(self._probability(hidden, own).sum())
        return int(gains.argmax())

    def vectors(self, chosen: Sequence[int]) -> tuple[dict[str, np.ndarray], int]:
        """The function vector of each task, and the best layer for all of them."""
        heads = self._heads(chosen)
        try:
            written = self._writes(heads).cpu().numpy()
        except InputError:
            return {}, 0
        vectors = {task: written[self.rows(task)].mean(0) for task in self.names}
        return vectors, self._best_layer(heads, np.arange(len(self.tasks)))


def head_writes(
    scope: cached_run.HeadScope, layer: int, outputs: Float[Tensor, "n h d"]
) -> Float[Tensor, "n h c"]:
    """What each head adds to the residual stream; a norm after the heads keeps its divisor."""
    norm, factor = None, 1.0
    weight: Tensor
    bias: object
    if scope.model.native:
        check_one_stream(scope.stack)
        inner = scope.module(layer)
        if isinstance(inner, Attention) and any(gate.at == "final" for gate in inner.config.gates):
            raise InputError("a gate follows the heads of this model", "patch its heads instead")
        weight, bias = inner.output.weight, inner.output.bias
        residual = getattr(scope.stack.layers[layer], f"{Sublayer.ATTENTION.value}_residual")
        assert isinstance(residual, Residual)
        norm = residual.second_norm
    else:
        stack = cast(wrapped_parts.WrappedStack, scope.stack)
        facts = next(
            facts for facts, at in stack.facts.attentions if at == layer and not facts.cross
        )
        if facts.write is None or facts.projection is None:
            raise InputError("the heads of this model do not simply add", "patch them instead")
        weight, bias = structure.linear_weight(facts.projection), facts.projection.bias
        norm, factor = facts.write.norm, facts.write.factor
    values = outputs.to(weight.dtype)
    parts = torch.einsum("nhd,chd->nhc", values, weight.unflatten(1, outputs.shape[1:])).double()
    if isinstance(norm, ChannelScale):
        parts = parts * norm.weight.double()
    elif norm is not None:
        together = parts.sum(1) + (bias.double() if isinstance(bias, Tensor) else 0)
        frozen = FrozenNorm.of(norm, together)
        if frozen.centered:
            parts = parts - parts.mean(-1, keepdim=True)
        parts = parts / frozen.divisor[:, None] * frozen.gain
    return parts * factor
