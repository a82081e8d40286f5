"""manyheads explain: one sentence through one layer, step by step."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated

import tyro

from manyheads.cli.arguments import Flag, Picture
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class Explain:
    """Walk a sentence through one attention layer, number by number, and check it by hand.

    For example: manyheads explain "Hello, world!" --head 3 --position 2 --picture heads.png
    """

    texts: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="TEXT ...", help_behavior_hint=""),
    ] = ()
    """The sentence; several make a batch, as in "Hello, world!" "How are you?"."""

    sentence: int = 0
    """Which sentence of a batch is shown step by step."""

    head: int = 0
    """Which head is shown, 0 to 7."""

    position: int = 0
    """Which token is shown, 0 for the first."""

    language: Annotated[str, tyro.conf.arg(metavar="{en,ru}")] = "en"
    """The language of the explanation."""

    seed: int = 0
    """Which random weights the model has."""

    picture: Picture = None
    """Also draw a picture: all heads of the sentence, or the curves of --scaling."""

    scaling: Flag = False
    """Measure instead why scores are divided by the root of the head size."""

    def run(self) -> int:
        """Print, and draw if asked; 0 where model and hand agree."""
        words = load_words(self.language)
        self._check()
        if self.scaling:
            return self._measure(words)
        return self._walk(words)

    def _check(self) -> None:
        if self.scaling and (self.texts or self.sentence or self.head or self.position):
            raise InputError(
                "--scaling measures random vectors and reads no sentence",
                "leave out either it or the text, --sentence, --head and --position",
            )
        if not (self.scaling or self.texts):
            raise InputError(
                "there is no text", 'give one, as in manyheads explain "Hello, world!"'
            )
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed} is out of range", "use 0 to 2^63 - 1")
        if self.picture is not None:
            from manyheads.pictures.canvas import check_path

            check_path(self.picture)

    def _walk(self, words: Mapping[str, str]) -> int:
        from rich.console import Console

        from manyheads.explain.layer_walk import walk
        from manyheads.explain.walk_page import WalkPage
        from manyheads.models.build import build

        model = build("council", seed=self.seed)
        chosen = {"sentence": self.sentence, "head": self.head, "position": self.position}
        walked = walk(model, self.texts, **chosen)
        page = WalkPage(walked, words, Console(highlight=False), seed=self.seed)
        page.show()
        if self.picture is not None:
            page.draw(self.picture)
        return 0 if walked.agrees else 1

    def _measure(self, words: Mapping[str, str]) -> int:
        from rich.console import Console

        from manyheads.explain.scaling import ScalingPage, measure

        page = ScalingPage(measure(seed=self.seed), words, Console(highlight=False), seed=self.seed)
        page.show()
        if self.picture is not None:
            page.draw(self.picture)
        return 0


def load_words(language: str) -> Mapping[str, str]:
    """The texts of one language, by section and name, as in `scores.title`."""
    source = files("manyheads.explain").joinpath("words.toml")
    languages = tomllib.loads(source.read_text("utf-8"))
    if language not in languages:
        raise InputError(
            f"language={language!r} is not one we speak", f"use {' or '.join(languages)}"
        )
    return {
        f"{section}.{name}": text
        for section, texts in languages[language].items()
        for name, text in texts.items()
    }
