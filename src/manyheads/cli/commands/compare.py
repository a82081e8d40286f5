"""manyheads compare: two models head by head."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from manyheads.cli.arguments import (
    DeviceName,
    Flag,
    ImagePlace,
    JsonFile,
    TextFile,
    Texts,
    check_json,
    cuts_told,
    first_images,
    image_folder,
    open_model,
    read_texts,
)


@dataclass(frozen=True, slots=True)
class Compare:
    """Say which heads changed between two models, by every statistic, and what became of them.

    For example: manyheads compare gpt2/ gpt2-tuned/ --file book.txt --json changes.json

    Without models, house-gpt is compared with its gated twin.
    """

    before: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[BEFORE]", help_behavior_hint="(default: house-gpt)"),
    ] = "house-gpt"
    """The folder of a model with a tokenizer, a house model, or a model of the hub: org/name."""

    after: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[AFTER]", help_behavior_hint="(default: house-gpt-gated)"),
    ] = "house-gpt-gated"
    """The model that came of it: tuned, gated or pruned."""

    text: Texts = ()
    """A text to read; given several times, each is one."""

    file: TextFile = None
    """Texts to read, apart by blank lines, or one a line where there are none."""

    image: ImagePlace = None
    """For models that read images: a folder of them; for those of classes, a folder a class."""

    tokens: int = 5_000
    """How much of a file is read; an image has as many tokens as patches, and one more."""

    no_kinds: Flag = False
    """Leave out whether heads are of other kinds now."""

    how: Literal["not", "zero", "mean", "resample"] = "not"
    """Also ablate every head of both models, and by what."""

    json: JsonFile = None
    """Where everything goes as JSON, whole or not at all; manyheads.lens reads it back."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    def run(self) -> int:
        """Print the heads that moved most; 1 where it was broken off."""
        from rich.console import Console

        from manyheads.cli.pages.compare_page import show
        from manyheads.lens import compare
        from manyheads.surgery.cut.head_origins import origins_in

        check_json(self.json)
        before, after = (open_model(name, self.device) for name in (self.before, self.after))
        with cuts_told():
            texts, targets = self._read(before)
            found = compare(
                before,
                after,
                texts,
                targets=targets,
                origins=origins_in(before, after),
                roles="not" if self.no_kinds else "kinds",
                how=self.how,
            )
        show(Console(), self.before, self.after, found)
        if self.json is not None:
            found.save(self.json)
            print(f"everything is in {self.json}")
        return 0 if found.facts["complete"] else 1

    def _read(self, model: Any) -> tuple[Any, Any]:
        """What both read, and the right classes of images where they tell any."""
        folder = image_folder(model, self.image, texts=bool(self.text or self.file))
        if folder is not None:
            return first_images(model, folder, self.tokens, seed=0)[0]
        return read_texts(model, self.text, self.file, self.tokens), None
