"""What pictures are drawn on: light or dark paper, colours all can tell apart, any script."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure

from manyheads.atomic_write import whole
from manyheads.errors import InputError

DOTS = 100
INK, QUIET = "#1a1a1a", "#5c5c5c"

# The keys are a literal type of matplotlib's, which not all of its versions have.
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
}


def check_path(path: Path, endings: tuple[str, ...] = (".png",)) -> None:
    """Refuse a name that no picture can have, before anything is computed for it."""
    if path.suffix.lower() not in endings:
        kinds = " or ".join(ending[1:].upper() for ending in endings)
        raise InputError(
            f"the picture {path} is no {kinds}", f"let its name end in {' or '.join(endings)}"
        )
    if path.is_dir():
        raise InputError(f"the picture {path} is a folder", "name a file in it")
    if not path.parent.is_dir():
        raise InputError(
            f"the picture {path} has no folder {path.parent}", "make the folder, or name another"
        )


def write_png(figure: Figure, path: Path) -> None:
    """In the plain style of the older pictures."""
    check_path(path)
    with rc_context(STYLE):
        write_figure(figure, path, dpi=DOTS)


def write_figure(figure: Figure, path: Path, **options: Any) -> None:
    """A failure leaves what was there before, and names the file that was asked for."""
    try:
        with whole(path) as beside, beside.open("wb") as file, warnings.catch_warnings():
            # A token in a script that the font lacks is drawn as boxes; the map is still right.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(file, format=path.suffix.lower()[1:], **options)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


Look = Literal["light", "dark"]
ENDINGS = (".png", ".svg")

# One face for each script that a token may be written in; those that are installed are used.
FACES = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Bengali",
    "Noto Sans Thai",
    "Noto Sans Tamil",
    "Noto Sans Georgian",
    "Noto Sans Armenian",
    "Noto Sans Ethiopic",
    "Noto Sans Symbols",
    "Noto Sans Symbols 2",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """The colours of a look: Okabe and Ito's for lines, scales whose lightness tells the value."""

    back: str
    ink: str
    quiet: str
    line: str
    colours: tuple[str, ...]
    scale: Colormap
    two_sided: Colormap


def _scale(name: str, stops: Sequence[str]) -> Colormap:
    # What has no value is as pale as the frame.
    return LinearSegmentedColormap.from_list(name, list(stops)).with_extremes(bad="#9a9a9a33")


PAPERS: dict[Look, Paper] = {
    "light": Paper(
        back="#ffffff",
        ink="#1c2433",
        quiet="#5d6779",
        line="#dedbd4",
        colours=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#56b4e9", "#6a51a3"),
        scale=_scale(
            "light",
            ("#faf9f5", "#e9f0cd", "#badcba", "#74bfbd", "#3891b8", "#245b9d", "#132a60"),
        ),
        two_sided=_scale(
            "two sided light",
            ("#b04416", "#e2945c", "#f9ddc1", "#faf9f6", "#c4daee", "#629bce", "#18549e"),
        ),
    ),
    "dark": Paper(
        back="#191d26",
        ink="#e9ebf1",
        quiet="#a2abbb",
        line="#343b48",
        colours=("#48a7ea", "#f58342", "#2fc796", "#e59cc6", "#f2b632", "#9ad6f7", "#b39dee"),
        scale=_scale(
            "dark",
            ("#1e232e", "#24325c", "#295680", "#277a88", "#40a07f", "#92c65c", "#fae255"),
        ),
        two_sided=_scale(
            "two sided dark",
            ("#ff9e64", "#c4683a", "#5c3a2c", "#1e232e", "#263e60", "#427ab8", "#8cc4ff"),
        ),
    ),
}


def paper_of(look: Look) -> Paper:
    if look not in PAPERS:
        raise InputError(f"look={look!r} is no paper", "use light or dark")
    return PAPERS[look]


