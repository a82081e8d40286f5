"""Beam search: several texts a prompt side by side, of which the likeliest is kept."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.decoding.choosing import Beams
from manyheads.decoding.task import Task
from manyheads.decoding.written import Written

__all__ = ["Search"]

# Stands for "out": far below any sum of log-probabilities, and still a number.
OUT = -1.0e9


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """The beams of every prompt: ids, the model's own log-probabilities of them, and scores."""

    ids: Int[Tensor, "b w t"]
    logprobs: Float[Tensor, "b w t"]
    scores: Float[Tensor, "b w"]
    lengths: Int[Tensor, "b w"]
    ended: Bool[Tensor, "b w"]

    @classmethod
    def empty(cls, batch: int, width: int, room: int, device: torch.device) -> "Texts":
        return cls(
            ids=torch.zeros(batch, width, room, dtype=torch.long, device=device),
            logprobs=torch.zeros(batch, width, room, device=device),
            scores=torch.full((batch, width), OUT, device=device),
            lengths=torch.zeros(batch, width, dtype=torch.long, device=device),
            ended=torch.zeros(batch, width, dtype=torch.bool, device=device),
        )

    def beams(self, chosen: Int[Tensor, "b k"]) -> "Texts":
        """Some beams of every prompt, in the given order."""
        rows = torch.arange(chosen.shape[0], device=chosen.device).unsqueeze(1)
        return self._each(lambda part: part[rows, chosen])

    def prompts(self, chosen: list[int]) -> "Texts":
        index = torch.tensor(chosen, device=self.ids.device, dtype=torch.long)
        return self._each(lambda part: part[index])

    def beside(self, other: "Texts") -> "Texts":
        parts = zip(self._parts(), other._parts(), strict=True)
        return Texts(*(torch.cat(pair, dim=1) for pair in parts))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Texts":
        return Texts(*map(change, self._parts()))

    def _parts(self) -> tuple[Tensor, ...]:
        return self.ids, self.logprobs, self.scores, self.lengths, self.ended


