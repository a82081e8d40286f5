"""manyheads extract: the entities of texts, or how well a model finds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.cli import arguments
from manyheads.cli.options import BatchOptions, PlainTextOptions
from manyheads.errors import InputError
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    from manyheads.models.build import Model
    from manyheads.tasks.extraction.entity_recognition import Entity

# Colors of types on a terminal, by their order.
STYLES = ("cyan", "green", "magenta", "yellow", "blue", "red")


@dataclass(frozen=True, slots=True)
class Extract:
    """Find entities in texts with a model that was trained on tags.

    For example: manyheads extract runs/names/model --text "Anna met Boris in Riga."
    or manyheads extract runs/names/model --evaluate dev.conll
    """

    model: arguments.RequiredModel
    """The folder of a model that tags words, or a model of the hub: org/name."""

    evaluate: Annotated[Path | None, arguments.metavar("TAGGED")] = None
    """Tagged words (.conll, .jsonl or .parquet): print precision, recall and F1 of the entities."""

    out: arguments.OutFile = None
    """A .jsonl file for the texts and their entities."""

    json: arguments.JsonFile = None
    """A .json file for texts and entities, or all scores of --evaluate; - prints it instead."""

    min_score: float = 0.0
    """Leave out entities whose score is below this."""

    input: PlainTextOptions = PlainTextOptions()
    compute: BatchOptions = BatchOptions()

    def run(self) -> None:
        """Print each text with its entities marked, or write them, or print their scores."""
        flags = "--text, --file or --evaluate"
        arguments.check_one_of("extract", flags, self.input.text, self.input.file, self.evaluate)
        if not 0 <= self.min_score <= 1:
            raise InputError(f"--min-score must be in [0, 1], got {self.min_score:g}")
        if self.out is not None and self.evaluate is not None:
            raise InputError("--evaluate prints scores", "use --json, or leave out --out")
        arguments.check_jsonl(self.out)
        arguments.check_json(self.json)
        if self.evaluate is not None:
            self._score(self.evaluate)
            return
        texts = self.input.texts()
        self._show(texts, self._entities(self.compute.open(self.model), texts))

    def _entities(self, model: "Model", texts: Sequence[Any]) -> "list[list[Entity]]":
        from manyheads.tasks import entities

        tokens = self.compute.batch_tokens
        return entities(model, texts, min_score=self.min_score, batch_tokens=tokens)

    def _show(self, texts: list[str], extracted: "list[list[Entity]]") -> None:
        rows = [
            {"text": text, "entities": [entity.as_dict() for entity in entities]}
            for text, entities in zip(texts, extracted, strict=True)
        ]
        arguments.write_json(self.json, rows)
        if self.out is None:
            _print_marked(texts, extracted)
            return
        arguments.write_jsonl(self.out, rows)
        counts = pluralise(sum(map(len, extracted)), "entity")
        print(f"{counts} of {pluralise(len(texts), 'text')} to {self.out}")

    def _score(self, file: Path) -> None:
        from manyheads.data.labeled import TaggedTexts
        from manyheads.data.sources.conll import tagged_rows
        from manyheads.tasks import entities_of_tags, score_entities

        rows = list(TaggedTexts(tagged_rows((str(file),))))
        if not rows:
            raise InputError(f"--evaluate {file} has no sentences", "give tagged words")
        if not all(isinstance(tag, str) for row in rows for tag in row.tags):
            remedy = "use names such as B-person and O"
            raise InputError(f"--evaluate {file} has numbers as tags", remedy)
        model = self.compute.open(self.model)
        expected = [entities_of_tags(row.words, [str(tag) for tag in row.tags]) for row in rows]
        scores = score_entities(expected, self._entities(model, [row.words for row in rows]))
        arguments.write_json(self.json, scores.as_dict())
        print(f"{pluralise(len(rows), 'text')} of {file}")
        print(scores)


def _print_marked(texts: list[str], extracted: "list[list[Entity]]") -> None:
    """Each text on its line, with [entities](type); in color on a terminal."""
    from rich.console import Console
    from rich.text import Text

    from manyheads.console import visible

    def append(part: str, style: str = "") -> None:
        line.append(visible(part.replace("\t", " ")), style=style)

    console = Console(soft_wrap=True, highlight=False)
    types = sorted({entity.type for row in extracted for entity in row})
    styles = {kind: STYLES[index % len(STYLES)] for index, kind in enumerate(types)}
    for text, row in zip(texts, extracted, strict=True):
        line, end = Text(), 0
        for entity in row:
            style = styles[entity.type]
            append(text[end : entity.start])
            append(f"[{entity.text}]", f"bold {style}")
            append(f"({entity.type})", style)
            end = entity.end
        append(text[end:])
        console.print(line)
