"""How often each head attends most to the right word.

Clark et al. (arXiv 1906.04341): the weight to a word of several tokens is their sum, the weight
from it their mean; special tokens are not words. A head is compared with the best fixed choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.attention_maps.patterns import PatternWatcher
from manyheads.lens.inputs import annotated, synthetic
from manyheads.lens.inputs.cached_run import last_head_site, run_until
from manyheads.lens.inputs.texts import for_each_batch, large_batch_tokens
from manyheads.lens.results.addresses import Block, blocks_of
from manyheads.models import build, model_interface
from manyheads.taps import Tap

MAX_OFFSET = 10
OFFSETS = tuple(offset for offset in range(-MAX_OFFSET, MAX_OFFSET + 1) if offset)
BASELINES = (
    *(f"a fixed offset of {offset:+d}" for offset in OFFSETS),
    *(f"the {which} candidate" for which in ("first", "last", "nearest")),
)

FloatsByHead = Float[np.ndarray, " h"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WordTargetScores:
    """One task, by head: the fraction of `counts` words that attend most to the right word.

    `weight` is the mean weight on the right words, `uniform` what uniform attention gives them, and
    `rivals` the weight on all their rivals. `baseline` is the accuracy of the best fixed choice,
    and `baseline_names` says which that is. `errors` and `excess_errors` are the standard errors of
    the accuracy, and of how far it exceeds the baseline on the same words, over `texts` texts whose
    words may depend on each other. A word counts if it sees a right word and a wrong one, and a
    rival if it has any.
    """

    task: str
    counts: FloatsByHead
    texts: FloatsByHead
    accuracy: FloatsByHead
    weight: FloatsByHead
    uniform: FloatsByHead
    rivals: FloatsByHead
    baseline: FloatsByHead
    baseline_names: tuple[str, ...]
    errors: FloatsByHead
    excess_errors: FloatsByHead
    groups: tuple["WordTargetScores", ...] = ()


def measure_word_targets(
    model: build.Model,
    texts: Sequence[annotated.AlignedText],
    *,
    label: str = "scoring words",
    progress: bool = True,
) -> tuple[dict[str, WordTargetScores], bool]:
    """The scores of every task, and whether all texts were read: Ctrl-C keeps finished batches.

    Where texts have several groups, the scores of each come with those of all.
    """
    blocks = blocks_of(model)
    counts = _TargetCounts(texts)
    special, last = synthetic.SpecialTokens.of(model), last_head_site(model, Tap.KEY)

    def visit(inputs: model_interface.ModelInputs, numbers: list[int]) -> None:
        batch = _WordTargetSums(
            counts, [texts[number] for number in numbers], special.shifts(model)
        )
        with torch.inference_mode():
            watcher = PatternWatcher(model.stacks(), batch.add)
            run_until(partial(model.run_hidden, inputs), watcher, last)
        counts.merge(batch)

    summary = for_each_batch(
        model,
        synthetic.inputs_from_ids(model, special, [text.ids for text in texts]),
        visit,
        label=label,
        batch_tokens=large_batch_tokens(model),
        progress=progress,
    )
    scores = {}
    for task in counts.tasks:
        groups = [counts.result(task, blocks, [group]) for group in range(counts.groups)]
        whole = counts.result(task, blocks, range(counts.groups))
        scores[task] = replace(whole, groups=tuple(groups))
    return scores, summary.complete


@dataclass(slots=True, eq=False)
class _Sums:
    """Sums over the texts of one attention, by group and task.

    `values` are the words, the correct baselines, the hits and the weights of heads; `texts` counts
    the texts. `crossed` are products of one text's words and baselines with its words, baselines
    and hits, and `squares` those of hits with themselves: errors over texts follow from them.
    """

    values: Float[Tensor, "g k columns"]
    texts: Float[Tensor, "g k"]
    crossed: Float[Tensor, "g k _ _"]
    squares: Float[Tensor, "g k h"]

    @classmethod
    def zeros(cls, groups: int, tasks: int, heads: int) -> "_Sums":
        shape, fixed = (groups, tasks), 1 + len(BASELINES)
        return cls(
            torch.zeros(*shape, fixed + 1 + 3 * heads),
            torch.zeros(shape),
            torch.zeros(*shape, fixed, fixed + heads),
            torch.zeros(*shape, heads),
        )

    def add(
        self, group: int, tasks: tuple[Tensor, Tensor], rows: Float[Tensor, "p columns"]
    ) -> None:
        """Add the words of one text, of which `tasks` has the distinct ones and those of words."""
        fixed, heads = self.crossed.shape[2], self.squares.shape[2]
        present, owner = tasks
        summed = rows.new_zeros(len(present), rows.shape[1]).index_add(0, owner, rows)
        counted = summed[:, : fixed + heads]
        self.values[group, present] += summed
        self.texts[group, present] += 1
        self.crossed[group, present] += counted[:, :fixed, None] * counted[:, None, :]
        self.squares[group, present] += counted[:, fixed:].square()

    def merge(self, batch: "_Sums") -> None:
        # Not in place: the sums of a batch are inference tensors.
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(batch, field.name))


class _TargetCounts:
    """The sums of all finished batches, by attention."""

    def __init__(self, texts: Sequence[annotated.AlignedText]) -> None:
        names = dict.fromkeys(pair.task for text in texts for pair in text.pairs)
        self.tasks = {task: row for row, task in enumerate(names)}
        self.groups = 1 + max(text.group for text in texts)
        self.sums: dict[Block, _Sums] = {}

    def merge(self, batch: "_WordTargetSums") -> None:
        for block, sums in batch.sums.items():
            if block in self.sums:
                self.sums[block].merge(sums)
            else:
                self.sums[block] = sums

    def result(self, task: str, blocks: Sequence[Block], groups: Sequence[int]) -> WordTargetScores:
        """The scores of some groups; the best fixed choice is that on all texts."""
        parts, best = zip(
            *(self._block(self.tasks[task], block, list(groups)) for block in blocks), strict=True
        )
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        names = np.repeat([BASELINES[index] for index in best], [block.heads for block in blocks])
        baselines = tuple(names.tolist())
        return WordTargetScores(task=task, baseline_names=baselines, groups=(), **columns)

    def _block(
        self, task: int, block: Block, groups: list[int]
    ) -> tuple[dict[str, np.ndarray], int]:
        heads, choices = block.heads, len(BASELINES)
        sums = self.sums.get(block, _Sums.zeros(self.groups, len(self.tasks), heads))
        best = int(sums.values[:, task, 1 : 1 + choices].sum(0).argmax())
        values, texts, crossed, squares = (
            table[groups, task].double().sum(0).numpy()
            for table in (sums.values, sums.texts, sums.crossed, sums.squares)
        )
        count, means = values[0], values[1:] / (values[0] or np.nan)
        baseline, accuracy = means[best], means[choices : choices + heads]
        uniform, weights = means[choices + heads], means[choices + heads + 1 :]
        words, fixed = crossed[0], crossed[1 + best]
        hits = slice(1 + choices, None)

        def error(ratio: np.ndarray, own: np.ndarray, with_words: np.ndarray) -> np.ndarray:
            """Of a ratio to the words of each text (the estimator for clusters)."""
            scatter = np.fmax(own - 2 * ratio * with_words + ratio**2 * words[0], 0)
            spread = np.sqrt(scatter * texts / max(1, texts - 1)) / max(1, count)
            # A fraction of exactly 0 or 1 of few words is not that certain.
            return np.fmax(spread, 0.5 / max(1, count))

        excess_squares = squares - 2 * fixed[hits] + fixed[1 + best]
        excess_with_words = words[hits] - words[1 + best]
        parts = {
            "accuracy": accuracy,
            "weight": weights[:heads],
            "rivals": weights[heads:],
            "errors": error(accuracy, squares, words[hits]),
            "excess_errors": error(accuracy - baseline, excess_squares, excess_with_words),
        }
        same = {"counts": count, "texts": texts, "baseline": baseline, "uniform": uniform}
        return parts | {name: np.full(heads, value) for name, value in same.items()}, best


@dataclass(frozen=True, slots=True, eq=False)
class _PairArrays:
    """The pairs of one text as arrays over its words."""

    tasks: Int[Tensor, " p"]
    sources: Int[Tensor, " p"]
    right: Bool[Tensor, "p w"]
    rivals: Bool[Tensor, "p w"]
    allowed: Bool[Tensor, "p w"]
    has_candidates: Bool[Tensor, " p"]

    @classmethod
    def of(cls, text: annotated.AlignedText, tasks: dict[str, int]) -> "_PairArrays":
        words, pairs = len(text.words), text.pairs
        right = torch.zeros(len(pairs), words, dtype=torch.bool)
        aligned = torch.tensor([bool(tokens) for tokens in text.words])
        allowed, rivals = torch.zeros_like(right), torch.zeros_like(right)
        for row, pair in enumerate(pairs):
            right[row, list(pair.targets)] = True
            rivals[row, list(pair.rivals)] = True
            if pair.candidates:
                allowed[row, list(pair.candidates)] = True
            else:
                allowed[row] = aligned
            allowed[row, pair.source] = False
        return cls(
            torch.tensor([tasks[pair.task] for pair in pairs]),
            torch.tensor([pair.source for pair in pairs]),
            right,
            rivals,
            allowed,
            torch.tensor([bool(pair.candidates) for pair in pairs]),
        )

    def baselines(self, visible: Bool[Tensor, "p w"]) -> Float[Tensor, "p choices"]:
        """Which baselines are right: fixed offsets, or a candidate by its order."""
        words = visible.shape[1]
        at = self.sources[:, None] + torch.tensor(OFFSETS)
        inside = (at >= 0) & (at < words)
        by_offset = self.right.gather(1, at.clamp(0, words - 1)) & inside
        word = torch.arange(words)
        distance = (word[None] - self.sources[:, None]).abs().double()
        position = word.double().expand_as(visible)
        by_order = torch.cat(
            [
                self.right.gather(1, order.masked_fill(~visible, torch.inf).argmin(1, keepdim=True))
                for order in (position, -position, distance)
            ],
            dim=1,
        )
        by_order &= self.has_candidates[:, None]
        by_offset &= ~self.has_candidates[:, None]
        return torch.cat((by_offset, by_order), dim=1).float()


@dataclass(frozen=True, slots=True, eq=False)
class _PairView:
    """What the pairs of one text see through a mask, whatever the weights.

    `sources` averages the tokens of each source and `words` marks those of each word.
    `highest_right` is infinite at the right words and -1 elsewhere: below every weight. `fixed` are
    ones and the correct baselines, `uniform` is what uniform attention gives the right words.
    Pairs that do not count are not `valid`; `tasks` are the distinct ones of the others, and the
    place of each among them.
    """

    sources: Float[Tensor, "p s"]
    words: Float[Tensor, "w s"]
    right: Bool[Tensor, "p w"]
    highest_right: Float[Tensor, "p w"]
    highest_wrong: Float[Tensor, "p w"]
    rivals: Bool[Tensor, "p w"]
    fixed: Float[Tensor, "p columns"]
    uniform: Float[Tensor, "p 1"]
    valid: Bool[Tensor, " p"]
    tasks: tuple[Int[Tensor, " tasks"], Int[Tensor, " valid"]]

    @classmethod
    def of(
        cls, pairs: _PairArrays, words: Float[Tensor, "w s"], visible: Bool[Tensor, "t s"]
    ) -> "_PairView":
        sources = (words / words.sum(1, keepdim=True).clamp(min=1))[pairs.sources]
        sight = visible.cpu().float()
        even = sources @ (sight / sight.sum(1, keepdim=True).clamp(min=1)) @ words.T
        in_sight = ((words[pairs.sources] @ sight @ words.T) > 0) & pairs.allowed
        right, wrong = in_sight & pairs.right, in_sight & ~pairs.right
        rivals = in_sight & pairs.rivals
        alone = pairs.rivals.any(1) & ~rivals.any(1)
        valid = right.any(1) & wrong.any(1) & ~alone
        fixed = torch.cat((torch.ones(len(valid), 1), pairs.baselines(in_sight)), dim=1)
        uniform = (even * right).sum(-1, keepdim=True)
        tasks = pairs.tasks[valid].unique(return_inverse=True)
        highest_right, highest_wrong = (torch.where(at, torch.inf, -1.0) for at in (right, wrong))
        return cls(
            sources=sources,
            words=words,
            right=right,
            highest_right=highest_right,
            highest_wrong=highest_wrong,
            rivals=rivals,
            fixed=fixed,
            uniform=uniform,
            valid=valid,
            tasks=tasks,
        )


class _WordTargetSums:
    """The sums of one batch, from its patterns."""

    def __init__(
        self, counts: _TargetCounts, texts: Sequence[annotated.AlignedText], shifts: dict[str, int]
    ) -> None:
        self.sums: dict[Block, _Sums] = {}
        self._counts, self._texts, self._shifts = counts, texts, shifts
        self._pairs = [_PairArrays.of(text, counts.tasks) for text in texts]
        self._tokens: dict[tuple[int, int], Float[Tensor, "w s"]] = {}
        self._views: dict[tuple[int, int], list[tuple[Bool[Tensor, "t s"], _PairView]]] = {}

    def add(
        self,
        block: Block,
        text: int,
        rows: range,
        weights: Float[Tensor, "h t s"],
        visible: Bool[Tensor, "t s"],
    ) -> None:
        assert len(rows) == weights.shape[-1], "words need complete patterns"
        view = self._view(text, visible, self._shifts[block.stack])
        attention = (view.sources @ weights.cpu() @ view.words.T).float()
        best_right = torch.minimum(attention, view.highest_right).amax(-1)
        best_wrong = torch.minimum(attention, view.highest_wrong).amax(-1)
        hits = (best_right > best_wrong).float()
        on_right, on_rivals = (attention * view.right).sum(-1), (attention * view.rivals).sum(-1)
        columns = (view.fixed, hits.T, view.uniform, on_right.T, on_rivals.T)
        values = torch.cat(columns, dim=1)[view.valid]
        if block not in self.sums:
            self.sums[block] = _Sums.zeros(
                self._counts.groups, len(self._counts.tasks), len(weights)
            )
        self.sums[block].add(self._texts[text].group, view.tasks, values)

    def _view(self, text: int, visible: Bool[Tensor, "t s"], shift: int) -> "_PairView":
        """What the pairs of a text see; attentions with the same mask share it."""
        for sight, view in self._views.setdefault((text, shift), []):
            if sight is visible or torch.equal(sight, visible):
                return view
        tokens = self._word_tokens(text, visible.shape[-1], shift)
        view = _PairView.of(self._pairs[text], tokens, visible)
        self._views[text, shift].append((visible, view))
        return view

    def _word_tokens(self, text: int, tokens: int, shift: int) -> Float[Tensor, "w s"]:
        """Ones at the tokens of each word, shared by all layers."""
        if (text, shift) not in self._tokens:
            words = self._texts[text].words
            ones = torch.zeros(len(words), tokens)
            for word, positions in enumerate(words):
                ones[word, [position + shift for position in positions]] = 1.0
            self._tokens[text, shift] = ones
        return self._tokens[text, shift]
