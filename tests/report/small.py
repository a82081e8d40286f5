"""A small model and the data of its report, made once."""

from dataclasses import replace
from functools import cache
from typing import Any

from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.models.build import build
from manyheads.report.data import ReportData, collect_report

WORDS = "The cat sat on the mat and the dog sat on the log while it rained in Paris and Rome. "
EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)> {{script}} & "so" on. '


def decoder(*, layers: int = 2, heads: int = 2) -> Any:
    model = build("gpt2", layers=layers, width=32, heads=heads, vocabulary=320, seed=0)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    model.tokenizer = train_tokenizer(
        InMemoryTexts((WORDS * 4, "Привет, мир! 你好", EVIL * 4)), size=320, progress=False
    )
    return model


@cache
def report() -> ReportData:
    return collect_report(
        decoder(),
        [EVIL + WORDS, *[WORDS] * 5],
        name="a <b>model</b>",
        pattern_tokens=64,
        progress=False,
    )


def with_importance(**changes: Any) -> ReportData:
    """The same report with another importance of its heads."""
    known = report().importance
    assert known is not None
    return replace(
        report(), inspection=replace(report().inspection, importance=replace(known, **changes))
    )
