"""manyheads classify as a person at a terminal meets it."""

import json
from pathlib import Path

import pytest
from PIL import Image

from manyheads import (
    Vision,
    build,
    classify,
    classify_images,
    load,
    read_image,
    save,
    tag,
    with_classes,
)
from manyheads.checkpoints.classification_head import name_classes
from manyheads.cli.main import main
from tests.encoding.tiny import small

TEXTS = ["the cat sat", "on the mat"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(with_classes(small(), ("glad", "sad")), tmp_path / "model")
    return tmp_path / "model"


def test_every_line_is_a_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [word for text in TEXTS for word in ("--text", text)]
    assert main(["classify", str(folder), *said]) == 0
    result = classify(load(folder), TEXTS)
    best = result.probabilities.max(1).values.tolist()
    rows = zip(result.labels, best, TEXTS, strict=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{label}\t{share:.3f}\t{text}" for label, share, text in rows]


def test_all_probabilities_go_to_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    out = tmp_path / "found.jsonl"
    assert (
        main(["classify", str(folder), "--file", str(tmp_path / "texts.txt"), "-o", str(out)]) == 0
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    result = classify(load(folder), TEXTS)
    assert [row["text"] for row in rows] == TEXTS
    assert tuple(row["label"] for row in rows) == result.labels
    assert [list(row["shares"].values()) for row in rows] == result.probabilities.tolist()
    said = capsys.readouterr().out
    glad = result.labels.count("glad")
    assert said == f"2 texts ({glad} glad, {2 - glad} sad) to {out}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [],
            "--text, --file or --image: give one of them.",
        ),
        (["--image", "a.png"], "model does not read images: give --text or --file."),
        (["--text", "a", "-o", "x.csv"], "--out must end in .jsonl, got x.csv."),
        (
            ["--text", "a", "-o", "no/x.jsonl"],
            "there is no folder no: create it, or name another.",
        ),
    ],
)
def test_wrong_use_is_refused(
    arguments: list[str],
    words: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder.parent)
    assert main(["classify", "model", *arguments]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith(words)


def test_words_are_printed_one_per_line_or_written_as_rows_for_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(with_classes(small(), ("noun", "other"), "tokens"), tmp_path / "model")
    said = [word for text in TEXTS for word in ("--text", text)]
    assert main(["classify", str(tmp_path / "model"), *said]) == 0
    result = tag(load(tmp_path / "model"), TEXTS)
    message = ["\n".join(f"{w}\t{label}\t{share:.3f}" for w, label, share in row) for row in result]
    assert capsys.readouterr().out == "\n\n".join(message) + "\n"
    out = tmp_path / "found.jsonl"
    assert main(["classify", str(tmp_path / "model"), *said, "-o", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [text.split() for text in TEXTS]
    assert [row["tags"] for row in rows] == [[each.label for each in row] for row in result]
    assert capsys.readouterr().out == f"6 words of 2 texts to {out}\n"


def test_images_are_printed_one_per_line_or_written_as_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, files = tmp_path / "vit", [tmp_path / "seen/a.png", tmp_path / "seen/b.png"]
    shape = {"layers": 1, "width": 16, "heads": 2, "hidden": 16, "image": 32, "classes": 2}
    model = build("vit-b16", seed=0, **shape)
    assert isinstance(model, Vision)
    name_classes(model, ("cat", "dog"))
    save(model, folder)
    files[0].parent.mkdir()
    for place, file in enumerate(files):
        Image.new("RGB", (40, 30), (200 * place, 90, 30)).save(file)
    result = classify_images(model, [read_image(model, file) for file in files])
    best = [f"{share:.3f}" for share in result.probabilities.max(1).values.tolist()]
    rows = zip(result.labels, best, map(str, files), strict=True)
    assert main(["classify", str(folder), "--image", str(files[0].parent)]) == 0
    assert capsys.readouterr().out.splitlines() == ["\t".join(row) for row in rows]
    out = tmp_path / "found.jsonl"
    assert main(["classify", str(folder), "--image", str(files[0]), "-o", str(out)]) == 0
    row = json.loads(out.read_text())
    assert (row["image"], row["label"]) == (str(files[0]), result.labels[0])
    assert capsys.readouterr().out.startswith("1 image (")
    assert main(["classify", str(folder), "--image", str(tmp_path / "no.png")]) == 2
    assert "no.png does not exist" in capsys.readouterr().err
