"""manyheads card: a page about the heads of a model, for its model card."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyheads.cli import arguments, inputs
from manyheads.cli.options import DeviceOptions, TextOptions
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class CardCommand:
    """Write a page about the heads of a model for its model card: Markdown, a picture and JSON.

    For example: manyheads card gpt2/ --file book.txt -o card/

    It says how many heads of each layer have which kind, which are sinks, dead or duplicates, which
    the model needs most, and what it costs to remove 10, 20 and 40 % of them.
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = Path("card")
    """The folder for card.md, card.png and card.json."""

    by: Literal["auto", "ablation", "gradient", "none"] = "auto"
    """How to measure the importance of a head: exactly by ablation, or by gradients."""

    image: Annotated[tuple[Path, ...], arguments.metavar("IMAGE")] = ()
    """Images to read, or folders of them, for a vision model; by default random images."""

    input: TextOptions = TextOptions()
    compute: DeviceOptions = DeviceOptions()

    def run(self) -> None:
        """Measure, write the files, and print the page."""
        arguments.check_out_folder(self.out)
        arguments.check_minimum("--tokens", self.input.tokens, 2)
        if self.image and self.input.has_texts:
            raise InputError("--image excludes --text, --file and --ids", "give one of them")
        from manyheads.cli.commands.report import name_of_model
        from manyheads.report import card_markdown, collect_card, write_card

        model = self.compute.open(self.model)
        texts = self.input.load_texts(model)
        if self.image:
            texts = inputs.load_images(model, self.image, self.input.tokens)
        corpus = "texts of the command line" if self.input.has_texts else "articles of manyheads"
        corpus = "images" if model.reads_images else corpus
        if self.input.file is not None:
            corpus = self.input.file.name
        card = collect_card(
            model,
            texts,
            name=name_of_model(self.model),
            corpus=corpus,
            command=self._command(),
            by=self.by,
            on_progress=lambda step: print(step, file=sys.stderr, flush=True),
        )
        print(card_markdown(card))
        for path in write_card(card, self.out):
            print(f"saved {path}")

    def _command(self) -> str:
        """The command that gives this card, without what it was told by default."""
        parts = ["manyheads", "card", self.model]
        parts += [] if self.input.file is None else ["--file", str(self.input.file)]
        parts += ["--tokens", str(self.input.tokens)] if self.input.tokens != 5_000 else []
        parts += ["--by", self.by] if self.by != "auto" else []
        return shlex.join(parts)
