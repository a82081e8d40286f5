"""Figures in a light and a dark theme: palettes, fonts for any script, saving to a file."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import FancyBboxPatch

from manyheads.atomic_write import atomic_write
from manyheads.errors import InputError

DPI = 100
TEXT_COLOR, MUTED = "#1a1a1a", "#5c5c5c"
# The title of a figure without a theme.
TITLE: dict[str, Any] = {"weight": "bold", "color": TEXT_COLOR, "va": "center"}

# The type of these keys is not in every version of matplotlib.
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
}


def check_image_path(path: Path, suffixes: tuple[str, ...] = (".png",)) -> None:
    """Raise an InputError for a path where no image can be written, before it is computed."""
    if path.suffix.lower() not in suffixes:
        raise InputError(
            f"the picture must end in {' or '.join(suffixes)}, got {path}", "rename it"
        )
    if path.is_dir():
        raise InputError(f"the picture {path} is a folder", "pass the path of a file")
    if not path.parent.is_dir():
        raise InputError(
            f"there is no folder {path.parent} for the picture {path.name}", "create it first"
        )


@contextmanager
def plain_figure(path: Path, size: tuple[float, float], **layout: Any) -> Iterator[Figure]:
    """A figure on white without a theme, saved as PNG at the end."""
    with rc_context(STYLE):
        figure = Figure(figsize=size, dpi=DPI)
        figure.set_layout_engine("constrained", **layout)
        yield figure
        save_png(figure, path)


def save_png(figure: Figure, path: Path) -> None:
    """Save a figure in the plain style as PNG."""
    check_image_path(path)
    with rc_context(STYLE):
        save_figure(figure, path, dpi=DPI)


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Save a figure; a failed write leaves the old file, and its error names the path."""
    try:
        with atomic_write(path) as beside, beside.open("wb") as file, warnings.catch_warnings():
            # Tokens in a script without an installed font are drawn as boxes.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(file, format=path.suffix.lower()[1:], **options)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


Theme = Literal["light", "dark"]
IMAGE_SUFFIXES = (".png", ".svg")

