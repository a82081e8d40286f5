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
    EngineName,
    JsonFile,
    LineFiles,
    ManyTexts,
    OutFile,
    PngFile,
    RequiredModel,
    Workers,
    check_engine,
    check_json,
    open_model,
    read_lines,
    write_json,
)
from manyheads.errors import InputError
from manyheads.formatting import UNKNOWN, pluralise

if TYPE_CHECKING:
    from manyheads.encoding.classify import Classification
    from manyheads.models.build import Model
    from manyheads.tasks.extraction.classification_scores import ClassificationScores, ClassScore

LabeledFile = Annotated[Path | None, tyro.conf.arg(metavar="LABELED", help_behavior_hint="")]
ImageFiles = Annotated[
    tyro.conf.UseAppendAction[tuple[Path, ...]],
    tyro.conf.arg(metavar="IMAGE", help_behavior_hint="(repeatable)"),
]


@dataclass(frozen=True, slots=True)
class Classify:
    """Classify texts, words or images with a model that was trained to.

    For example: manyheads classify runs/moods/model --file reviews.txt -o moods.jsonl
    or manyheads classify runs/moods/model --evaluate held-out.jsonl --confusion confusion.png
    """

    model: RequiredModel
    """The folder of a model with classes, or a model of the hub: org/name."""

    text: ManyTexts = ()
    """A text to classify."""

    file: LineFiles = ()
    """A file with one text per line; - is the standard input."""

    image: ImageFiles = ()
    """For a vision model: a PNG, a JPEG, or a folder of them."""

    evaluate: LabeledFile = None
    """Texts with labels (.jsonl or .parquet): print precision, recall, F1 and calibration."""

    confusion: PngFile = None
    """With --evaluate, a picture of which class is taken for which, .png or .svg."""

    calibrate: LabeledFile = None
    """Texts with labels: fit the temperature of the probabilities, and store it with the model."""

    json: JsonFile = None
    """With --evaluate, a .json file for all scores."""

    out: OutFile = None
    """A .jsonl file for the probabilities of all classes, or for the tags of words."""

    batch_tokens: BatchTokens = None
    """Tokens per batch; by default as many as suit the device."""

    engine: EngineName = "plain"
    """Work in this process, or on all machines of a Ray cluster."""

    workers: Workers = None
    """With --engine ray: copies of the model; by default one per GPU, or per CPU."""

    dtype: DtypeName = "auto"
    """The dtype to compute in; by default that of the weights."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Print label, probability and text of each, or write them and print the counts."""
        labeled = (self.evaluate is not None, self.calibrate is not None)
        if sum((bool(self.text), bool(self.file), bool(self.image), *labeled)) != 1:
            raise InputError(
                "manyheads classify needs --evaluate or --calibrate with labels, or --text, --file "
                "or --image",
                "give one of them",
            )
        for flag, value in (("--confusion", self.confusion), ("--json", self.json)):
            if value is not None and self.evaluate is None:
                raise InputError(f"{flag} needs labels", "add --evaluate labels.jsonl")
        check_json(self.json)
        if self.out is not None and any(labeled):
            raise InputError("--out is for classes of texts, not for scores", "leave it out")
        if self.out is not None:
            from manyheads.encoding.encode import check_file

            if self.out.suffix != ".jsonl":
                raise InputError(f"--out must end in .jsonl, got {self.out}")
            check_file(self.out)
        if self.confusion is not None:
            from manyheads.pictures.canvas import IMAGE_SUFFIXES, check_image_path

            check_image_path(self.confusion, IMAGE_SUFFIXES)
        if self.evaluate is not None:
            self._evaluate(self.evaluate)
            return 0
        if self.calibrate is not None:
            self._calibrate(self.calibrate)
            return 0
        if self.image:
            self._classify_images()
            return 0
        check_engine(self.engine, self.workers)
        texts = list(self.text) or read_lines(self.file)
        from manyheads.encoding.classify import classify_counted
        from manyheads.encoding.encode import Options
        from manyheads.models.readout import TokenHead

        model = open_model(self.model, "cpu" if self.engine == "ray" else self.device, self.dtype)
        options = Options(batch_tokens=self.batch_tokens, doing="classifying")
        if isinstance(model.config.readout, TokenHead):
            if self.engine == "ray":
                raise InputError("--engine ray does not classify words", "leave it out")
            self._tag(model, texts)
            return 0
        if self.engine == "ray":
            from manyheads.tasks.filtering.ray_engine import classify_with_ray

            classes, done = classify_with_ray(
                model, texts, options, workers=self.workers, device=self.device
            )
        else:
            classes, done = classify_counted(model, texts, options)
        if done.cut:
            print(done.truncation, file=sys.stderr)
        self._output(classes, texts, "text")
        return 0

    def _labeled(self, file: Path, flag: str) -> "tuple[Model, list[str], list[Any]]":
        from manyheads.data.labeled import LabeledTexts
        from manyheads.data.sources.rows import FileRows
        from manyheads.models.readout import ClassHead

        rows = list(LabeledTexts(FileRows((str(file),))))
        if not rows:
            raise InputError(f"{flag} {file} has no rows", "give texts with labels")
        model = open_model(self.model, self.device, self.dtype)
        if not isinstance(model.config.readout, ClassHead):
            raise InputError(
                f"{self.model} has no classes of texts",
                f"train one with SequenceClassification; for tags, manyheads extract {flag}",
            )
        return model, [row.text for row in rows], [row.label for row in rows]

    def _evaluate(self, file: Path) -> None:
        from manyheads.encoding.classify import classify_counted
        from manyheads.encoding.encode import Options
        from manyheads.models.readout import classifier_of
        from manyheads.tasks.extraction.classification_scores import score_classes

        model, texts, labels = self._labeled(file, "--evaluate")
        if self.confusion is not None and classifier_of(model).multi_label:
            raise InputError(
                "--confusion needs one label per text, and the model gives several", "leave it out"
            )
        options = Options(batch_tokens=self.batch_tokens, doing="classifying")
        classes, done = classify_counted(model, texts, options)
        if done.cut:
            print(done.truncation, file=sys.stderr)
        scores = score_classes(labels, classes)
        if self.json is not None:
            write_json(self.json, _score_rows(scores))
        print(f"{pluralise(len(texts), 'text')} of {file}")
        print(scores)
        if self.confusion is not None:
            self._draw(scores, len(texts))

    def _draw(self, scores: "ClassificationScores", texts: int) -> None:
        from manyheads.pictures.class_charts import draw_confusion

        assert self.confusion is not None
        assert scores.confusion is not None
        draw_confusion(
            scores.confusion.tolist(),
            scores.names,
            self.confusion,
            title="Confusion matrix",
            subtitle=f"accuracy {scores.accuracy:.3f}, macro F1 {scores.macro_f1:.3f} on "
            f"{pluralise(texts, 'text')}",
        )
        print(f"drawn to {self.confusion}")

    def _calibrate(self, file: Path) -> None:
        """Fit the temperature and write it to the config.json of the folder."""
        from manyheads.checkpoints.classification_head import SETTINGS
        from manyheads.checkpoints.config_json import CONFIG
        from manyheads.models.readout import classifier_of
        from manyheads.tasks.extraction.calibration import calibrate

        config = Path(self.model) / CONFIG
        if not config.is_file():
            raise InputError(
                f"--calibrate writes to {CONFIG}, and {self.model} is no folder with one",
                "save the model to a folder first, with manyheads convert",
            )
        model, texts, labels = self._labeled(file, "--calibrate")
        several = classifier_of(model).multi_label
        result = calibrate(model, texts, labels, thresholds=several, batch_tokens=self.batch_tokens)
        before = json.loads(config.read_text("utf-8"))
        kept = {key: value for key, value in before.items() if key not in SETTINGS}
        write_json(config, kept | classifier_of(model).description())
        print(result)
        if several:
            print(f"thresholds {', '.join(f'{each:.3f}' for each in result.thresholds)}")
        print(f"stored in {config}")

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
            for each, labels, shares in _labels_and_shares(classes, inputs):
                print(f"{labels}\t{shares}\t{each}")
            return
        _write_rows(_rows(classes, inputs, unit), self.out)
        given = [label for row in classes.label_sets for label in row]
        counts = ", ".join(f"{given.count(name):,} {name}" for name in classes.names)
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


