"""Predictions are those of the model: next tokens, masked tokens, classes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads import load
from manyheads.models.build import build
from manyheads.models.readout import NoReadout
from manyheads.report import predictions
from manyheads.report.inputs import ReportImage, ReportInput, read_text_input
from manyheads.report.predictions import TextPredictions, predict
from tests.report.small import EVIL, WORDS, decoder, pairs_report
from tests.studio.models import vision


def source(model: Any, text: Any) -> ReportInput:
    return read_text_input(model, "it", text, measured=99, shown=30)


def test_next_tokens_are_those_of_the_model_however_few_logits_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = decoder()
    text = source(model, WORDS)
    result = predict(model, text)
    ids = torch.tensor([text.ids])
    chances = model(ids, torch.ones_like(ids, dtype=torch.bool)).logits[0].detach().softmax(-1)
    assert result.output == "next token"
    assert [row.position for row in result.rows] == list(range(len(text)))
    best = chances.topk(5)
    for row, numbers, parts in zip(result.rows, best.indices, best.values, strict=True):
        assert [number for number, _ in row.top] == numbers.tolist()
        assert [part for _, part in row.top] == pytest.approx(parts.tolist(), rel=1e-4)
    right = chances[torch.arange(len(text) - 1), ids[0, 1:]]
    assert result.loss == pytest.approx(float(-right.log().mean()), rel=1e-4)
    assert result.rows[-1].token is None
    monkeypatch.setattr(predictions, "MAX_LOGITS", 700)
    assert predict(model, text).hits == result.hits


def test_some_tokens_of_an_encoder_are_masked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "MAX_MASKED", 3)
    model = load("house-bert")
    text = source(model, "The capital of France is Paris, and that of Italy is Rome.")
    result = predict(model, text)
    assert result.output == "masked token"
    assert len(result.rows) == 3
    row = result.rows[1]
    assert row.token == text.ids[row.position]
    ids = torch.tensor([text.ids])
    ids[0, row.position] = model.tokenizer.token_to_id("[MASK]")
    chances = (
        model(ids, torch.ones_like(ids, dtype=torch.bool))
        .logits[0, row.position]
        .detach()
        .softmax(-1)
    )
    assert row.probability == pytest.approx(float(chances[row.token]), rel=1e-3)
    assert row.top[0][0] == int(chances.argmax())
    assert row.top[0][1] == pytest.approx(float(chances.max()), rel=1e-3)


def test_an_image_has_classes_and_a_model_of_vectors_predicts_nothing() -> None:
    model = vision()
    image = ReportImage("", 4, 4, torch.rand(3, 32, 32))
    result = predict(model, ReportInput((), (), tuple(image.patches), image))
    assert result.output in ("classes", "none")
    if result.output == "classes":
        assert sum(part for _, part in result.rows[0].top) <= 1 + 1e-5
    bert = build("bert-base", layers=1, width=32, heads=2, hidden=64, vocabulary=320, seed=2)
    vectors: Any = build(replace(bert.config, readout=NoReadout()), seed=2)
    vectors.tokenizer = decoder().tokenizer
    result = predict(vectors, source(vectors, WORDS))
    assert (result.output, result.rows) == ("none", ())
    assert "outputs vectors" in result.unknown


def test_the_decoder_of_a_pair_predicts_its_own_text() -> None:
    result = pairs_report().predictions
    assert result.output == "next token"
    assert len(result.rows) == len(pairs_report().input.tokens)


def test_a_record_names_each_token_once() -> None:
    model = decoder()
    record = predict(model, source(model, EVIL)).record()
    assert len(set(record["names"])) == len(record["names"])
    assert all(index < len(record["names"]) for _, top, _, _ in record["rows"] for index, _ in top)


def test_without_positions_no_loss_is_known() -> None:
    empty = TextPredictions(output="classes", names={})
    assert str(empty.loss) == str(empty.hits) == "nan"
