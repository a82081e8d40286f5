"""A figure becomes a file whole, or not at all."""

import warnings
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from manyheads.errors import InputError
from manyheads.whole import whole

__all__ = ["DOTS", "INK", "QUIET", "STYLE", "check_path", "write_figure", "write_png"]

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
