"""The in-context score: how much better a model predicts late in a text than early in it."""

from dataclasses import dataclass

import torch

from manyheads.bridge.automatic import wrapping_models
from manyheads.encoding import text_reader
from manyheads.errors import InputError, check_int
from manyheads.formatting import pluralise
from manyheads.lens.inputs.cached_run import final_hidden
from manyheads.lens.inputs.metrics import bind_metric, weighted_mean
from manyheads.lens.inputs.texts import Inputs, for_each_batch
from manyheads.lens.results.files import Result
from manyheads.lens.results.tables import format_change
from manyheads.models import build, model_interface
from manyheads.ragged import Ragged


@dataclass(frozen=True, slots=True, kw_only=True)
class InContextScore(Result):
    """The mean loss at a late position minus that at an early one, in nats: below 0 is better late.

    `error` is the standard error over texts, whose two losses are compared in pairs.
    """

    score: float
    error: float
    early: int
    late: int
    early_loss: float
    late_loss: float
    texts: int
    complete: bool = True

    def __str__(self) -> str:
        score = format_change(self.score, self.error)
        return (
            f"in-context score {score}: loss {self.late_loss:.4f} at token {self.late}, "
            f"{self.early_loss:.4f} at token {self.early}, over {pluralise(self.texts, 'text')}"
        )


@wrapping_models
def in_context_score(
    model: build.Model,
    texts: Inputs,
    *,
    early: int = 50,
    late: int = 500,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> InContextScore:
    """The loss at token `late` minus that at token `early`, mean over texts (arXiv 2209.11895).

    The token at position p is predicted from the p tokens before it. Texts that end before `late`
    do not count, and what comes after it is not read. Ctrl-C keeps the finished batches.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> in_context_score(model, [list(range(12)), list(range(3))], early=2, late=10).texts
    1
    """
    check_int("early", early, minimum=1)
    check_int("late", late, minimum=early + 1)
    if not model.predicts_next_token or model.reads_pairs:
        raise InputError(
            f"the in-context score is the loss of next tokens, and this {type(model).__name__} "
            "does not predict them",
            "use a decoder with a language head",
        )
    limit = text_reader.resolve_max_length(text_reader.require_text_model(model), None)
    if limit is not None and late >= limit:
        raise InputError(
            f"late={late} needs texts of {late + 1} tokens, and this model reads at most {limit}",
            f"use late={limit - 1} or less",
        )
    differences: list[torch.Tensor] = []

    def visit(inputs: model_interface.ModelInputs, _: list[int]) -> None:
        assert inputs.ids is not None, "a decoder reads token ids"
        rows = [row for row in inputs.ids.to_list() if len(row) > late]
        if not rows:
            return
        context = model_interface.ModelInputs(ids=Ragged.from_list([row[:late] for row in rows]))
        with torch.inference_mode():
            hidden = final_hidden(model, context)
            losses = []
            for position in (early, late):
                targets = [{position - 1: int(row[position])} for row in rows]
                bound = bind_metric(model, context, range(len(rows)), "loss", targets)
                losses.append(bound(hidden)[0].double().cpu())
        differences.append(torch.stack(losses, dim=1))

    summary = for_each_batch(
        model,
        texts,
        visit,
        label="measuring losses",
        max_length=late + 1,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    if not differences:
        raise InputError(
            f"no text has {late + 1} tokens, which late={late} needs",
            "pass longer texts, or set a smaller late",
        )
    pairs = torch.cat(differences)
    weights = torch.ones(len(pairs))
    (early_loss, late_loss), _ = weighted_mean(pairs, weights)
    score, error = weighted_mean(pairs[:, 1] - pairs[:, 0], weights)
    return InContextScore(
        score=float(score),
        error=float(error),
        early=early,
        late=late,
        early_loss=float(early_loss),
        late_loss=float(late_loss),
        texts=len(pairs),
        complete=summary.complete,
    )
