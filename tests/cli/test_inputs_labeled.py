"""Models of classes, evaluated on rows of texts and labels."""

import json
from pathlib import Path

import numpy as np
import pytest

from manyheads import lens, load, save, with_classes
from manyheads.cli.main import main
from tests.encoding.tiny import small

ROWS = [("the cat sat", "glad"), ("on the mat", "sad"), ("a sun", "glad"), ("by the door", "sad")]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save(with_classes(small(), ("glad", "sad")), tmp_path / "model")
    rows = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_heads_are_measured_by_the_right_classes(place: Path) -> None:
    arguments = ["ablate", str(place / "model"), "--file", str(place / "rows.jsonl")]
    assert main([*arguments, "--json", str(place / "all.json")]) == 0
    result = lens.load(place / "all.json")
    texts, targets = [text for text, _ in ROWS], [0, 1, 0, 1]
    exact = lens.ablate(load(place / "model"), texts, targets=targets, progress=False)
    np.testing.assert_allclose(result.means["change"], exact.means["change"], atol=1e-6)


@pytest.mark.parametrize("what", ["heads", "neurons", "layers"])
def test_a_classifier_is_pruned_and_recovered_by_labels(what: str, place: Path) -> None:
    arguments = ["prune", str(place / "model"), "--file", str(place / "rows.jsonl"), "--what", what]
    wanted = ["--fraction", "0.5", "--tokens", "20", "--recover", "2", "-o", str(place / "less")]
    assert main([*arguments, *wanted]) == 0
    less = load(place / "less")
    assert less.class_names == ("glad", "sad")
    assert sum(each.numel() for each in less.parameters()) < sum(
        each.numel() for each in load(place / "model").parameters()
    )


@pytest.mark.parametrize("command", ["ablate", "prune"])
def test_texts_without_labels_are_refused(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "texts.txt").write_text("the cat sat")
    assert main([command, str(place / "model"), "--file", str(place / "texts.txt")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: a classifier is measured on texts with labels: "
        "give --file with rows of text and label: .jsonl, .ndjson, .parquet."
    )
    rows = (place / "rows.jsonl").read_text().replace("sad", "sour")
    (place / "rows.jsonl").write_text(rows)
    assert main([command, str(place / "model"), "--file", str(place / "rows.jsonl")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {place}/rows.jsonl, line 2: the label 'sour' is unknown: use one of: glad, sad."
    )


def test_a_label_that_is_no_class_of_the_model_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "rows.jsonl").write_text('{"text": "the cat", "label": 7}')
    arguments = ["ablate", str(place / "model"), "--file", str(place / "rows.jsonl")]
    assert main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {place}/rows.jsonl, line 1: the label 7 is unknown: use one of: glad, sad."
    )
    assert main([*arguments, "--text", "the cat"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: --text and --ids have no label: give --file with rows of text and label."
    )
