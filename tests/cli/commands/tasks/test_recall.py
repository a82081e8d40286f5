"""manyheads recall: recall by length with its heads, and wrong use in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads import lens
from manyheads.cli.main import main
from manyheads.taps import Head

SCORE = lens.RecallScore(
    task="needle",
    times=2.0,
    tokens=512,
    copied=0.75,
    error=0.1,
    exact=0.5,
    by_depth=(1.0, 0.5),
    without=0.05,
    without_random=0.7,
)
RESULT = lens.LongContextRecall(
    kind="long-context recall",
    blocks=(lens.Block(0, 2),),
    means={"needle 2x": np.array([0.0, 0.9])},
    heads=(Head(0, 1),),
    scores=(SCORE,),
    metadata={"base": 256, "trained_length": 8192, "skipped": ["16x"], "samples": 2},
)


def test_recall_and_heads_are_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    passed: dict[str, Any] = {}

    def recall(_: Any, times: list[float], **options: Any) -> Any:
        passed.update(options, times=times)
        return RESULT

    monkeypatch.setattr(lens, "long_context_recall", recall)
    out = tmp_path / "recall.json"
    words = ["--base", "256", "--times", "2,16", "--json", str(out)]
    assert main(["recall", "house-gpt", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (passed["base"], passed["times"]) == (256, [2.0, 16.0])
    assert "1x is 256 tokens, and the model was trained on up to 8,192." in printed
    assert "needle 2x 512 75% ±10% 50% 5.0% 70%" in printed
    assert "L0H1." in printed
    assert "Longer than its positions: 16x." in printed
    assert lens.load(out).scores == (SCORE,)


def test_wrong_use_is_one_line(capsys: Any) -> None:
    for words, expected in (
        (["--times", "1,x"], "--times must be numbers"),
        (["--samples", "1"], "--samples must be at least 2, got 1"),
        (["--base", "20"], "too few"),
    ):
        assert main(["recall", "house-gpt", *words]) == 2
        assert expected in capsys.readouterr().err
