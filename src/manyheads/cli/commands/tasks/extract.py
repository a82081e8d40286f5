"""manyheads extract: the entities of texts, or how well a model finds them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from manyheads.cli.arguments import (
    BatchTokens,
    DeviceName,
    DtypeName,
    JsonFile,
    LineFiles,
    ManyTexts,
    OutFile,
    RequiredModel,
    check_json,
    open_model,
    read_lines,
    write_json,
)
from manyheads.errors import InputError
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    from manyheads.models.build import Model
    from manyheads.tasks.extraction.entity_recognition import Entity
    from manyheads.tasks.extraction.span_scores import EntityScores

TaggedFile = Annotated[Path | None, tyro.conf.arg(metavar="TAGGED", help_behavior_hint="")]
# Colors of types on a terminal, by their order.
STYLES = ("cyan", "green", "magenta", "yellow", "blue", "red")


@dataclass(frozen=True, slots=True)
class Extract:
    """Find entities in texts with a model that was trained on tags.

    For example: manyheads extract runs/names/model --text "Anna met Boris in Riga."
    or manyheads extract runs/names/model --evaluate dev.conll
    """

    model: RequiredModel
    """The folder of a model that tags words, or a model of the hub: org/name."""

    text: ManyTexts = ()
    """A text to find entities in."""

    file: LineFiles = ()
    """A file with one text per line; - is the standard input."""

    evaluate: TaggedFile = None
    """Tagged words (.conll, .jsonl or .parquet): print precision, recall and F1 of the entities."""

    out: OutFile = None
    """A .jsonl file for the texts and their entities."""

    json: JsonFile = None
    """A .json file for the texts and their entities, or for all scores of --evaluate."""

    min_score: float = 0.0
    """Leave out entities whose score is below this."""

    batch_tokens: BatchTokens = None
    """Tokens per batch; by default as many as suit the device."""

    dtype: DtypeName = "auto"
    """The dtype to compute in; by default that of the weights."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Print each text with its entities marked, or write them, or print their scores."""
        if sum((bool(self.text), bool(self.file), self.evaluate is not None)) != 1:
            raise InputError(
                "manyheads extract needs --text, --file or --evaluate", "give one of them"
            )
        if not 0 <= self.min_score <= 1:
            raise InputError(f"--min-score must be in [0, 1], got {self.min_score:g}")
        if self.out is not None:
            from manyheads.encoding.encode import check_file

            if self.out.suffix != ".jsonl":
                raise InputError(f"--out must end in .jsonl, got {self.out}")
            if self.evaluate is not None:
                raise InputError("--evaluate prints scores", "use --json, or leave out --out")
            check_file(self.out)
        check_json(self.json)
        if self.evaluate is not None:
            self._score(self.evaluate)
            return 0
        texts = list(self.text) or read_lines(self.file)
        model = open_model(self.model, self.device, self.dtype)
        self._show(texts, self._entities(model, texts))
        return 0

    def _entities(self, model: "Model", texts: Sequence[Any]) -> "list[list[Entity]]":
        from manyheads.tasks import entities

        return entities(model, texts, min_score=self.min_score, batch_tokens=self.batch_tokens)

    def _show(self, texts: list[str], found: "list[list[Entity]]") -> None:
        rows = list(_rows(texts, found))
        if self.json is not None:
            write_json(self.json, rows)
        if self.out is not None:
            from manyheads.atomic_write import atomic_write

            with atomic_write(self.out) as partial, partial.open("w", encoding="utf-8") as opened:
                opened.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            counts = pluralise(sum(map(len, found)), "entity")
            print(f"{counts} of {pluralise(len(texts), 'text')} to {self.out}")
        else:
            _print_marked(texts, found)

    def _score(self, file: Path) -> None:
        from manyheads.data.labeled import TaggedTexts
        from manyheads.data.sources.conll import tagged_rows
        from manyheads.tasks import entities_of_tags, score_entities

        rows = list(TaggedTexts(tagged_rows((str(file),))))
        if not rows:
            raise InputError(f"--evaluate {file} has no sentences", "give tagged words")
        if not all(isinstance(tag, str) for row in rows for tag in row.tags):
            raise InputError(
                f"--evaluate {file} has numbers as tags", "use names such as B-person and O"
            )
        model = open_model(self.model, self.device, self.dtype)
        expected = [entities_of_tags(row.words, [str(tag) for tag in row.tags]) for row in rows]
        found = self._entities(model, [row.words for row in rows])
        scores = score_entities(expected, found)
        if self.json is not None:
            write_json(self.json, _score_row(scores))
        print(f"{pluralise(len(rows), 'text')} of {file}")
        print(scores)


def _rows(texts: list[str], found: "list[list[Entity]]") -> Iterator[dict[str, Any]]:
    for text, each in zip(texts, found, strict=True):
        listed = [{**entity._asdict(), "score": round(entity.score, 4)} for entity in each]
        yield {"text": text, "entities": listed}


def _score_row(scores: "EntityScores") -> dict[str, Any]:
    rows = {"all": scores.overall, **scores.by_type}
    return {
        name: {
            mode: {
                "precision": score.precision,
                "recall": score.recall,
                "f1": score.f1,
                "expected": score.expected,
                "found": score.found,
            }
            for mode, score in modes.items()
        }
        for name, modes in rows.items()
    }


def _print_marked(texts: list[str], found: "list[list[Entity]]") -> None:
    """Each text on its line, with [entities](type); in color on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    types = sorted({each.type for row in found for each in row})
    styles = {kind: STYLES[index % len(STYLES)] for index, kind in enumerate(types)}
    for text, row in zip(texts, found, strict=True):
        line, end = Text(), 0
        for each in row:
            line.append(_shown(text[end : each.start]))
            line.append(f"[{_shown(each.text)}]", style=f"bold {styles[each.type]}")
            line.append(f"({_shown(each.type)})", style=styles[each.type])
            end = each.end
        line.append(_shown(text[end:]))
        console.print(line)


def _shown(text: str) -> str:
    from manyheads.console import visible

    return visible(text.replace("\t", " "))