# One font per script; those that are installed are used.
SCRIPTS = (
    *("CJK SC", "CJK JP", "Arabic", "Hebrew", "Devanagari", "Bengali", "Thai", "Tamil"),
    *("Georgian", "Armenian", "Ethiopic", "Symbols", "Symbols 2"),
)
FONTS = ("DejaVu Sans", "Noto Sans", *(f"Noto Sans {script}" for script in SCRIPTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """The colors of a theme: Okabe and Ito's for series, color maps that vary in lightness."""

    background: str
    text: str
    muted: str
    grid: str
    series: tuple[str, ...]
    sequential: Colormap
    diverging: Colormap


def _colormap(stops: str) -> Colormap:
    """A color map through these colors; what is not a number is gray."""
    colors = LinearSegmentedColormap.from_list("manyheads", stops.split())
    return colors.with_extremes(bad="#9a9a9a33")


PALETTES: dict[Theme, Palette] = {
    "light": Palette(
        background="#ffffff",
        text="#1c2433",
        muted="#5d6779",
        grid="#dedbd4",
        series=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#56b4e9", "#6a51a3"),
        sequential=_colormap("#faf9f5 #e9f0cd #badcba #74bfbd #3891b8 #245b9d #132a60"),
        diverging=_colormap("#b04416 #e2945c #f9ddc1 #faf9f6 #c4daee #629bce #18549e"),
    ),
    "dark": Palette(
        background="#191d26",
        text="#e9ebf1",
        muted="#a2abbb",
        grid="#343b48",
        series=("#48a7ea", "#f58342", "#2fc796", "#e59cc6", "#f2b632", "#9ad6f7", "#b39dee"),
        sequential=_colormap("#1e232e #24325c #295680 #277a88 #40a07f #92c65c #fae255"),
        diverging=_colormap("#ff9e64 #c4683a #5c3a2c #1e232e #263e60 #427ab8 #8cc4ff"),
    ),
}


@contextmanager
def themed_figure(
    path: Path, theme: Theme, size: tuple[float, float], title: str, subtitle: str
) -> Iterator[tuple[Figure, Palette]]:
    """A figure in one theme, saved at the end; the title comes above plots of `size` inches."""
    if theme not in PALETTES:
        raise InputError(f"theme must be light or dark, got {theme!r}", "use one of them")
    palette, header = PALETTES[theme], title_height(title, subtitle)
    width, height = size[0], size[1] + header
    style: dict[Any, Any] = STYLE | {
        "font.family": _installed_fonts(),
        "text.color": palette.text,
        "axes.labelcolor": palette.muted,
        "axes.edgecolor": palette.grid,
        "axes.facecolor": palette.background,
        "xtick.color": palette.text,
        "ytick.color": palette.text,
        "svg.fonttype": "none",
        "svg.hashsalt": "manyheads",
    }
    with rc_context(style):
        figure = Figure(figsize=(width, height), dpi=DPI, facecolor=palette.background)
        figure.set_layout_engine("constrained", rect=(0.008, 0.012, 0.984, 0.98 - header / height))
        if title:
            y = 1 - 0.32 / height
            figure.text(0.015, y, title, size=16, weight="bold", color=palette.text, va="center")
        if subtitle:
            y = 1 - (0.68 if title else 0.3) / height
            figure.text(0.015, y, subtitle, size=11, color=palette.muted, va="center")
        yield figure, palette
        save_picture(figure, path)


def title_height(title: str, subtitle: str) -> float:
    """The height of the title and the subtitle in inches."""
    return 0.5 * bool(title) + 0.36 * bool(subtitle)


def style_axes(axes: Axes, palette: Palette, *, grid: Literal["x", "y", "none"] = "y") -> None:
    """Thin grid lines behind the data, and no frame."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=10, labelcolor=palette.text)
    if grid != "none":
        axes.grid(axis=grid, color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def outline_cells(axes: Axes, rows: int, columns: int, color: str, linewidth: float) -> None:
    """Lines between the cells of an image, in place of ticks."""
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=color, linewidth=linewidth)


def add_color_bar(
    figure: Figure, image: AxesImage, axes: Axes | list[Axes], label: str = "", **options: Any
) -> Any:
    """A color bar without a frame beside some axes."""
    bar = figure.colorbar(image, ax=axes, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9)
    bar.set_label(label, size=10)
    return bar


def head_table(
    layers: Sequence[Sequence[float] | Float[np.ndarray, " _"]],
) -> Float[np.ndarray, "l h"]:
    """One row per layer, with NaN where a layer has fewer heads."""
    table = np.full((len(layers), max(map(len, layers))), np.nan)
    for row, values in enumerate(layers):
        table[row, : len(values)] = values
    return table


def place_words(
    words: Sequence[str], start: float, end: float, *, character: float, space: float
) -> list[tuple[int, float, float]]:
    """For each word its line, its left edge and its width in inches."""
    boxes, line, x = [], 0, start
    for word in words:
        # Characters of East Asian scripts are twice as wide.
        width = character * sum(2 if ord(letter) > 0x2E80 else 1 for letter in word) + 0.1
        if x + width > end and x > start:
            line, x = line + 1, start
        boxes.append((line, x, width))
        x += width + space
    return boxes


def draw_word(
    axes: Axes,
    word: str,
    box: tuple[float, float, float],
    color: tuple[float, float, float, float],
    edge: str = "none",
) -> None:
    """Draw a word in a colored box, given by its left edge, its middle and its width."""
    x, y, width = box
    corners = "round,pad=0,rounding_size=0.05"
    frame = FancyBboxPatch((x, y - 0.13), width, 0.26, boxstyle=corners, fc=color, ec=edge, lw=2)
    axes.add_patch(frame)
    axes.text(x + width / 2, y, word, size=10, ha="center", va="center", color=ink_on(color))


def shorten(text: str, max_length: int) -> str:
    """
    >>> shorten("previous", 5), shorten("sink", 5)
    ('prev…', 'sink')
    """
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def visible_token(token: str, max_length: int = 16) -> str:
    """A token with visible spaces and line ends.

    >>> visible_token(" the"), visible_token("a\\n"), visible_token("")
    ('·the', 'a⏎', '∅')
    """
    inner = token.strip(" ")
    before = len(token) - len(token.lstrip(" "))
    after = len(token) - len(token.rstrip(" ")) if inner else 0
    text = "·" * before + inner.replace("\n", "⏎").replace("\t", "⇥") + "·" * after
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    return shorten(text, max_length) or "∅"


def tick_positions(count: int, max_ticks: int) -> range:
    """The positions to label: all of them, or every second, third, ... where there are many.

    >>> list(tick_positions(5, 10)), list(tick_positions(7, 3))
    ([0, 1, 2, 3, 4], [0, 3, 6])
    """
    return range(0, count, max(1, -(-count // max_ticks)))


def ink_on(color: Sequence[float]) -> str:
    """A text color that can be read on this background."""
    red, green, blue = color[:3]
    return "#1c2433" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.53 else "#f6f7fa"


def save_picture(figure: Figure, path: Path) -> None:
    """Save a figure as PNG or SVG, by the suffix."""
    check_image_path(path, IMAGE_SUFFIXES)
    # Without a date the same figure gives the same file.
    about: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
    # Silence warnings about fonts without a bold face.
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        save_figure(figure, path, dpi=DPI, facecolor=figure.get_facecolor(), **about)
    finally:
        logger.setLevel(level)


@cache
def _installed_fonts() -> list[str]:
    """The installed fonts; matplotlib itself brings the first.

    Its cached list of fonts misses those installed since, which are added here.
    """
    files = {font.replace(" ", "") + "-Regular": font for font in FONTS}
    files["NotoSansCJK-Regular"] = "Noto Sans CJK JP"
    fonts = set(font_manager.get_font_names())
    if not set(FONTS[1:]) & fonts:
        for file in font_manager.findSystemFonts():
            if files.get(Path(file).stem, FONTS[0]) not in fonts:
                font_manager.fontManager.addfont(file)
        fonts = set(font_manager.get_font_names())
    return [font for font in FONTS if font in fonts]
