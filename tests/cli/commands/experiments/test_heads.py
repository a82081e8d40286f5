"""manyheads heads: the heads of a task, their effects, and wrong use in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads import lens
from manyheads.cli.commands.experiments.heads import HeadsCommand
from manyheads.cli.main import main
from manyheads.lens.head_kinds import head_tests
from manyheads.taps import Head
from tests.cli.heads import write_models

RESULT = lens.RetrievalHeads(
    kind="retrieval heads",
    blocks=(lens.Block(0, 2), lens.Block(1, 2)),
    means={"retrieval": np.array([0, 0, 0.9, 0.3]), "induction": np.array([0, 0.1, 0.8, 0.2])},
    heads=(Head(1, 0), Head(1, 1)),
    induction_heads=(Head(1, 0),),
    held_out={"needles": lens.HeldOutEffect.of([0.75, 1.0])},
    metadata={"measure": "fraction copied", "layers": 2, "copied": 0.875},
)


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_tests, "SEQUENCES", 5)


def test_heads_effects_and_overlap_are_printed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(HeadsCommand, "_find", lambda *_: RESULT)
    assert main(["heads", "house-gpt", "--kind", "retrieval"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Retrieval heads: 2 of 4 heads, 50%" in printed
    assert "needles 0.875 0.750 to 1.000" in printed
    assert "1 of 1 induction heads are among them, 0.5 by chance" in printed
    assert "Mean depth (0 first layer, 1 last): 1.00, of induction heads 1.00" in printed


@pytest.mark.parametrize("kind", ["function-vector", "retrieval"])
def test_a_model_without_such_heads_has_a_reason(kind: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "heads.json"
    words = ["--prompts", "2", "--words", "60", "--json", str(out)]
    assert main(["heads", "house-gpt", "--kind", kind, *words]) == 0
    printed = capsys.readouterr().out
    result = lens.load(out)
    assert result.kind == f"{kind} heads"
    assert result.heads == ()
    assert result.problem[:20] in printed


def test_wrong_use_is_one_line(tmp_path: Path, capsys: Any) -> None:
    models = write_models(tmp_path)
    for words, expected in (
        (["house-gpt", "--words", "2"], "--words must be at least 3, got 2"),
        ([str(models / "encoder")], "does not continue a text"),
        ([str(models / "bare"), "--kind", "retrieval"], "no tokenizer"),
    ):
        assert main(["heads", *words]) == 2
        assert expected in " ".join(capsys.readouterr().err.split())