def _labels_and_shares(
    classes: "Classification", inputs: list[str]
) -> Iterator[tuple[str, str, str]]:
    """The input, its labels and their probabilities, each as text; – where there is no label."""
    rows = zip(inputs, classes.label_sets, classes.probabilities.tolist(), strict=True)
    for each, labels, row in rows:
        shares = dict(zip(classes.names, row, strict=True))
        told = ",".join(f"{shares[label]:.3f}" for label in labels)
        yield each, ",".join(labels) or UNKNOWN, told or f"{max(row):.3f}"


def _rows(classes: "Classification", inputs: list[str], unit: str) -> Iterator[dict[str, Any]]:
    rows = zip(inputs, classes.label_sets, classes.probabilities.tolist(), strict=True)
    for each, labels, row in rows:
        label = list(labels) if classes.multi_label else labels[0]
        yield {unit: each, "label": label, "shares": dict(zip(classes.names, row, strict=True))}


def _score_rows(scores: "ClassificationScores") -> dict[str, Any]:
    return {
        "classes": {name: _score_row(score) for name, score in scores.by_class.items()},
        "micro": _score_row(scores.micro),
        "macro": {
            "precision": scores.macro_precision,
            "recall": scores.macro_recall,
            "f1": scores.macro_f1,
        },
        "accuracy": scores.accuracy,
        "calibration_error": scores.calibration_error,
        "confusion": None if scores.confusion is None else scores.confusion.tolist(),
    }


def _score_row(score: "ClassScore") -> dict[str, float]:
    return {
        "precision": score.precision,
        "recall": score.recall,
        "f1": score.f1,
        "expected": score.expected,
        "found": score.found,
    }


def _write_rows(rows: Iterable[dict[str, Any]], file: Path) -> None:
    from manyheads.atomic_write import atomic_write

    with atomic_write(file) as partial, partial.open("w", encoding="utf-8") as opened:
        for row in rows:
            opened.write(json.dumps(row, ensure_ascii=False) + "\n")
