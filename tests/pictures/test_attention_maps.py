"""Pictures are whole PNG files of a known size, or are not there."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from manyheads.errors import InputError, ShapeError
from manyheads.pictures import HeadMapLabels, canvas, draw_heads
from manyheads.pictures.canvas import save_png

LABELS = HeadMapLabels(
    title="Восемь голов",
    subtitle="веса не обучены",
    queries="запросы",
    keys="ключи",
    weight="вес внимания",
    entropy="энтропия {entropy:.2f} из {max_entropy:.2f} бит",
)


def draw(path: Path, tokens: list[str], count: int = 8) -> None:
    length = len(tokens)
    scores = np.random.default_rng(0).normal(size=(count, length, length))
    patterns = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    names = [f"L0H{head}" for head in range(count)]
    draw_heads(patterns, tokens, path, names=names, entropies=[1.5] * count, labels=LABELS)


def figure_of(monkeypatch: pytest.MonkeyPatch, tokens: list[str]) -> Figure:
    """The picture, caught on its way to the file."""
    caught: list[Figure] = []
    monkeypatch.setattr(canvas, "save_png", lambda figure, _: caught.append(figure))
    draw(Path("unused.png"), tokens)
    return caught[0]


def texts_drawn(monkeypatch: pytest.MonkeyPatch, tokens: list[str]) -> list[str]:
    """Every text of the picture."""
    figure = figure_of(monkeypatch, tokens)
    # The texts are the same in a picture of few pixels, which is drawn sooner.
    figure.set_dpi(20)
    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible()]


@pytest.mark.parametrize("length", [1, 18])
def test_a_picture_fits_a_readme(tmp_path: Path, length: int) -> None:
    path = tmp_path / "map.png"
    draw(path, [f"слово{index}" for index in range(length)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert imread(path).shape[:2] == (900, 1600)
    assert list(tmp_path.iterdir()) == [path]
    colors = (255 * imread(path)[..., :3]).astype(int) @ [1, 256, 256**2]
    assert length == 1 or len(np.unique(colors)) > 100


def test_a_long_sentence_gets_a_larger_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figure_of(monkeypatch, [f"слово{index}" for index in range(30)])
    assert figure.canvas.get_width_height() == (2160, 1215)


def test_heads_have_their_addresses_and_entropies(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_drawn(monkeypatch, list("абвг"))
    assert {f"L0H{head}" for head in range(8)} <= set(texts)
    assert texts.count("энтропия 1.50 из 2.00 бит") == 8
    assert {LABELS.title, LABELS.subtitle, LABELS.queries, LABELS.keys, LABELS.weight} <= set(texts)


@pytest.mark.parametrize(("length", "shown"), [(7, 7), (30, 30), (31, 16), (100, 25)])
def test_labels_are_thinned_out_where_they_would_touch(
    monkeypatch: pytest.MonkeyPatch, length: int, shown: int
) -> None:
    tokens = [f"слово{index}" for index in range(length)]
    labels = [text for text in texts_drawn(monkeypatch, tokens) if text.startswith("слово")]
    # Two rows of maps have queries at their left, four columns have keys below.
    assert len(labels) == shown * (2 + 4)


def test_a_long_word_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "превысокомногорас…" in texts_drawn(monkeypatch, ["превысокомногорассмотрительный", "а"])


def test_letters_that_mean_something_to_matplotlib_are_only_letters(tmp_path: Path) -> None:
    draw(tmp_path / "map.png", ["$$", "$x^2$", "_a", "你好", "{b}"])
    assert (tmp_path / "map.png").is_file()


@pytest.mark.parametrize("count", [1, 4, 6])
def test_any_number_of_heads_can_be_drawn(tmp_path: Path, count: int) -> None:
    draw(tmp_path / "map.png", list("аб"), count)
    assert imread(tmp_path / "map.png").shape[0] == 100 * (1 + 4 * math.ceil(count / 4))


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    patterns = np.full((2, 3, 3), 1 / 3)
    names, entropies = ["L0H0", "L0H1"], [1.0, 1.0]
    path = tmp_path / "map.png"
    with pytest.raises(ShapeError, match="2 tokens for 3"):
        draw_heads(patterns, ["а", "б"], path, names=names, entropies=entropies, labels=LABELS)
    with pytest.raises(ShapeError, match="1 names for 2"):
        draw_heads(patterns, list("абв"), path, names=["x"], entropies=entropies, labels=LABELS)
    with pytest.raises(ShapeError, match="as many keys as queries"):
        draw_heads(
            patterns[:, :2], ["а", "б"], path, names=names, entropies=entropies, labels=LABELS
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("map.jpg", "must end in .png"), ("none/map.png", "there is no folder"), ("", "must end in")],
)
def test_a_path_that_no_picture_can_have_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        draw(tmp_path / name, ["а"])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_pictures_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "map.png").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        draw(tmp_path / "map.png", ["а"])


class FullDisk(Figure):
    """A figure that cannot be written to its end."""

    def savefig(self, fname, **_) -> None:  # type: ignore[no-untyped-def]
        fname.write(b"\x89PNG half")
        raise OSError(28, "No space left on device")


def test_a_failure_leaves_nothing_behind_and_the_old_picture_whole(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    path.write_bytes(b"the old one")
    with pytest.raises(OSError, match="No space left") as caught:
        save_png(FullDisk(), path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]
