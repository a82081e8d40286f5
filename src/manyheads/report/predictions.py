"""What a model predicts on the text or image of a report: next tokens, masked tokens or classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.data.masking import masking_vocabulary
from manyheads.encoding.text_reader import batch_by_length
from manyheads.errors import ManyheadsError
from manyheads.lens.inputs.cached_run import final_hidden
from manyheads.lens.inputs.texts import default_batch_tokens, read_inputs
from manyheads.models import build
from manyheads.models.model_interface import ModelInputs, PredictedOutput
from manyheads.ragged import Ragged
from manyheads.report.inputs import ReportInput
from manyheads.tokenizers import token_text

TOP = 5
# Tokens that are masked one by one, spread over the text.
MAX_MASKED = 32
# Logits that are computed at once.
MAX_LOGITS = 2**25


@dataclass(frozen=True, slots=True)
class PositionPrediction:
    """The most probable outputs at one position, and how probable the right one was.

    `token` is the number of the right output: the token that follows, or that was masked.
    """

    position: int
    top: tuple[tuple[int, float], ...]
    token: int | None = None
    probability: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPredictions:
    """The predictions at some positions of a text, in order; `unknown` says why there are none.

    `names` has the text of every number that occurs.
    """

    output: PredictedOutput
    rows: tuple[PositionPrediction, ...] = ()
    names: dict[int, str]
    unknown: str = ""

    @property
    def loss(self) -> float:
        """The mean loss at the positions whose right output is known, in nats."""
        chances = [row.probability for row in self.rows if row.probability is not None]
        return float(-np.log(np.maximum(chances, 1e-30)).mean()) if chances else float("nan")

    @property
    def hits(self) -> float:
        """The fraction of those positions where the right output is the most probable."""
        ranked = [row.top[0][0] == row.token for row in self.rows if row.token is not None]
        return sum(ranked) / len(ranked) if ranked else float("nan")

    def record(self) -> dict[str, Any]:
        """What the page reads: numbers are indices into `names`."""
        index = {number: place for place, number in enumerate(self.names)}
        return {
            "output": self.output,
            "names": list(self.names.values()),
            "rows": [
                [
                    row.position,
                    [[index[number], float(f"{part:.4g}")] for number, part in row.top],
                    None if row.token is None else index[row.token],
                    None if row.probability is None else float(f"{row.probability:.4g}"),
                ]
                for row in self.rows
            ],
        }


def predict(model: build.Model, source: ReportInput) -> TextPredictions:
    """Predict at every shown token of a decoder, at some masked ones of an encoder, or a class."""
    output = model.predicted_output
    if output == "none":
        return TextPredictions(output=output, names={}, unknown="this model outputs vectors")
    try:
        inputs = read_inputs(model, source.shown)
        with build.eval_mode(model), torch.inference_mode():
            if output == "masked token":
                rows = tuple(_masked(model, source.ids))
            elif output == "classes":
                hidden = final_hidden(model, inputs)
                assert model.readout is not None
                chances = model.readout(hidden, model.table)[0].float().softmax(-1)
                rows = (PositionPrediction(0, _top(chances)),)
            else:
                answers = source.ids[1:] if output == "next token" else ()
                rows = tuple(_at_each_token(model, final_hidden(model, inputs).values, answers))
    except ManyheadsError as error:
        return TextPredictions(output=output, names={}, unknown=str(error))
    numbers = {number for row in rows for number, _ in row.top}
    numbers |= {row.token for row in rows if row.token is not None}
    names = {number: _name(model, output, number) for number in sorted(numbers)}
    return TextPredictions(output=output, rows=rows, names=names)


def _at_each_token(
    model: build.Model, hidden: Float[Tensor, "n c"], answers: Sequence[int]
) -> Iterator[PositionPrediction]:
    """At every token; `answers` are the right outputs of the first ones."""
    assert model.readout is not None
    vocabulary = 1 if model.table is None else len(model.table)
    first = 0
    for block in hidden.split(max(1, MAX_LOGITS // vocabulary)):
        for chances in model.readout.logits(block, model.table).float().softmax(-1):
            answer = answers[first] if first < len(answers) else None
            probability = None if answer is None else float(chances[answer])
            yield PositionPrediction(first, _top(chances), answer, probability)
            first += 1


def _masked(model: build.Model, ids: Sequence[int]) -> Iterator[PositionPrediction]:
    """Ordinary tokens spread over the text, each masked in a copy of its own."""
    words = masking_vocabulary(model.tokenizer, model.config.embedding.vocabulary)  # type: ignore[union-attr]
    places = [place for place, token in enumerate(ids) if bool(words.ordinary[token])]
    chosen = [places[index] for index in _spread(len(places), MAX_MASKED)]
    text = torch.tensor(ids)
    device = next(model.parameters()).device
    for batch in batch_by_length([len(ids)] * len(chosen), default_batch_tokens(model)):
        copies = text.repeat(len(batch), 1)
        own = torch.arange(len(batch)), torch.tensor([chosen[index] for index in batch])
        copies[own] = words.mask
        hidden = final_hidden(model, ModelInputs(ids=Ragged.from_list(list(copies)).to(device)))
        rows = hidden.values.view(len(batch), len(ids), -1)[own]
        predictions = _at_each_token(model, rows, [ids[chosen[index]] for index in batch])
        for index, row in zip(batch, predictions, strict=True):
            yield PositionPrediction(chosen[index], row.top, row.token, row.probability)


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, at equal distances.

    >>> _spread(3, 8), _spread(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return list(range(count))
    return np.linspace(0, count - 1, most).astype(int).tolist()


def _top(chances: Float[Tensor, " v"]) -> tuple[tuple[int, float], ...]:
    best = chances.topk(min(TOP, len(chances)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _name(model: build.Model, output: PredictedOutput, number: int) -> str:
    if output in ("classes", "token classes"):
        names = model.class_names
        return names[number] if number < len(names) else f"class {number}"
    return str(number) if model.tokenizer is None else token_text(model.tokenizer, number)
