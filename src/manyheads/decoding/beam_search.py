"""Beam search: several texts per prompt side by side, of which the most likely is returned."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.decoding import generation_config, sampling
from manyheads.decoding.request import GenerationRequest
from manyheads.devices import check_memory

# The score of a beam that is out: far below any sum of log-probabilities, and finite.
OUT = -1.0e9


class Hypotheses(NamedTuple):
    """The beams of every prompt: ids, their log-probabilities under the model, and scores."""

    ids: Int[Tensor, "b w t"]
    logprobs: Float[Tensor, "b w t"]
    scores: Float[Tensor, "b w"]
    lengths: Int[Tensor, "b w"]
    ended: Bool[Tensor, "b w"]

    @classmethod
    def empty(cls, batch: int, width: int, length: int, device: torch.device) -> "Hypotheses":
        return cls(
            ids=torch.zeros(batch, width, length, dtype=torch.long, device=device),
            logprobs=torch.zeros(batch, width, length, device=device),
            scores=torch.full((batch, width), OUT, device=device),
            lengths=torch.zeros(batch, width, dtype=torch.long, device=device),
            ended=torch.zeros(batch, width, dtype=torch.bool, device=device),
        )

    def beams(self, chosen: Int[Tensor, "b k"]) -> "Hypotheses":
        """Some beams of every prompt, in this order."""
        rows = torch.arange(chosen.shape[0], device=chosen.device).unsqueeze(1)
        return Hypotheses(*(part[rows, chosen] for part in self))

    def prompts(self, chosen: list[int]) -> "Hypotheses":
        index = torch.tensor(chosen, device=self.ids.device, dtype=torch.long)
        return Hypotheses(*(part[index] for part in self))


class BeamSearchLoop:
    """All prompts at once; a prompt leaves when its running beams can no longer win."""

    def __init__(self, request: GenerationRequest, beams: sampling.BeamSearch) -> None:
        self.request, self.beams = request, beams
        self.steps = request.steps()
        self.penalty = request.repetition_penalty()
        self.step = 0
        count, device = len(request.prompts), request.device
        new = request.config.max_new_tokens
        check_memory(
            # Ids and log-probabilities of running and finished beams.
            2 * 12 * count * beams.num_beams * new,
            f"beams of max_new_tokens={new}",
            "use a smaller max_new_tokens",
            device,
        )
        size = (count, beams.num_beams, new, device)
        self.running, self.finished = Hypotheses.empty(*size), Hypotheses.empty(*size)
        # All beams start equal: only one may continue, or all would become the same text.
        self.running.scores[:, 0] = 0.0
        self.open = torch.ones(count, 1, dtype=torch.bool, device=device)
        self.active = list(range(count))
        self.done: dict[int, generation_config.Generation] = {}
        self._eos_token_ids = torch.tensor(request.eos_token_ids, device=device, dtype=torch.long)

    def run(self) -> Iterator[None]:
        """Search to the end, with a pause after every step."""
        while self.active and self.step < self.request.config.max_new_tokens:
            self._take_step()
            yield

    def generations(self) -> list[generation_config.Generation]:
        return [self.done[index] for index in range(len(self.request.prompts))]

    @property
    def tokens_done(self) -> int:
        """Tokens generated so far, those of the best beam of each prompt."""
        done = sum(len(generation.ids) for generation in self.done.values())
        return done + len(self.active) * self.step

    @property
    def tokens_left(self) -> int:
        """The most that can follow."""
        return len(self.active) * (self.request.config.max_new_tokens - self.step)

    @torch.inference_mode()
    def _take_step(self) -> None:
        candidates, parents = self._candidates(self._logits())
        self.step += 1
        self._finish(candidates)
        going_on = candidates.scores + candidates.ended.float() * OUT
        best = going_on.topk(self.beams.num_beams)
        self.running = candidates.beams(best.indices)._replace(scores=best.values)
        self._go_on(parents.gather(1, best.indices), candidates.ended.all(dim=1))

    def _logits(self) -> Float[Tensor, "bw v"]:
        if self.step:
            return self.steps.next(self.running.ids[:, :, self.step - 1].flatten())
        logits = self.steps.start(self.request.batch())
        every = [row for row in range(len(self.active)) for _ in range(self.beams.num_beams)]
        self.steps.select(every)
        if self.penalty is not None:
            self.penalty.select(every)
        return logits.repeat_interleave(self.beams.num_beams, dim=0)

    def _candidates(self, logits: Float[Tensor, "bw v"]) -> tuple[Hypotheses, Int[Tensor, "b k"]]:
        """The best texts with one more token and the beams they extend, more than are kept."""
        own = logits.float().log_softmax(dim=-1)
        scores = own if self.penalty is None else self.penalty.apply(own)
        scores = self.request.constraints.apply(scores, self.step)
        width, vocabulary = self.beams.num_beams, logits.shape[-1]
        whole = scores.unflatten(0, (-1, width)) + self.running.scores.unsqueeze(2)
        count = width * max(2, 1 + len(self.request.eos_token_ids))
        best = whole.flatten(1).topk(min(count, width * vocabulary))
        parents, tokens = best.indices // vocabulary, best.indices % vocabulary
        texts = self.running.beams(parents)
        texts.ids[:, :, self.step] = tokens
        by_prompt = own.unflatten(0, (-1, width)).flatten(1)
        texts.logprobs[:, :, self.step] = by_prompt.gather(1, best.indices)
        ended = torch.isin(tokens, self._eos_token_ids)
        if self.step + 1 == self.request.config.max_new_tokens:
            ended = torch.ones_like(ended)
        texts = texts._replace(scores=best.values, lengths=texts.lengths + 1, ended=ended)
        return texts, parents

    def _finish(self, candidates: Hypotheses) -> None:
        """Compare the texts that ended now with those that ended before."""
        width = self.beams.num_beams
        among_best = torch.arange(candidates.ended.shape[1], device=self.request.device) < width
        ended = candidates.ended & among_best
        full = self.finished.ended.all(dim=1, keepdim=True) & (self.beams.early_stopping is True)
        scores = candidates.scores / self.step**self.beams.length_penalty
        for out in (full, ~self.open, ~ended):
            scores = scores + out.float() * OUT
        both = zip(self.finished, candidates._replace(scores=scores, ended=ended), strict=True)
        merged = Hypotheses(*(torch.cat(pair, dim=1) for pair in both))
        self.finished = merged.beams(merged.scores.topk(width).indices)

    def _go_on(self, parents: Int[Tensor, "b w"], all_ended: Bool[Tensor, " b"]) -> None:
        """Remove finished prompts and reorder the caches of the others by their beams."""
        self.open = self.open & self._may_win()
        over = ~self.open.squeeze(1) | all_ended
        if self.beams.early_stopping is True:
            over = over | self.finished.ended.all(dim=1)
        finished, origins, width = over.tolist(), parents.tolist(), self.beams.num_beams
        rows = [row for row, done in enumerate(finished) if not done]
        for row, done in enumerate(finished):
            if done:
                self.done[self.active[row]] = self._best(row)
        if len(rows) < len(self.active):
            self.running, self.finished = self.running.prompts(rows), self.finished.prompts(rows)
            self.open = self.open[torch.tensor(rows, device=self.request.device, dtype=torch.long)]
            self.active = [self.active[row] for row in rows]
        if not rows:
            return
        beams = [row * width + parent for row in rows for parent in origins[row]]
        if beams != list(range(len(finished) * width)):
            self.steps.select(beams)
        if self.penalty is not None:
            self.penalty.select(beams)
            self.penalty.add(self.running.ids[:, :, self.step - 1].flatten())

    def _may_win(self) -> Bool[Tensor, "b 1"]:
        """Whether the best running beam could still beat the worst finished text."""
        penalty, length = self.beams.length_penalty, self.step
        if self.beams.early_stopping == "never" and penalty > 0:
            length = self.request.config.max_new_tokens
        best = self.running.scores[:, :1] / length**penalty
        worst = self.finished.scores.min(dim=1, keepdim=True).values
        return (best > torch.where(self.finished.ended, worst, OUT)).any(dim=1, keepdim=True)

    def _best(self, row: int) -> generation_config.Generation:
        length = int(self.finished.lengths[row, 0])
        ids = self.finished.ids[row, 0, :length].tolist()
        forced = self.request.constraints.forced_at(length - 1) is not None
        stopped = ids[-1] in self.request.eos_token_ids and not forced
        logprobs = self.finished.logprobs[row, 0, :length].tolist()
        return generation_config.Generation(
            ids=tuple(ids),
            text=self.request.text(self.active[row], ids[:-1] if stopped else ids),
            finish_reason="eos" if stopped else "length",
            logprobs=tuple(logprobs) if self.request.config.logprobs else None,
        )
