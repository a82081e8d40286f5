"""manyheads classify: texts or images to the classes that a model tells apart."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from manyheads.cli.arguments import (
    DeviceName,
    DtypeName,
    LineFiles,
    OutFile,
    Texts,
    cuts_told,
    lines_of,
    open_model,
)
from manyheads.errors import InputError
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    from manyheads.encoding.classify import Classes
    from manyheads.models.build import Model

Images = Annotated[
    tyro.conf.UseAppendAction[tuple[Path, ...]],
    tyro.conf.arg(metavar="IMAGE", help_behavior_hint="(repeatable)"),
]


@dataclass(frozen=True, slots=True)
class Classify:
    """Tell the class of each text, word or image, as the model was trained to: one text a line.

    For example: manyheads classify runs/moods/model --file reviews.txt -o moods.jsonl
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model with classes, or a model of the hub: org/name."""

    text: Texts = ()
    """A text to classify; given several times, each is one."""

    file: LineFiles = ()
    """Texts to classify, each line one; - is what is piped in."""

    image: Images = ()
    """For a model that reads images: a PNG, a JPEG, or a folder of them."""

    out: OutFile = None
    """A .jsonl file for shares of all classes, or tags of words, written whole or not at all."""

    batch_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens computed together; by default as many as suit the device."""

    dtype: DtypeName = "as it is"
    """The type of the weights while classifying."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    def run(self) -> int:
        """Say the class of each text, its share and the text, or how many went where."""
        if sum(map(bool, (self.text, self.file, self.image))) != 1:
            raise InputError(
                "what to classify comes from --text, from --file or from --image",
                "give one of them",
            )
        if self.out is not None:
            from manyheads.encoding.encode import check_place

            if self.out.suffix != ".jsonl":
                raise InputError(f"{self.out} does not end as a file of rows", "use .jsonl")
            check_place(self.out)
        if self.image:
            self._look()
            return 0
        texts = list(self.text) or [line for file in self.file for line in lines_of(file)]
        from manyheads.encoding.classify import classify_counted
        from manyheads.encoding.encode import Options
        from manyheads.models.readout import TokenHead

        model = open_model(self.model, self.device, self.dtype)
        if isinstance(model.config.readout, TokenHead):
            self._tag(model, texts)
            return 0
        options = Options(batch_tokens=self.batch_tokens, doing="classifying")
        found, done = classify_counted(model, texts, options)
        if done.cut:
            print(done.told, file=sys.stderr)
        self._tell(found, texts, "text")
        return 0

    def _look(self) -> None:
        from manyheads.data.image_preprocessing import find_images, read_image
        from manyheads.encoding.classify import classify_images
        from manyheads.models.vision import Vision

        files = [file for path in self.image for file in find_images(path)]
        model = open_model(self.model, self.device, self.dtype)
        if not isinstance(model, Vision):
            raise InputError(f"{self.model} reads no images", "give it texts with --text or --file")
        read = (read_image(model, file) for file in files)
        found = classify_images(model, read, total=len(files))
        self._tell(found, [str(file) for file in files], "image")

    def _tell(self, found: "Classes", given: list[str], what: str) -> None:
        """A line for each, or a file of rows and how many went where."""
        if self.out is None:
            for each, label, share in zip(given, found.labels, _best(found), strict=True):
                print(f"{label}\t{share:.3f}\t{each}")
            return
        _write_rows(_told(found, given, what), self.out)
        counts = ", ".join(f"{found.labels.count(name):,} {name}" for name in found.names)
        print(f"{pluralise(len(given), what)} ({counts}) to {self.out}")

    def _tag(self, model: "Model", texts: list[str]) -> None:
        """A word a line and a blank one between texts, or rows as training reads them."""
        from manyheads.encoding.tag import tag

        with cuts_told():
            found = tag(model, texts, batch_tokens=self.batch_tokens)
        if self.out is None:
            blocks = (
                "\n".join(f"{each.word}\t{each.label}\t{each.share:.3f}" for each in row)
                for row in found
            )
            print("\n\n".join(blocks))
            return
        rows = (
            {"tokens": [each.word for each in row], "tags": [each.label for each in row]}
            for row in found
        )
        _write_rows(rows, self.out)
        words = pluralise(sum(map(len, found)), "word")
        print(f"{words} of {pluralise(len(texts), 'text')} to {self.out}")


def _best(found: "Classes") -> list[float]:
    best: list[float] = found.shares.max(1).values.tolist()
    return best


def _told(found: "Classes", given: list[str], what: str) -> Iterator[dict[str, Any]]:
    for each, label, shares in zip(given, found.labels, found.shares.tolist(), strict=True):
        said = dict(zip(found.names, shares, strict=True))
        yield {what: each, "label": label, "shares": said}


def _write_rows(rows: Iterable[dict[str, Any]], file: Path) -> None:
    from manyheads.atomic_write import whole

    with whole(file) as beside, beside.open("w", encoding="utf-8") as opened:
        for row in rows:
            opened.write(json.dumps(row, ensure_ascii=False) + "\n")
