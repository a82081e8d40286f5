"""manyheads circuit as a person at a terminal meets it."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyheads import lens
from manyheads.cli.commands.report import Report
from manyheads.cli.main import main
from tests.cli.heads import write_models

PAIRS = [
    ("The cat sat on the", "The dog sat on the", "mat", "log"),
    ("The dog sat on the mat while the", "The cat sat on the mat while the", "cat", "dog"),
    ("The cat sat on the log and the", "The dog sat on the log and the", "dog", "cat"),
    ("The dog sat and the", "The cat sat on and on and the", "cat", "dog"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("circuit"))
    names = ("clean", "corrupted", "answer", "wrong")
    rows = [json.dumps(dict(zip(names, pair, strict=True))) + "\n" for pair in PAIRS]
    (folder / "pairs.jsonl").write_text("".join(rows))
    return folder


def test_a_circuit_is_printed_saved_drawn_and_put_into_a_report(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, picture, page = (tmp_path / f"c.{suffix}" for suffix in ("json", "svg", "html"))
    words = ["circuit", str(place / "small"), "--task", str(place / "pairs.jsonl")]
    words += ["--method", "eap", "--edges", "5", "--skip-unaligned"]
    assert main([*words, "-o", str(out), "--picture", str(picture), "--page", str(page)]) == 0
    printed = capsys.readouterr().out
    for part in ("pairs.jsonl", "Left out: 1 pair", "100 %", "CPR", "CMD", "minimal circuit"):
        assert part in printed
    circuit = lens.load(out)
    strongest, score, _ = circuit.ranked()[0]
    assert f"{strongest}" in printed
    assert f"{score:+.4f}" in printed
    assert circuit.metadata["task"] == "pairs.jsonl"
    assert len(circuit.metadata["curve"]["counts"]) == 10
    assert "edges; width: |score|" in picture.read_text("utf-8")
    assert "A circuit of" in page.read_text("utf-8")

    circuits: list[Any] = []

    def report(_: Report, text: Any, origin: str, saved: Any) -> int:
        circuits.append(saved)
        return len(text) + len(origin)

    monkeypatch.setattr(Report, "_report", report)
    options = ["--circuit", str(out), "-o", str(tmp_path / "report.html")]
    assert main(["report", "nowhere", *options]) == 0
    assert circuits[0].ranked() == circuit.ranked()
    assert main(["report", "nowhere", "nowhere", *options]) == 2


def test_heads_are_scored_as_a_whole(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["circuit", str(place / "small"), "--task", str(place / "pairs.jsonl"), "--pairs", "2"]
    assert main([*words, "--level", "head", "--method", "eap"]) == 0
    printed = capsys.readouterr().out
    assert "The strongest of 6 parts" in printed
    assert "L0 mlp" in printed


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--task", "pairs.jsonl"], "pair 3, counted from 0, do not align"),
        (["--task", "docstring"], "'docstring' is unknown"),
        (["--task", "none.jsonl"], "--task none.jsonl does not exist"),
        (["--pairs", "0"], "--pairs must be at least 1"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--faithfulness", "1.5"], "--faithfulness must be in (0, 1]"),
        (["-o", "circuit.txt"], "--out must end in .json"),
        (["--picture", "circuit.pdf"], "must end in .png or .svg"),
        (["--page", "circuit.txt"], "must end in .html"),
        (["--method", "magic"], "--method"),
    ],
)
def test_wrong_use_is_refused(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    match: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    assert main(["circuit", "decoder", *more]) == 2
    assert match in " ".join(capsys.readouterr().err.split())


def test_an_encoder_and_another_result_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["circuit", str(place / "encoder")]) == 2
    assert "does not predict the next token" in capsys.readouterr().err
    file = tmp_path / "why.json"
    words = ["attribute", str(place / "small"), "--text", "The cat", "--json", str(file)]
    assert main(words) == 0
    options = ["--circuit", str(file), "-o", str(tmp_path / "report.html")]
    assert main(["report", str(place / "small"), *options]) == 2
    assert "its type is Attribution" in capsys.readouterr().err
