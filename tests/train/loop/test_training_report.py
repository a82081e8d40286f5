"""A run that could be faster says how."""

import pytest
import torch

from manyheads.models.build import Model, build
from manyheads.train.loop import training_report
from manyheads.train.loop.training_report import performance_advice

CPU = torch.device("cpu")


def model(dropout: float) -> Model:
    return build("gpt2", layers=1, width=8, heads=1, vocabulary=9, dropout=dropout)


def test_what_is_slow_on_a_processor_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_report, "_has_bfloat16", lambda: False)
    assert not list(performance_advice(model(0.0), CPU, half=False))
    [dropping] = performance_advice(model(0.1), CPU, half=False)
    assert "model.heads.dropout=0" in dropping
    [rounding] = performance_advice(model(0.0), CPU, half=True)
    assert 'run.precision="float32"' in rounding
    assert not list(performance_advice(model(0.1), torch.device("cuda"), half=True))
    monkeypatch.setattr(training_report, "_has_bfloat16", lambda: True)
    assert not list(performance_advice(model(0.0), CPU, half=True))
