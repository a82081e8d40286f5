"""The difference of probabilities, against a softmax over all logits."""

import torch

from manyheads.errors import InputError
from manyheads.lens.inputs.metrics import (
    CustomMetric,
    ProbabilityDifference,
    bind_metric,
    metric_name,
)
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models.build import build
from tests.messages import refuses


def test_probabilities_after_the_last_token_of_each_text_are_subtracted() -> None:
    model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    inputs = read_inputs(model, [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    metric = ProbabilityDifference(answers=((1, 2), (3,), (4, 9)), distractors=((5,), (6, 7), ()))

    def expected(logits, texts):  # type: ignore[no-untyped-def]
        last = torch.stack([logits.of(text)[-1].softmax(-1) for text in range(len(texts))])
        rows = zip(last, texts, strict=True)
        return torch.stack(
            [
                row[list(metric.answers[text])].sum() - row[list(metric.distractors[text])].sum()
                for row, text in rows
            ]
        )

    with torch.no_grad():
        for texts in (range(3), range(1, 3)):
            hidden = model.run_inputs(inputs.select(texts)).hidden
            values = bind_metric(model, inputs, texts, metric)(hidden)
            reference = bind_metric(model, inputs, texts, CustomMetric(expected))(hidden)
            torch.testing.assert_close(values, reference)
    assert metric_name(metric) == "probability difference"


def test_answers_and_distractors_are_of_the_same_texts() -> None:
    with refuses(InputError, "answers of 1 texts and distractors of 2"):
        ProbabilityDifference(answers=((1,),), distractors=((2,), (3,)))
