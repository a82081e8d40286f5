"""How often each head attends most to the right word.

Clark et al. (arXiv 1906.04341): the weight to a word of several tokens is their sum, the weight
from it their mean; special tokens are not words. A head is compared with the best fixed choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.attention_maps.patterns import PatternWatcher
from manyheads.lens.inputs.annotated import AlignedText
from manyheads.lens.inputs.synthetic import SpecialTokens, inputs_from_ids
from manyheads.lens.inputs.texts import ModelInputs, for_each_batch, forward_hidden
from manyheads.lens.results.addresses import Block, blocks_of, stacks_of
from manyheads.models.build import Model

MAX_OFFSET = 10
OFFSETS = tuple(offset for offset in range(-MAX_OFFSET, MAX_OFFSET + 1) if offset)
BASELINES = (
    *(f"a fixed offset of {offset:+d}" for offset in OFFSETS),
    *(f"the {which} candidate" for which in ("first", "last", "nearest")),
)
BATCH_TOKENS = 4096

FloatsByHead = Float[np.ndarray, " h"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WordTargetScores:
    """One task, by head: the fraction of `counts` words that attend most to the right word.

    `weight` is the mean weight on the right words, and `rivals` on all their rivals. `baseline` is
    the accuracy of the best fixed choice, and `baseline_names` says which that is. A word counts
    if it sees a right word and a wrong one, and a rival if it has any.
    """

    task: str
    counts: FloatsByHead
    accuracy: FloatsByHead
    weight: FloatsByHead
    rivals: FloatsByHead
    baseline: FloatsByHead
    baseline_names: tuple[str, ...]

    @property
    def errors(self) -> FloatsByHead:
        """Standard errors of the accuracy, words being independent."""
        spread = np.sqrt(self.accuracy * (1 - self.accuracy)) / np.sqrt(np.fmax(self.counts, 1))
        # An accuracy of exactly 0 or 1 on few words is not that certain.
        return np.fmax(spread, 0.5 / np.fmax(self.counts, 1))


def measure_word_targets(
    model: Model,
    texts: Sequence[AlignedText],
    *,
    label: str = "scoring words",
    progress: bool = True,
) -> tuple[dict[str, WordTargetScores], bool]:
    """The scores of every task, and whether all texts were read: Ctrl-C keeps finished batches."""
    blocks = blocks_of(model)
    counts = _TargetCounts(texts)
    special = SpecialTokens.of(model)

    def visit(inputs: ModelInputs, numbers: list[int]) -> None:
        batch = _WordTargetSums(
            counts, [texts[number] for number in numbers], special.shifts(model)
        )
        with torch.inference_mode():
            forward_hidden(model, inputs, PatternWatcher(stacks_of(model), batch.add))
        counts.merge(batch)

    summary = for_each_batch(
        model,
        inputs_from_ids(model, special, [text.ids for text in texts]),
        visit,
        label=label,
        batch_tokens=BATCH_TOKENS,
        progress=progress,
    )
    return {task: counts.result(task, blocks) for task in counts.tasks}, summary.complete


class _TargetCounts:
    """Sums by attention and task: words, correct baselines, hits and weights of heads."""

    def __init__(self, texts: Sequence[AlignedText]) -> None:
        every = dict.fromkeys(pair.task for text in texts for pair in text.pairs)
        self.tasks = {task: row for row, task in enumerate(every)}
        self.sums: dict[Block, Float[Tensor, "tasks columns"]] = {}

    def merge(self, batch: "_WordTargetSums") -> None:
        for block, sums in batch.sums.items():
            self.sums[block] = self.sums[block] + sums if block in self.sums else sums

    def result(self, task: str, blocks: Sequence[Block]) -> WordTargetScores:
        columns: dict[str, list[np.ndarray]] = {}
        baseline_names: list[str] = []
        for block in blocks:
            none = torch.zeros(len(self.tasks), 1 + len(BASELINES) + 3 * block.heads)
            sums = self.sums.get(block, none)[self.tasks[task]].double().numpy()
            count, rest = sums[0], sums[1:] / (sums[0] or np.nan)
            baselines, hits = rest[: len(BASELINES)], rest[len(BASELINES) :]
            best = int(np.argmax(baselines)) if count else 0
            parts = {
                "counts": np.full(block.heads, count),
                "accuracy": hits[: block.heads],
                "weight": hits[block.heads : 2 * block.heads],
                "rivals": hits[2 * block.heads :],
                "baseline": np.full(block.heads, baselines[best]),
            }
            for name, values in parts.items():
                columns.setdefault(name, []).append(values)
            baseline_names += [BASELINES[best]] * block.heads
        joined = {name: np.concatenate(values) for name, values in columns.items()}
        return WordTargetScores(task=task, baseline_names=tuple(baseline_names), **joined)


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
    def of(cls, text: AlignedText, tasks: dict[str, int]) -> "_PairArrays":
        words, pairs = len(text.words), text.pairs
        right = torch.zeros(len(pairs), words, dtype=torch.bool)
        aligned = torch.tensor([bool(tokens) for tokens in text.words])
        allowed, rivals = torch.zeros_like(right), torch.zeros_like(right)
        for row, pair in enumerate(pairs):
            right[row, list(pair.targets)] = True
            rivals[row, list(pair.rivals)] = True
            allowed[row] = aligned
            if pair.candidates:
                allowed[row] = False
                allowed[row, list(pair.candidates)] = True
            allowed[row, pair.source] = False
        return cls(
            torch.tensor([tasks[pair.task] for pair in pairs]),
            torch.tensor([pair.source for pair in pairs]),
            right,
            rivals,
            allowed,
            torch.tensor([bool(pair.candidates) for pair in pairs]),
        )

    def baselines(self, seen: Bool[Tensor, "p w"]) -> Float[Tensor, "p choices"]:
        """Which baselines are right: fixed offsets, or a candidate by its order."""
        words = seen.shape[1]
        at = self.sources[:, None] + torch.tensor(OFFSETS)
        inside = (at >= 0) & (at < words)
        by_offset = self.right.gather(1, at.clamp(0, words - 1)) & inside
        word = torch.arange(words)
        distance = (word[None] - self.sources[:, None]).abs().double()
        orders = (word.double().expand_as(seen), -word.double().expand_as(seen), distance)
        chosen = [order.masked_fill(~seen, torch.inf).argmin(1, keepdim=True) for order in orders]
        by_order = torch.cat([self.right.gather(1, each) for each in chosen], dim=1)
        by_order &= self.has_candidates[:, None]
        by_offset &= ~self.has_candidates[:, None]
        return torch.cat((by_offset, by_order), dim=1).float()


class _WordTargetSums:
    """The sums of one batch, from its patterns."""

    def __init__(
        self, counts: _TargetCounts, texts: Sequence[AlignedText], shifts: dict[str, int]
    ) -> None:
        self.sums: dict[Block, Float[Tensor, "tasks columns"]] = {}
        self._tasks, self._texts, self._shifts = counts.tasks, texts, shifts
        self._pairs = [_PairArrays.of(text, counts.tasks) for text in texts]
        self._tokens: dict[tuple[int, int], Float[Tensor, "w s"]] = {}

    def add(
        self,
        block: Block,
        text: int,
        rows: range,
        weights: Float[Tensor, "h t s"],
        visible: Bool[Tensor, "t s"],
    ) -> None:
        assert len(rows) == weights.shape[-1], "words need complete patterns"
        pairs = self._pairs[text]
        words = self._word_tokens(text, weights.shape[-1], self._shifts[block.stack])
        mean = words / words.sum(1, keepdim=True).clamp(min=1)
        attention = (mean[pairs.sources] @ weights.cpu() @ words.T).float()
        seen = (words[pairs.sources] @ visible.cpu().float() @ words.T) > 0
        seen &= pairs.allowed
        right, wrong = seen & pairs.right, seen & ~pairs.right
        rivals = seen & pairs.rivals
        alone = pairs.rivals.any(1) & ~rivals.any(1)
        valid = right.any(1) & wrong.any(1) & ~alone
        best_right = attention.masked_fill(~right, -1.0).amax(-1)
        best_wrong = attention.masked_fill(~wrong, -1.0).amax(-1)
        hits = (best_right > best_wrong).float()
        on_right, on_rivals = (attention * right).sum(-1), (attention * rivals).sum(-1)
        ones = torch.ones(len(valid), 1)
        row = torch.cat((ones, pairs.baselines(seen), hits.T, on_right.T, on_rivals.T), dim=1)
        sums = self.sums.setdefault(block, torch.zeros(len(self._tasks), row.shape[1]))
        sums.index_add_(0, pairs.tasks[valid], row[valid])

    def _word_tokens(self, text: int, tokens: int, shift: int) -> Float[Tensor, "w s"]:
        """Ones at the tokens of each word, shared by all layers."""
        if (text, shift) not in self._tokens:
            words = self._texts[text].words
            ones = torch.zeros(len(words), tokens)
            for word, positions in enumerate(words):
                ones[word, [position + shift for position in positions]] = 1.0
            self._tokens[text, shift] = ones
        return self._tokens[text, shift]