class Search:
    """All prompts at once; one leaves when its running beams can no longer win."""

    def __init__(self, task: Task, beams: Beams) -> None:
        self.task, self.config = task, beams
        self.steps = task.steps()
        self.penalty = task.penalty()
        self.step = 0
        size = (len(task.prompts), beams.width, task.wishes.new_tokens, task.device)
        self.running, self.finished = Texts.empty(*size), Texts.empty(*size)
        # All beams begin the same: one alone may go on, or all would write the same text.
        self.running.scores[:, 0] = 0.0
        self.open = torch.ones(len(task.prompts), 1, dtype=torch.bool, device=task.device)
        self.active = list(range(len(task.prompts)))
        self.done: dict[int, Written] = {}
        self._stop_ids = torch.tensor(task.stop_ids, device=task.device, dtype=torch.long)

    def run(self) -> Iterator[None]:
        """Search to the end, with a rest after every token."""
        while self.active and self.step < self.task.wishes.new_tokens:
            self._take_step()
            yield

    def written(self) -> list[Written]:
        return [self.done[index] for index in range(len(self.task.prompts))]

    @property
    def chosen(self) -> int:
        """Tokens chosen so far; a text that is done counts as long as it might have become."""
        new = self.task.wishes.new_tokens
        return len(self.done) * new + len(self.active) * self.step

    @torch.inference_mode()
    def _take_step(self) -> None:
        candidates, parents = self._candidates(self._logits())
        self.step += 1
        self._finish(candidates)
        going_on = candidates.scores + candidates.ended.float() * OUT
        best = going_on.topk(self.config.width)
        self.running = replace(candidates.beams(best.indices), scores=best.values)
        self._go_on(parents.gather(1, best.indices), candidates.ended.all(dim=1))

    def _logits(self) -> Float[Tensor, "bw v"]:
        if self.step:
            return self.steps.next(self.running.ids[:, :, self.step - 1].flatten())
        logits = self.steps.start(self.task.batch())
        every = [place for place in range(len(self.active)) for _ in range(self.config.width)]
        self.steps.select(every)
        if self.penalty is not None:
            self.penalty.select(every)
        return logits.repeat_interleave(self.config.width, dim=0)

    def _candidates(self, logits: Float[Tensor, "bw v"]) -> tuple[Texts, Int[Tensor, "b k"]]:
        """The best texts of one more token and the beams they came from; enough to lose some."""
        own = logits.float().log_softmax(dim=-1)
        scores = own if self.penalty is None else self.penalty.apply(own)
        scores = self.task.rules.apply(scores, self.step)
        width, vocabulary = self.config.width, logits.shape[-1]
        whole = scores.unflatten(0, (-1, width)) + self.running.scores.unsqueeze(2)
        count = width * max(2, 1 + len(self.task.stop_ids))
        best = whole.flatten(1).topk(min(count, width * vocabulary))
        parents, tokens = best.indices // vocabulary, best.indices % vocabulary
        texts = self.running.beams(parents)
        texts.ids[:, :, self.step] = tokens
        texts.logprobs[:, :, self.step] = (
            own.unflatten(0, (-1, width)).flatten(1).gather(1, best.indices)
        )
        ended = torch.isin(tokens, self._stop_ids)
        if self.step + 1 == self.task.wishes.new_tokens:
            ended = torch.ones_like(ended)
        texts = replace(texts, scores=best.values, lengths=texts.lengths + 1, ended=ended)
        return texts, parents

    def _finish(self, candidates: Texts) -> None:
        """Texts among the best that ended compete with those that ended before."""
        width = self.config.width
        among_best = torch.arange(candidates.ended.shape[1], device=self.task.device) < width
        ended = candidates.ended & among_best
        full = self.finished.ended.all(dim=1, keepdim=True) & (self.config.early_stopping is True)
        scores = candidates.scores / self.step**self.config.length_penalty
        for out in (full, ~self.open, ~ended):
            scores = scores + out.float() * OUT
        merged = self.finished.beside(replace(candidates, scores=scores, ended=ended))
        self.finished = merged.beams(merged.scores.topk(width).indices)

    def _go_on(self, parents: Int[Tensor, "b w"], nothing_left: Bool[Tensor, " b"]) -> None:
        """Prompts that are over leave; the caches of the others follow their beams."""
        self.open = self.open & self._may_win()
        over = ~self.open.squeeze(1) | nothing_left
        if self.config.early_stopping is True:
            over = over | self.finished.ended.all(dim=1)
        gone, origins, width = over.tolist(), parents.tolist(), self.config.width
        stay = [place for place, left in enumerate(gone) if not left]
        for place, left in enumerate(gone):
            if left:
                self.done[self.active[place]] = self._best(place)
        if len(stay) < len(self.active):
            self.running, self.finished = self.running.prompts(stay), self.finished.prompts(stay)
            self.open = self.open[torch.tensor(stay, device=self.task.device, dtype=torch.long)]
            self.active = [self.active[place] for place in stay]
        if not stay:
            return
        beams = [place * width + parent for place in stay for parent in origins[place]]
        if beams != list(range(len(gone) * width)):
            self.steps.select(beams)
        if self.penalty is not None:
            self.penalty.select(beams)
            self.penalty.add(self.running.ids[:, :, self.step - 1].flatten())

    def _may_win(self) -> Bool[Tensor, "b 1"]:
        """Whether the best running beam could still beat the worst finished text."""
        penalty, length = self.config.length_penalty, self.step
        if self.config.early_stopping == "never" and penalty > 0:
            length = self.task.wishes.new_tokens
        best = self.running.scores[:, :1] / length**penalty
        worst = self.finished.scores.min(dim=1, keepdim=True).values
        return (best > torch.where(self.finished.ended, worst, OUT)).any(dim=1, keepdim=True)

    def _best(self, place: int) -> Written:
        length = int(self.finished.lengths[place, 0])
        ids = self.finished.ids[place, 0, :length].tolist()
        forced = self.task.rules.forces_at(length - 1) is not None
        stopped = ids[-1] in self.task.stop_ids and not forced
        logprobs = self.finished.logprobs[place, 0, :length].tolist()
        return Written(
            ids=tuple(ids),
            text=self.task.text(self.active[place], ids[:-1] if stopped else ids),
            stopped_by="stop id" if stopped else "length",
            logprobs=tuple(logprobs) if self.task.wishes.logprobs else None,
        )
