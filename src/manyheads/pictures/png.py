"""A figure becomes a PNG file whole, or not at all."""

import os
import warnings
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from manyheads.errors import InputError

__all__ = ["DOTS", "INK", "QUIET", "STYLE", "check_path", "write_png"]

DOTS = 100
INK, QUIET = "#1a1a1a", "#5c5c5c"

# The keys are a literal type of matplotlib's, which not all of its versions have.
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
}


def check_path(path: Path) -> None:
    """Refuse a name that no picture can have, before anything is computed for it."""
    if path.suffix.lower() != ".png":
        raise InputError(f"the picture {path} is no PNG", "let its name end in .png")
    if path.is_dir():
        raise InputError(f"the picture {path} is a folder", "name a file in it")
    if not path.parent.is_dir():
        raise InputError(
            f"the picture {path} has no folder {path.parent}", "make the folder, or name another"
        )


def write_png(figure: Figure, path: Path) -> None:
    """Write beside the file first, then move, so that a failure leaves what was there before."""
    check_path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file, rc_context(STYLE), warnings.catch_warnings():
            # A token in a script that the font lacks is drawn as boxes; the map is still right.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(file, format="png", dpi=DOTS)
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
