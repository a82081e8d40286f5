"""manyheads classify: the classes of texts, words or images."""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.cli import arguments
from manyheads.cli.options import EngineOptions, PlainTextOptions
from manyheads.errors import InputError
from manyheads.formatting import UNKNOWN, pluralise

if TYPE_CHECKING:
    from manyheads.encoding.classify import Classification
    from manyheads.models.build import Model

LabeledFile = Annotated[Path | None, arguments.metavar("LABELED")]


@dataclass(frozen=True, slots=True)
class Classify:
    """Classify texts, words or images with a model that was trained to.

    For example: manyheads classify runs/moods/model --file reviews.txt -o moods.jsonl
    or manyheads classify runs/moods/model --evaluate held-out.jsonl --confusion confusion.png
    """

    model: arguments.RequiredModel
    """The folder of a model with classes, or a model of the hub: org/name."""

    image: Annotated[arguments.Paths, arguments.repeatable("IMAGE")] = ()
    """For a vision model: a PNG, a JPEG, or a folder of them."""

    evaluate: LabeledFile = None
    """Texts with labels (.jsonl or .parquet): print precision, recall, F1 and calibration."""

    confusion: arguments.PngFile = None
    """With --evaluate, a picture of which class is taken for which, .png or .svg."""

    calibrate: LabeledFile = None
    """Texts with labels: fit the temperature of the probabilities, and store it with the model."""

    json: arguments.JsonFile = None
    """With --evaluate, a .json file for all scores; - prints it instead."""

    out: arguments.OutFile = None
    """A .jsonl file for the probabilities of all classes, or for the tags of words."""

    input: PlainTextOptions = PlainTextOptions()
    compute: EngineOptions = EngineOptions()

    def run(self) -> None:
        """Print label, probability and text of each, or write them and print the counts."""
        flags = "--evaluate or --calibrate with labels, or --text, --file or --image"
        inputs = (self.input.text, self.input.file, self.image)
        arguments.check_one_of("classify", flags, self.evaluate, self.calibrate, *inputs)
        for flag, value in (("--confusion", self.confusion), ("--json", self.json)):
            if value is not None and self.evaluate is None:
                raise InputError(f"{flag} needs labels", "add --evaluate labels.jsonl")
        arguments.check_json(self.json)
        if self.out is not None and not any(inputs):
            raise InputError("--out is for classes of texts, not for scores", "leave it out")
        arguments.check_jsonl(self.out)
        arguments.check_picture(self.confusion, (".png", ".svg"))
        if self.evaluate is not None:
            self._evaluate(self.evaluate)
        elif self.calibrate is not None:
            self._calibrate(self.calibrate)
        elif self.image:
            self._classify_images()
        else:
            self._classify_texts()

    def _classify_texts(self) -> None:
        self.compute.check()
        texts = self.input.texts()
        from manyheads.models.readout import TokenHead

        model = self.compute.open_for_engine(self.model)
        if isinstance(model.config.readout, TokenHead):
            if self.compute.ray:
                raise InputError("--engine ray does not classify words", "leave it out")
            self._tag(model, texts)
        else:
            self._output(self._classes(model, texts, ray=self.compute.ray), texts, "text")

    def _classes(self, model: "Model", texts: list[str], *, ray: bool = False) -> "Classification":
        from manyheads.encoding.classify import classify_counted
        from manyheads.encoding.encode import Options

        options = Options(batch_tokens=self.compute.batch_tokens, doing="classifying")
        if ray:
            from manyheads.tasks.filtering.ray_engine import classify_on_workers

            workers, device = self.compute.workers, self.compute.device
            classes, done = classify_on_workers(model, texts, options, workers, device)
        else:
            classes, done = classify_counted(model, texts, options)
        if done.truncated:
            print(done.truncation, file=sys.stderr)
        return classes

    def _labeled(self, file: Path, flag: str) -> "tuple[Model, list[str], list[Any]]":
        from manyheads.data.labeled import LabeledTexts
        from manyheads.data.sources.rows import FileRows
        from manyheads.models.readout import ClassHead

        rows = list(LabeledTexts(FileRows((str(file),))))
        if not rows:
            raise InputError(f"{flag} {file} has no rows", "give texts with labels")
        model = self.compute.open(self.model)
        if not isinstance(model.config.readout, ClassHead):
            raise InputError(
                f"{self.model} has no classes of texts",
                f"train one with SequenceClassification; for tags, manyheads extract {flag}",
            )
        return model, [row.text for row in rows], [row.label for row in rows]

    def _evaluate(self, file: Path) -> None:
        from manyheads.models.readout import classifier_of
        from manyheads.tasks.extraction.classification_scores import score_classes

        model, texts, labels = self._labeled(file, "--evaluate")
        if self.confusion is not None and classifier_of(model).multi_label:
            raise InputError(
                "--confusion needs one label per text, and the model gives several", "leave it out"
            )
        scores = score_classes(labels, self._classes(model, texts))
        arguments.write_json(self.json, scores.as_dict())
        print(f"{pluralise(len(texts), 'text')} of {file}")
        print(scores)
        if self.confusion is not None:
            from manyheads.pictures.class_charts import draw_confusion

            assert scores.confusion is not None
            draw_confusion(
                scores.confusion.tolist(),
                scores.names,
                self.confusion,
                title="Confusion matrix",
                subtitle=f"accuracy {scores.accuracy:.3f}, macro F1 {scores.macro_f1:.3f} on "
                f"{pluralise(len(texts), 'text')}",
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
        several, size = classifier_of(model).multi_label, self.compute.batch_tokens
        result = calibrate(model, texts, labels, thresholds=several, batch_tokens=size)
        before = json.loads(config.read_text("utf-8"))
        others = {key: value for key, value in before.items() if key not in SETTINGS}
        arguments.write_json(config, others | classifier_of(model).description())
        print(result)
        if several:
            thresholds = ", ".join(f"{threshold:.3f}" for threshold in result.thresholds)
            print(f"thresholds {thresholds}")
        print(f"stored in {config}")

    def _classify_images(self) -> None:
        from manyheads.data.images import find_images, read_image
        from manyheads.encoding.classify import classify_images
        from manyheads.models.vision import Vision

        files = [file for path in self.image for file in find_images(path)]
        model = self.compute.open(self.model)
        if not isinstance(model, Vision):
            raise InputError(f"{self.model} does not read images", "give --text or --file")
        images = (read_image(model, file) for file in files)
        classes = classify_images(model, images, total=len(files))
        self._output(classes, [str(file) for file in files], "image")

    def _output(self, classes: "Classification", inputs: list[str], unit: str) -> None:
        rows = list(zip(inputs, classes.rows(), classes.label_sets, strict=True))
        if self.out is None:
            for name, row, labels in rows:
                shares = [f"{row['shares'][label]:.3f}" for label in labels]
                highest = f"{max(row['shares'].values()):.3f}"
                print(f"{','.join(labels) or UNKNOWN}\t{','.join(shares) or highest}\t{name}")
            return
        arguments.write_jsonl(self.out, ({unit: name, **row} for name, row, _ in rows))
        counted = Counter(label for labels in classes.label_sets for label in labels)
        counts = ", ".join(f"{counted[name]:,} {name}" for name in classes.names)
        print(f"{pluralise(len(inputs), unit)} ({counts}) to {self.out}")

    def _tag(self, model: "Model", texts: list[str]) -> None:
        """Print one word per line and a blank line between texts, or write rows for training."""
        from manyheads.encoding.classify import tag

        tagged = tag(model, texts, batch_tokens=self.compute.batch_tokens)
        if self.out is None:
            blocks = (
                "\n".join(f"{word.word}\t{word.label}\t{word.probability:.3f}" for word in words)
                for words in tagged
            )
            print("\n\n".join(blocks))
            return
        rows = (
            {"tokens": [word.word for word in words], "tags": [word.label for word in words]}
            for words in tagged
        )
        arguments.write_jsonl(self.out, rows)
        count = pluralise(sum(map(len, tagged)), "word")
        print(f"{count} of {pluralise(len(texts), 'text')} to {self.out}")