@contextmanager
def drawing(
    look: Look, size: tuple[float, float], *, title: str = "", subtitle: str = ""
) -> Iterator[tuple[Figure, Paper]]:
    """A figure of so many inches on one paper, with its title above room for everything else."""
    paper = paper_of(look)
    style: dict[Any, Any] = STYLE | {
        "font.family": _faces(),
        "text.color": paper.ink,
        "axes.labelcolor": paper.quiet,
        "axes.edgecolor": paper.line,
        "axes.facecolor": paper.back,
        "xtick.color": paper.ink,
        "ytick.color": paper.ink,
        "svg.fonttype": "none",
        "svg.hashsalt": "manyheads",
    }
    with rc_context(style):
        figure = Figure(figsize=size, dpi=DOTS, facecolor=paper.back)
        room = head_room(title, subtitle) / size[1]
        figure.set_layout_engine("constrained", rect=(0.008, 0.012, 0.984, 0.98 - room))
        if title:
            height = 1 - 0.32 / size[1]
            figure.text(0.015, height, title, size=16, weight="bold", color=paper.ink, va="center")
        if subtitle:
            height = 1 - (0.68 if title else 0.3) / size[1]
            figure.text(0.015, height, subtitle, size=11, color=paper.quiet, va="center")
        yield figure, paper


def head_room(title: str, subtitle: str) -> float:
    """Inches above the picture that its words need."""
    return 0.5 * bool(title) + 0.36 * bool(subtitle)


def quiet_axes(axes: Axes, paper: Paper, *, grid: Literal["x", "y", "none"] = "y") -> None:
    """Thin lines behind what is shown, and none around it."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=10, labelcolor=paper.ink)
    if grid != "none":
        axes.grid(axis=grid, color=paper.line, linewidth=0.8)
    axes.set_axisbelow(True)


def visible(token: str, longest: int = 16) -> str:
    """A token as it can be seen on paper: line ends and outer spaces have a shape.

    >>> visible(" the"), visible("a\\n"), visible("")
    ('·the', 'a⏎', '∅')
    """
    inner = token.strip(" ")
    left = len(token) - len(token.lstrip(" "))
    right = len(token) - len(token.rstrip(" ")) if inner else 0
    seen = "·" * left + inner.replace("\n", "⏎").replace("\t", "⇥") + "·" * right
    seen = "".join(letter if letter.isprintable() else "�" for letter in seen)
    seen = seen if len(seen) <= longest else seen[: longest - 1] + "…"
    return seen or "∅"


def thinned(count: int, most: int) -> range:
    """Places that are labelled: all of few, every second, third, ... of many.

    >>> list(thinned(5, 10)), list(thinned(7, 3))
    ([0, 1, 2, 3, 4], [0, 3, 6])
    """
    return range(0, count, max(1, -(-count // most)))


def write_picture(figure: Figure, path: Path) -> None:
    """PNG or SVG by the ending."""
    check_path(path, ENDINGS)
    # The same picture is the same file: no time of drawing in it.
    about: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
    # That a face has no bold letters is nothing a reader could mend.
    faces = logging.getLogger("matplotlib.font_manager")
    level = faces.level
    faces.setLevel(logging.ERROR)
    try:
        write_figure(figure, path, dpi=DOTS, facecolor=figure.get_facecolor(), **about)
    finally:
        faces.setLevel(level)


@cache
def _faces() -> list[str]:
    """The faces that are installed; matplotlib brings the first itself.

    Its list of faces is kept between runs, and knows none that came since.
    """
    files = {face.replace(" ", "") + "-Regular": face for face in FACES}
    files["NotoSansCJK-Regular"] = "Noto Sans CJK JP"
    known = set(font_manager.get_font_names())
    if not set(FACES[1:]) & known:
        for file in font_manager.findSystemFonts():
            if files.get(Path(file).stem, FACES[0]) not in known:
                font_manager.fontManager.addfont(file)
        known = set(font_manager.get_font_names())
    return [face for face in FACES if face in known]
