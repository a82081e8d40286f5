"""The logit lens: what a model would say if it stopped after each layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import Edits, entry, part_of
from manyheads.lens.inputs.texts import read, run
from manyheads.lens.results.files import Result
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.models.readout import ClassHead
from manyheads.models.vision import Vision
from manyheads.ragged import Lengths
from manyheads.taps import Site, Tap


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LogitLens(Result):
    """The likeliest answers of each text before the first layer and after each.

    `answer_log_probabilities` and `answer_ranks` are those of the answers to look for, if there are
    any; rank 0 is the likeliest token.
    """

    answers: Int[Tensor, "steps b k"]
    log_probabilities: Float[Tensor, "steps b k"]
    answer_log_probabilities: Float[Tensor, "steps b"] | None = None
    answer_ranks: Int[Tensor, "steps b"] | None = None

    def settled(self) -> Int[Tensor, " b"]:
        """The first step from which the likeliest answer stays what it is at the end."""
        first = self.answers[..., 0]
        agrees = (first == first[-1]).flip(0).long().cumprod(0)
        return first.shape[0] - agrees.sum(0)

    def __str__(self) -> str:
        settled = self.settled().float().mean()
        steps = self.answers.shape[0] - 1
        return (
            f"logit lens of {self.answers.shape[1]} texts: the answer is settled after "
            f"{float(settled):.1f} of {steps} layers"
        )


def logit_lens(
    model: Model,
    texts: Any,
    answer: Sequence[int] | None = None,
    *,
    at: Literal["last"] | Sequence[int] = "last",
    top_k: int = 5,
) -> LogitLens:
    """The final norm and the readout put on the residual stream after every layer (nostalgebraist).

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> logit_lens(model, [[1, 2, 3], [4, 5]], top_k=3).answers.shape
    torch.Size([3, 2, 3])
    """
    part = part_of(model)
    if model.readout is None or isinstance(model.readout.config, ClassHead):
        raise InputError(
            f"this {type(model).__name__} scores no tokens", "use a model with a language head"
        )
    assert not isinstance(model, Vision), "a Vision has a class head or none"
    given, stack = read(model, texts), part.stack
    with resting(model), torch.no_grad():
        sites = [entry(stack, layer) for layer in range(len(stack.layers))]
        final = Site(-1, Tap.FINAL, stack=part.stack_name)
        seen = Edits({}, [*sites, final])
        run(model, given, seen)
        places = _places(seen[final].lengths, at)
        rows = [stack.final_norm(seen[site].values[places]) for site in sites]
        rows.append(seen[final].values[places])
        features = model.readout.features(torch.cat(rows))
        logits = torch.nn.functional.linear(
            features, model.readout.vectors(model.table), model.readout.bias
        ).float()
        scores = logits.log_softmax(-1).unflatten(0, (len(rows), -1))
    found = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
    if answer is None:
        return LogitLens(answers=found.indices, log_probabilities=found.values)
    if len(answer) != scores.shape[1]:
        raise InputError(
            f"{len(answer)} answers were given for {scores.shape[1]} texts", "give one each"
        )
    wanted = torch.tensor(list(answer), device=scores.device).expand(len(rows), -1).unsqueeze(-1)
    own = scores.gather(-1, wanted)
    return LogitLens(
        answers=found.indices,
        log_probabilities=found.values,
        answer_log_probabilities=own.squeeze(-1),
        answer_ranks=(scores > own).sum(-1),
    )


def _places(lengths: Lengths, at: Literal["last"] | Sequence[int]) -> Int[Tensor, " b"]:
    if isinstance(at, str):
        return lengths.offsets[1:].long() - 1
    if len(at) != len(lengths):
        raise InputError(
            f"{len(at)} positions were given for {len(lengths)} texts", "give one each"
        )
    for text, (position, length) in enumerate(zip(at, lengths.each, strict=True)):
        if not 0 <= position < length:
            raise InputError(f"text {text} has no position {position}", f"use 0 to {length - 1}")
    return lengths.offsets[:-1].long() + torch.tensor(list(at), device=lengths.offsets.device)
