"""manyheads card writes three files and says where."""

import json
from pathlib import Path

import pytest

from manyheads.cli.main import main
from tests.cli.heads import write_models


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("card"))


def test_the_command_that_is_written_gives_the_same_card(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file, out = place / "small", place / "texts.txt", tmp_path / "card"
    arguments = ["card", str(model), "--file", str(file), "--by", "gradient", "-o", str(out)]
    assert main(arguments) == 0
    assert "saved" in capsys.readouterr().out
    first = json.loads((out / "card.json").read_text())
    again = first["command"].split()[1:]
    assert main([*again, "-o", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "card.json").read_text()) == first


def test_images_and_texts_exclude_each_other(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, image = str(place / "small"), str(tmp_path / "a.png")
    out = str(tmp_path / "card")
    assert main(["card", model, "--image", image, "--text", "a text", "-o", out]) == 2
    assert "--image excludes" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "card"
    file.write_text("mine")
    assert main(["card", str(place / "small"), "-o", str(file)]) == 2
    assert "is a file" in capsys.readouterr().err
    assert file.read_text() == "mine"
