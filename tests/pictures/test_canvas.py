"""What holds for every picture: it is drawn, as PNG and SVG, on light paper and on dark."""

from pathlib import Path

import matplotlib.image
import pytest

from manyheads.errors import InputError
from tests.pictures.examples import PICTURES


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_a_picture_is_drawn_on_dark_paper(name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    PICTURES[name](path, "dark")
    pixels = matplotlib.image.imread(path)
    # The corner is palette, and not everything is.
    assert pixels[0, 0, :3].max() < 0.2
    assert pixels.std() > 0.01
    assert [each.name for each in tmp_path.iterdir()] == ["picture.png"]


@pytest.mark.parametrize("name", ["bars", "similarity"])
def test_a_drawing_has_its_words_as_words_and_no_date(name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    PICTURES[name](path, "light")
    assert "L0H" in path.read_text("utf-8")
    assert "<dc:date>" not in path.read_text("utf-8")


def test_the_fraction_beside_a_gate_is_labeled(tmp_path: Path) -> None:
    path = tmp_path / "gates.svg"
    PICTURES["gates"](path, "light")
    assert path.read_text("utf-8").count("% closed") == 12


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must end in \.png or \.svg, got .*picture\.pdf"):
        PICTURES["bars"](tmp_path / "picture.pdf", "light")
