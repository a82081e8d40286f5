"""manyheads extract, and the scores of manyheads classify, as a person at a terminal meets them."""

import json
from pathlib import Path

import pytest

from manyheads import classify, load, save, tasks, with_classes
from manyheads.cli.main import main
from manyheads.models.readout import classifier_of
from tests.encoding.tiny import small

TEXTS = ["the cat sat", "on the mat"]
CONLL = "the\tO\ncat\tB-a\nsat\tI-a\n\non\tO\nthe\tB-b\nmat\tO\n"
LABELED = [("the cat sat", "glad"), ("on the mat", "sad"), ("by the door", "glad")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extract")
    names = ("B-a", "B-b", "I-a", "I-b", "O")
    save(with_classes(small(), names, "tokens", seed=3), folder / "tags")
    (folder / "dev.conll").write_text(CONLL)
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    save(with_classes(small(), ("glad", "sad")), folder / "moods")
    rows = [json.dumps({"text": text, "label": label}) for text, label in LABELED]
    (folder / "labels.jsonl").write_text("\n".join(rows))
    return folder


def test_entities_are_marked_or_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tasks.entities(load(folder / "tags"), TEXTS)
    assert any(result)
    model = str(folder / "tags")
    assert main(["extract", model, "--file", str(folder / "texts.txt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, text, row in zip(lines, TEXTS, result, strict=True):
        marked, end = "", 0
        for each in row:
            marked += f"{text[end : each.start]}[{each.text}]({each.type})"
            end = each.end
        assert line == marked + text[end:]
    said = [word for text in TEXTS for word in ("--text", text)]
    out = tmp_path / "found.jsonl"
    assert main(["extract", model, *said, "-o", str(out), "--min-score", "0.2"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for written, entities in zip(rows, result, strict=True):
        kept = [(e.type, e.start, e.end) for e in entities if e.score >= 0.2]
        assert [(e["type"], e["start"], e["end"]) for e in written["entities"]] == kept


def test_entities_are_scored(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    files = ["--evaluate", str(folder / "dev.conll"), "--json", str(out)]
    assert main(["extract", str(folder / "tags"), *files]) == 0
    expected = [[("a", 4, 11)], [("b", 3, 6)]]
    scores = tasks.score_entities(expected, tasks.entities(load(folder / "tags"), TEXTS))
    assert str(scores) in capsys.readouterr().out
    assert json.loads(out.read_text())["all"]["strict"]["f1"] == scores.f1


def test_classes_are_scored_and_calibrated(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, labels = str(folder / "moods"), str(folder / "labels.jsonl")
    files = ["--confusion", str(tmp_path / "c.png"), "--json", str(tmp_path / "s.json")]
    assert main(["classify", model, "--evaluate", labels, *files]) == 0
    texts, right = zip(*LABELED, strict=True)
    scores = tasks.score_classes(right, classify(load(model), texts))
    assert str(scores) in capsys.readouterr().out
    assert json.loads((tmp_path / "s.json").read_text())["macro"]["f1"] == scores.macro_f1
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    result = tasks.calibrate(load(model), texts, right)
    assert main(["classify", model, "--calibrate", labels]) == 0
    assert f"temperature {result.temperature:.4f}" in capsys.readouterr().out
    assert classifier_of(load(model)).temperature == pytest.approx(result.temperature)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["extract", "tags"], "--text, --file or --evaluate: give one of them."),
        (["extract", "tags", "--text", "a", "--min-score", "2"], "--min-score...2"),
        (["extract", "tags", "--text", "a", "-o", "a.csv"], "--out...jsonl...a.csv"),
        (["extract", "moods", "--text", "a"], "does not classify tokens...manyheads train"),
        (["extract", "tags", "--evaluate", "no.conll"], "no.conll does not exist"),
        (["extract", "tags", "--evaluate", "texts.txt"], "texts.txt...suffix"),
        (["classify", "moods", "--text", "a", "--confusion", "a.png"], "--confusion...--evaluate"),
        (["classify", "tags", "--evaluate", "labels.jsonl"], "manyheads extract --evaluate"),
        (["classify", "house-bert", "--calibrate", "labels.jsonl"], "--calibrate...convert"),
        (["classify", "moods", "--evaluate", "dev.conll"], "dev.conll...jsonl"),
    ],
)
def test_wrong_use_names_the_flag(
    arguments: list[str],
    words: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    place = 0
    for part in words.split("..."):
        place = said.index(part, place) + len(part)
