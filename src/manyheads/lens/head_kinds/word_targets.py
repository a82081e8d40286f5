"""Which word each head looks at most, and how often that is the one it should be.

Clark et al. (arXiv 1906.04341): the weight to a word of several tokens is their sum, the weight
from it their mean; special tokens are no words. A head is compared with the best fixed choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.attention_maps.patterns import Forming
from manyheads.lens.inputs.annotated import MarkedText
from manyheads.lens.inputs.batches import lead
from manyheads.lens.inputs.synthetic import Frame, as_given
from manyheads.lens.inputs.texts import Given, climb
from manyheads.lens.results.addresses import Block, blocks_of, stacks_of
from manyheads.models.build import Model

FURTHEST = 10
OFFSETS = tuple(offset for offset in range(-FURTHEST, FURTHEST + 1) if offset)
CHOICES = (
    *(f"a fixed offset of {offset:+d}" for offset in OFFSETS),
    *(f"the {which} candidate" for which in ("first", "last", "nearest")),
)
BATCH_TOKENS = 4096

FloatsByHead = Float[np.ndarray, " h"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pointed:
    """One task: by head the share of words that look at the right one most, over `counts` words.

    `weight` is what the right word gets on average, and `rivals` what all its rivals get together,
    0 where it has none. `fixed` is the share that the best fixed choice gets right, and `choice`
    which that is. A word counts where it may see a right one and another beside it, a rival where
    there should be one.
    """

    task: str
    counts: FloatsByHead
    share: FloatsByHead
    weight: FloatsByHead
    rivals: FloatsByHead
    fixed: FloatsByHead
    choice: tuple[str, ...]

    @property
    def errors(self) -> FloatsByHead:
        """Standard errors of the shares, those of words drawn one by one."""
        spread = np.sqrt(self.share * (1 - self.share)) / np.sqrt(np.fmax(self.counts, 1))
        # A share of exactly 0 or 1 of few words is not known that well.
        return np.fmax(spread, 0.5 / np.fmax(self.counts, 1))


def point(
    model: Model, texts: Sequence[MarkedText], *, label: str = "pointing", progress: bool = True
) -> tuple[dict[str, Pointed], bool]:
    """Every task of the texts, and whether all of them were read: Ctrl-C keeps what was."""
    blocks = blocks_of(model)
    counting = _Counting(texts)
    frame = Frame.of(model)

    def visit(given: Given, numbers: list[int]) -> None:
        batch = _Batch(counting, [texts[number] for number in numbers], frame.shifts(model))
        with torch.inference_mode():
            climb(model, given, Forming(stacks_of(model), batch.take))
        counting.merge(batch)

    passed = lead(
        model,
        as_given(model, frame, [text.ids for text in texts]),
        visit,
        label=label,
        batch_tokens=BATCH_TOKENS,
        progress=progress,
    )
    return {task: counting.result(task, blocks) for task in counting.tasks}, passed.complete


class _Counting:
    """Sums by attention and task: words, choices that are right, hits and weights of heads."""

    def __init__(self, texts: Sequence[MarkedText]) -> None:
        every = dict.fromkeys(pair.task for text in texts for pair in text.pairs)
        self.tasks = {task: place for place, task in enumerate(every)}
        self.sums: dict[Block, Float[Tensor, "tasks columns"]] = {}

    def merge(self, batch: "_Batch") -> None:
        for block, sums in batch.sums.items():
            self.sums[block] = self.sums[block] + sums if block in self.sums else sums

    def result(self, task: str, blocks: Sequence[Block]) -> Pointed:
        found: dict[str, list[np.ndarray]] = {}
        choice: list[str] = []
        for block in blocks:
            none = torch.zeros(len(self.tasks), 1 + len(CHOICES) + 3 * block.heads)
            sums = self.sums.get(block, none)[self.tasks[task]].double().numpy()
            count, rest = sums[0], sums[1:] / (sums[0] or np.nan)
            fixed, hits = rest[: len(CHOICES)], rest[len(CHOICES) :]
            best = int(np.argmax(fixed)) if count else 0
            parts = {
                "counts": np.full(block.heads, count),
                "share": hits[: block.heads],
                "weight": hits[block.heads : 2 * block.heads],
                "rivals": hits[2 * block.heads :],
                "fixed": np.full(block.heads, fixed[best]),
            }
            for name, values in parts.items():
                found.setdefault(name, []).append(values)
            choice += [CHOICES[best]] * block.heads
        joined = {name: np.concatenate(values) for name, values in found.items()}
        return Pointed(task=task, choice=tuple(choice), **joined)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """The pairs of one text as arrays over its words."""

    tasks: Int[Tensor, " p"]
    sources: Int[Tensor, " p"]
    right: Bool[Tensor, "p w"]
    rivals: Bool[Tensor, "p w"]
    open: Bool[Tensor, "p w"]
    chooses: Bool[Tensor, " p"]

    @classmethod
    def of(cls, text: MarkedText, tasks: dict[str, int]) -> "_Asked":
        words, pairs = len(text.words), text.pairs
        right = torch.zeros(len(pairs), words, dtype=torch.bool)
        free = torch.tensor([bool(places) for places in text.words])
        allowed, rivals = torch.zeros_like(right), torch.zeros_like(right)
        for row, pair in enumerate(pairs):
            right[row, list(pair.targets)] = True
            rivals[row, list(pair.rivals)] = True
            allowed[row] = free
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

    def fixed(self, seen: Bool[Tensor, "p w"]) -> Float[Tensor, "p choices"]:
        """Which fixed choices would be right: offsets, or of some candidates one by its order."""
        words = seen.shape[1]
        at = self.sources[:, None] + torch.tensor(OFFSETS)
        inside = (at >= 0) & (at < words)
        by_offset = self.right.gather(1, at.clamp(0, words - 1)) & inside
        place = torch.arange(words)
        away = (place[None] - self.sources[:, None]).abs().double()
        orders = (place.double().expand_as(seen), -place.double().expand_as(seen), away)
        chosen = [order.masked_fill(~seen, torch.inf).argmin(1, keepdim=True) for order in orders]
        by_order = torch.cat([self.right.gather(1, each) for each in chosen], dim=1)
        by_order &= self.chooses[:, None]
        by_offset &= ~self.chooses[:, None]
        return torch.cat((by_offset, by_order), dim=1).float()


class _Batch:
    """Takes the patterns of one batch; it counts as a whole or not at all."""

    def __init__(
        self, counting: _Counting, texts: Sequence[MarkedText], shifts: dict[str, int]
    ) -> None:
        self.sums: dict[Block, Float[Tensor, "tasks columns"]] = {}
        self._tasks, self._texts, self._shifts = counting.tasks, texts, shifts
        self._asked = [_Asked.of(text, counting.tasks) for text in texts]
        self._tokens: dict[tuple[int, int], Float[Tensor, "w s"]] = {}

    def take(
        self,
        block: Block,
        text: int,
        rows: range,
        weights: Float[Tensor, "h t s"],
        visible: Bool[Tensor, "t s"],
    ) -> None:
        assert len(rows) == weights.shape[-1], "words are compared within whole texts"
        asked = self._asked[text]
        belongs = self._belongs(text, weights.shape[-1], self._shifts[block.stack])
        mean = belongs / belongs.sum(1, keepdim=True).clamp(min=1)
        looks = (mean[asked.sources] @ weights.cpu() @ belongs.T).float()
        seen = (belongs[asked.sources] @ visible.cpu().float() @ belongs.T) > 0
        seen &= asked.open
        right, wrong = seen & asked.right, seen & ~asked.right
        rivals = seen & asked.rivals
        alone = asked.rivals.any(1) & ~rivals.any(1)
        counts = right.any(1) & wrong.any(1) & ~alone
        best_right = looks.masked_fill(~right, -1.0).amax(-1)
        best_wrong = looks.masked_fill(~wrong, -1.0).amax(-1)
        hits = (best_right > best_wrong).float()
        on_right, on_rivals = (looks * right).sum(-1), (looks * rivals).sum(-1)
        ones = torch.ones(len(counts), 1)
        row = torch.cat((ones, asked.fixed(seen), hits.T, on_right.T, on_rivals.T), dim=1)
        sums = self.sums.setdefault(block, torch.zeros(len(self._tasks), row.shape[1]))
        sums.index_add_(0, asked.tasks[counts], row[counts])

    def _belongs(self, text: int, tokens: int, shift: int) -> Float[Tensor, "w s"]:
        """Ones at the tokens of each word; the same for all layers."""
        if (text, shift) not in self._tokens:
            words = self._texts[text].words
            belongs = torch.zeros(len(words), tokens)
            for word, places in enumerate(words):
                belongs[word, [place + shift for place in places]] = 1.0
            self._tokens[text, shift] = belongs
        return self._tokens[text, shift]
