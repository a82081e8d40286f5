import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads.checkpoints.folder import load, save
from manyheads.cli.commands.generate import Generate
from manyheads.cli.commands.prune import Prune
from manyheads.cli.commands.report import Report
from manyheads.cli.inputs import read_texts
from manyheads.cli.main import main
from manyheads.cli.options import PlainTextOptions, TextOptions
from manyheads.report.inputs import read_text_input
from tests.report.small import EVIL, WORDS, decoder, quick_kinds, seq2seq


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("report")
    save(decoder(), place / "model")
    (place / "text.txt").write_text(EVIL + WORDS * 6, encoding="utf-8")
    return place


def test_a_report_its_pictures_and_the_next_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = folder / "new" / "report.html", folder / "text.txt"
    inputs = ["report", str(folder / "model"), "--file", str(text), "-o", str(out)]
    assert main([*inputs, "--pattern-tokens", "40", "--pictures", str(folder / "drawn")]) == 0
    page = out.read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "<script>alert(1)" not in page
    said = capsys.readouterr().out
    assert "L1H1" in said
    assert "manyheads studio" in said
    drawn = sorted(each.name.split("-")[0] for each in (folder / "drawn").iterdir())
    assert drawn == ["atlas.png", "head", "layer"]


def test_pictures_show_every_weight_and_numbers_go_to_a_file_of_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {}

    def draw_head_map(pattern: Any, *_: Any, title: str, **__: Any) -> None:
        drawn[title.split()[1].rstrip(":")] = pattern

    monkeypatch.setattr("manyheads.report.pictures.draw_head_map", draw_head_map)
    for limit in ("MIN_KEYS", "MAX_KEYS"):
        monkeypatch.setattr(f"manyheads.report.data.{limit}", 2)
    numbers = folder / "made" / "heads.json"
    words = ["report", str(folder / "model"), "--file", str(folder / "text.txt")]
    options = ["--by", "none", "--pattern-tokens", "20", "--pictures", str(folder / "exact")]
    options += ["--json", str(numbers)]
    assert main([*words, "-o", str(folder / "second.html"), *options]) == 0
    [(_, pattern)] = drawn.items()
    # The report itself keeps two weights of each query; the picture draws them all.
    np.testing.assert_allclose(pattern.sum(1), 1, atol=1e-5)
    assert (pattern[-1] > 0).sum() == 20
    message = json.loads(numbers.read_text("utf-8"))
    rows = message["rows"]
    assert {(row["layer"], row["head"]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(0 <= row["normalized_entropy"] <= 1 for row in rows)
    assert message["importance"] is None


def test_two_models_are_compared_on_one_page(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = decoder(heads=4)
    save(other, folder / "wider")
    out, numbers = folder / "both.html", folder / "both.json"
    inputs = ["report", str(folder / "model"), str(folder / "wider"), "--text", WORDS, "-o"]
    inputs += [str(out), "--by", "gradient", "--pattern-tokens", "20"]
    with quick_kinds():
        assert main([*inputs, "--json", str(numbers)]) == 0
    assert "matched by their measures" in " ".join(capsys.readouterr().out.split())
    page = out.read_text("utf-8")
    assert "Heads that differ most" in page
    assert len(json.loads(numbers.read_text("utf-8"))["pairs"]) == 4
    assert main([*inputs, "--pictures", str(folder / "some")]) == 2
    assert "of one model, not of two" in capsys.readouterr().err


def test_an_encoder_decoder_reads_lines_of_source_and_target(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("manyheads.cli.inputs.open_model", lambda *_: seq2seq())
    out = folder / "pairs.html"
    inputs = ["report", "anything", "-o", str(out), "--by", "none", "--pattern-tokens", "20"]
    with quick_kinds():
        assert main([*inputs, "--text", f"{WORDS}\tThe dog sat."]) == 0
        assert "decoder L0H1 cross" in out.read_text("utf-8")
        assert main([*inputs, "--text", WORDS]) == 2
    assert "no tab" in capsys.readouterr().err


def test_a_name_that_is_no_page_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = ["report", "nowhere", "--file", str(tmp_path / "none.txt"), "-o", "report.pdf"]
    assert main(inputs) == 2
    assert "must end in .html" in capsys.readouterr().err


def test_a_text_may_be_typed_or_read_but_not_both(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [
        "report",
        str(folder / "model"),
        "--text",
        WORDS,
        "--by",
        "none",
        "--pattern-tokens",
        "20",
    ]
    out = tmp_path / "typed.html"
    assert main([*inputs, "-o", str(out)]) == 0
    assert "the text of --text" in out.read_text("utf-8")
    assert main([*inputs, "--file", str(folder / "text.txt")]) == 2
    assert "--text and --file" in capsys.readouterr().err


def test_a_missing_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.txt"
    assert main(["report", "house-gpt", "--file", str(missing)]) == 2
    assert str(missing) in capsys.readouterr().err
    assert main(["report", "house-gpt", "--file", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder" in capsys.readouterr().err


def test_the_default_is_the_bundled_model_on_bundled_articles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--tokens", "64", "--pattern-tokens", "16", "--by", "none"]) == 0
    assert "articles that come with manyheads" in (tmp_path / "report.html").read_text("utf-8")


def test_pictures_that_cannot_be_drawn_are_refused_before_any_work(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "report.html", str(folder / "text.txt")
    inputs = ["report", str(folder / "model"), "--file", text, "-o", str(out)]
    assert main([*inputs, "--pictures", text]) == 2
    assert "text.txt is a file: name a folder." in capsys.readouterr().err
    assert not out.exists()


def test_all_commands_read_the_same_texts_of_a_file(folder: Path) -> None:
    file = folder / "paragraphs.txt"
    file.write_text(f"{WORDS}\n{WORDS}\n\n \n{WORDS}\n\n{EVIL}\n", encoding="utf-8")
    model = load(folder / "model")
    texts = TextOptions(file=file).load_texts(model)
    assert len(texts) == 3
    assert PlainTextOptions(file=(file,)).texts() == Generate(file=file)._prompts() == texts
    (pruned, _), (more, _) = Prune(str(folder), file=file)._texts(model, read_texts(file))
    assert (pruned, more) == (texts, [])
    reported = read_text_input(model, "it", Report(file=file)._input(), measured=999, shown=9)
    assert list(reported.measured) == texts
