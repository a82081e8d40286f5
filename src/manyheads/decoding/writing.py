"""Texts being written side by side: choose a token for each, let those that stopped leave."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decoding.choosing import Sample, draw, own_logprobs
from manyheads.decoding.reading import Reader, context_of
from manyheads.decoding.steps.cached import async_tolist
from manyheads.decoding.task import Task
from manyheads.decoding.written import StoppedBy, Written

__all__ = ["Writing"]


@dataclass(slots=True)
class Draft:
    """One text as far as it got."""

    index: int
    chances: Random
    reader: Reader | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    stopped_by: StoppedBy | None = None


class Writing:
    """The texts of a task that go on, and those that are done.

    With `piecewise` every step also reads what it wrote, as streams and stop strings need it.
    """

    def __init__(self, task: Task, *, piecewise: bool) -> None:
        self.task = task
        self.piecewise = piecewise
        self.steps = task.steps()
        self.penalty = task.penalty()
        self.step = 0
        self.drafts = [self._draft(index) for index in range(len(task.prompts))]
        self.active = list(self.drafts)
        self._stop_ids = frozenset(task.stop_ids)
        self._ids: Int[Tensor, " b"] | None = None
        self._ahead: Float[Tensor, "b v"] | None = None

    def run(self) -> Iterator[None]:
        """Write to the end, with a rest after every token."""
        while self.active and self.step < self.task.wishes.new_tokens:
            self._take_step()
            yield
        for draft in self.active:
            draft.stopped_by = "length"
            self._close(draft)

    def written(self) -> list[Written]:
        return [self._written(draft) for draft in self.drafts]

    @property
    def chosen(self) -> int:
        """Tokens chosen so far; a text that is done counts as long as it might have become."""
        done = len(self.drafts) - len(self.active)
        return done * self.task.wishes.new_tokens + len(self.active) * self.step

    @torch.inference_mode()
    def _take_step(self) -> None:
        logits = self._logits()
        ids = self._choose(logits)
        tokens = async_tolist(ids)
        chances = async_tolist(own_logprobs(logits, ids)) if self.task.wishes.logprobs else None
        self._look_ahead(ids)
        logprobs = None if chances is None else chances()
        forced = self.task.rules.forces_at(self.step) is not None
        stay = []
        for place, (draft, token) in enumerate(zip(self.active, tokens(), strict=True)):
            draft.ids.append(token)
            if logprobs is not None:
                draft.logprobs.append(logprobs[place])
            if self._goes_on(draft, token, forced):
                stay.append(place)
        self.step += 1
        self._keep(stay, ids)

    def _logits(self) -> Float[Tensor, "b v"]:
        if self._ahead is not None:
            return self._ahead
        if self._ids is None:
            return self.steps.start(self.task.batch())
        return self.steps.next(self._ids)

    def _look_ahead(self, ids: Int[Tensor, " b"]) -> None:
        """Let the device begin the next step while the host reads what this one chose.

        Where that turns out to be the end of a text, its part of the next step is for nothing.
        """
        if self.task.device.type == "cuda" and self.step + 1 < self.task.wishes.new_tokens:
            self._ahead = self.steps.next(ids)

    def _choose(self, logits: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        scores = logits if self.penalty is None else self.penalty.apply(logits)
        scores = self.task.rules.apply(scores, self.step)
        choose = self.task.wishes.choose
        if not isinstance(choose, Sample):
            # The first of the largest, as argmax gives it in three times the time.
            return scores.max(dim=-1).indices
        chances = torch.tensor([draft.chances.random() for draft in self.active])
        return draw(choose.narrow(scores), chances.to(scores.device))

    def _goes_on(self, draft: Draft, token: int, forced: bool) -> bool:
        # A token that had to come because there is no more room is no decision to stop.
        if token in self._stop_ids and not forced:
            draft.stopped_by = "stop id"
            self._close(draft)
        elif draft.reader is not None:
            draft.pieces.append(draft.reader.push(token))
            if draft.reader.stopped:
                draft.stopped_by = "stop string"
        return draft.stopped_by is None

    def _keep(self, stay: list[int], ids: Int[Tensor, " b"]) -> None:
        """What stopped leaves the batch, the cache and the penalties."""
        if self.penalty is not None:
            self.penalty.add(ids)
        if len(stay) < len(self.active):
            self.active = [self.active[place] for place in stay]
            if not stay:
                return
            index = torch.tensor(stay, device=ids.device, dtype=torch.long)
            if self._ahead is not None:
                self._ahead = self._ahead[index]
            self.steps.select(stay)
            ids = ids[index]
            if self.penalty is not None:
                self.penalty.select(stay)
        self._ids = ids

    def _close(self, draft: Draft) -> None:
        if draft.reader is not None:
            draft.pieces.append(draft.reader.finish())
            if draft.reader.stopped:
                draft.stopped_by = "stop string"

    def _draft(self, index: int) -> Draft:
        task = self.task
        # The place in the batch counts, so that one prompt given twice gives two texts.
        seed = None if task.wishes.seed is None else f"{task.wishes.seed}/{index}"
        reader = None
        if self.piecewise:
            context = context_of(task.tokenizer, task.context(index))
            reader = Reader(task.tokenizer, context, task.stop_strings)
        return Draft(index, Random(seed), reader)

    def _written(self, draft: Draft) -> Written:
        assert draft.stopped_by is not None
        return Written(
            ids=tuple(draft.ids),
            text=self._text(draft),
            stopped_by=draft.stopped_by,
            logprobs=tuple(draft.logprobs) if self.task.wishes.logprobs else None,
        )

    def _text(self, draft: Draft) -> str | None:
        if draft.reader is not None:
            return "".join(draft.pieces)
        ids = draft.ids[:-1] if draft.stopped_by == "stop id" else draft.ids
        return self.task.text(draft.index, ids)
