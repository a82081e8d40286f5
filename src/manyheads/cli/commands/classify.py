"""manyheads classify: the classes of texts, words or images."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from manyheads.cli.arguments import (
    BatchTokens,
    DeviceName,
    DtypeName,
    LineFiles,
    ManyTexts,
    OutFile,
    RequiredModel,
    open_model,
    read_lines,
)
from manyheads.errors import InputError
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    from manyheads.encoding.classify import Classification
    from manyheads.models.build import Model

ImageFiles = Annotated[
    tyro.conf.UseAppendAction[tuple[Path, ...]],
    tyro.conf.arg(metavar="IMAGE", help_behavior_hint="(repeatable)"),
]


@dataclass(frozen=True, slots=True)
class Classify:
    """Classify texts, words or images with a model that was trained to.

    For example: manyheads classify runs/moods/model --file reviews.txt -o moods.jsonl
    """

    model: RequiredModel
    """The folder of a model with classes, or a model of the hub: org/name."""

    text: ManyTexts = ()
    """A text to classify."""

    file: LineFiles = ()
    """A file with one text per line; - is the standard input."""

    image: ImageFiles = ()
    """For a vision model: a PNG, a JPEG, or a folder of them."""

    out: OutFile = None
    """A .jsonl file for the probabilities of all classes, or for the tags of words."""

    batch_tokens: BatchTokens = None
    """Tokens per batch; by default as many as suit the device."""

    dtype: DtypeName = "auto"
    """The dtype to compute in; by default that of the weights."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Print label, probability and text of each, or write them and print the counts."""
        if sum(map(bool, (self.text, self.file, self.image))) != 1:
            raise InputError(
                "manyheads classify needs --text, --file or --image", "give one of them"
            )
        if self.out is not None:
            from manyheads.encoding.encode import check_file

            if self.out.suffix != ".jsonl":
                raise InputError(f"--out must end in .jsonl, got {self.out}")
            check_file(self.out)
        if self.image:
            self._classify_images()
            return 0
        texts = list(self.text) or read_lines(self.file)
        from manyheads.encoding.classify import classify_counted
        from manyheads.encoding.encode import Options
        from manyheads.models.readout import TokenHead

        model = open_model(self.model, self.device, self.dtype)
        if isinstance(model.config.readout, TokenHead):
            self._tag(model, texts)
            return 0
        options = Options(batch_tokens=self.batch_tokens, doing="classifying")
        classes, done = classify_counted(model, texts, options)
        if done.cut:
            print(done.truncation, file=sys.stderr)
        self._output(classes, texts, "text")
        return 0

    def _classify_images(self) -> None:
        from manyheads.data.images import find_images, read_image
        from manyheads.encoding.classify import classify_images
        from manyheads.models.vision import Vision

        files = [file for path in self.image for file in find_images(path)]
        model = open_model(self.model, self.device, self.dtype)
        if not isinstance(model, Vision):
            raise InputError(f"{self.model} does not read images", "give --text or --file")
        images = (read_image(model, file) for file in files)
        classes = classify_images(model, images, total=len(files))
        self._output(classes, [str(file) for file in files], "image")

    def _output(self, classes: "Classification", inputs: list[str], unit: str) -> None:
        if self.out is None:
            probabilities = classes.probabilities.max(1).values.tolist()
            for each, label, probability in zip(inputs, classes.labels, probabilities, strict=True):
                print(f"{label}\t{probability:.3f}\t{each}")
            return
        _write_rows(_rows(classes, inputs, unit), self.out)
        counts = ", ".join(f"{classes.labels.count(name):,} {name}" for name in classes.names)
        print(f"{pluralise(len(inputs), unit)} ({counts}) to {self.out}")

    def _tag(self, model: "Model", texts: list[str]) -> None:
        """Print one word per line and a blank line between texts, or write rows for training."""
        from manyheads.encoding.classify import tag

        tagged = tag(model, texts, batch_tokens=self.batch_tokens)
        if self.out is None:
            blocks = (
                "\n".join(f"{each.word}\t{each.label}\t{each.probability:.3f}" for each in words)
                for words in tagged
            )
            print("\n\n".join(blocks))
            return
        rows = (
            {"tokens": [each.word for each in words], "tags": [each.label for each in words]}
            for words in tagged
        )
        _write_rows(rows, self.out)
        count = pluralise(sum(map(len, tagged)), "word")
        print(f"{count} of {pluralise(len(texts), 'text')} to {self.out}")


def _rows(classes: "Classification", inputs: list[str], unit: str) -> Iterator[dict[str, Any]]:
    rows = zip(inputs, classes.labels, classes.probabilities.tolist(), strict=True)
    for each, label, row in rows:
        yield {unit: each, "label": label, "shares": dict(zip(classes.names, row, strict=True))}


def _write_rows(rows: Iterable[dict[str, Any]], file: Path) -> None:
    from manyheads.atomic_write import atomic_write

    with atomic_write(file) as partial, partial.open("w", encoding="utf-8") as opened:
        for row in rows:
            opened.write(json.dumps(row, ensure_ascii=False) + "\n")
