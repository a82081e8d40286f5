"""manyheads explain: one sentence through one layer, step by step."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from manyheads.cli import arguments
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class Explain:
    """Walk a sentence through one attention layer, number by number, and check it by hand.

    For example: manyheads explain "Hello, world!" --head 3 --position 2 --picture heads.png
    """

    texts: Annotated[tuple[str, ...], tyro.conf.Positional, arguments.metavar("TEXT ...")] = ()
    """The sentence; several make a batch, as in "Hello, world!" "How are you?"."""

    sentence: int = 0
    """The sentence of a batch to explain step by step, 0 for the first."""

    head: int = 0
    """The head to explain, 0 to 7."""

    position: int = 0
    """The token to explain, 0 for the first."""

    language: Literal["en", "ru"] = "en"
    """The language of the explanation."""

    seed: int = 0
    """The seed of the model's random weights."""

    picture: arguments.PngFile = None
    """Also draw a picture: all heads of the sentence, or the curves of --scaling."""

    scaling: arguments.Flag = False
    """Instead of a sentence, measure why scores are divided by the root of the head size."""

    def run(self) -> int:
        """Print the page and draw the picture, if any; 1 if the model differs from the hand."""
        if self.scaling and (self.texts or self.sentence or self.head or self.position):
            raise InputError(
                "--scaling measures random vectors and reads no sentence",
                "leave it out, or the text, --sentence, --head and --position",
            )
        if not (self.scaling or self.texts):
            raise InputError("there is no text", 'give one: manyheads explain "Hello, world!"')
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed must be in 0 to 2^63 - 1, got {self.seed}")
        arguments.check_picture(self.picture)
        from rich.console import Console

        from manyheads.explain import load_words
        from manyheads.explain.layer_walk import walk
        from manyheads.explain.scaling import ScalingPage, measure
        from manyheads.explain.walk_page import WalkPage
        from manyheads.models.build import build

        words, console = load_words(self.language), Console(highlight=False)
        page: ScalingPage | WalkPage
        if self.scaling:
            page, agrees = (
                ScalingPage(measure(seed=self.seed), words, console, seed=self.seed),
                True,
            )
        else:
            walked = walk(
                build("tiny-encoder", seed=self.seed),
                self.texts,
                sentence=self.sentence,
                head=self.head,
                position=self.position,
            )
            page, agrees = WalkPage(walked, words, console, seed=self.seed), walked.agrees
        page.show()
        if self.picture is not None:
            page.draw(self.picture)
        return 0 if agrees else 1
