"""manyheads search: the documents of an index that fit a query best."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.cli import arguments, inputs, options
from manyheads.errors import InputError

if TYPE_CHECKING:
    from manyheads.console import TerminalPage
    from manyheads.tasks.search.index import Hit, Index
    from manyheads.tasks.search.match_result import MatchExplanation

ADDRESS_HELP = (
    "The folder of an index that manyheads index wrote, or its address in an object store."
)
IndexAddress = Annotated[
    arguments.PositionalText, tyro.conf.arg(metavar="INDEX", help=ADDRESS_HELP)
]
OptionalQuery = Annotated[str | None, tyro.conf.Positional, arguments.metavar("[QUERY]")]

# Documents found per query, and the depth that measures of rankings look at.
SHOWN, SCORED = 10, 100
# Documents that are explained unless --top-k says otherwise.
EXPLAINED = 3
# Characters of a passage on the page.
EXCERPT = 320
# A word is colored if it adds at least this fraction of what the strongest adds.
COLORED = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """Which documents of the index, and its model."""

    where: Annotated[str | None, arguments.metavar("CONDITION")] = None
    """Only documents whose metadata fits, such as "year > 1960 and author = 'Ann'"."""

    model: Annotated[str | None, arguments.metavar("MODEL", "(default: that of the index)")] = None
    """The model to encode queries with, if the one that the index was made with has moved."""


@dataclass(frozen=True, slots=True)
class Search:
    """Search the documents of an index.

    For example: manyheads search notes.index "how heads are pruned"
    """

    address: IndexAddress

    query: OptionalQuery = None
    """What to look for; without it, queries are asked for, or read from a pipe line by line."""

    like: Annotated[str | None, arguments.metavar("DOCUMENT")] = None
    """Instead of a query: the id of a document of the index, to find others like it."""

    top_k: arguments.OptionalInt = None
    """Show so many documents, by default 10; with --evaluate, look at the first 100 or so many."""

    evaluate: Annotated[Path | None, arguments.metavar("JSONL")] = None
    """A file of queries with the ids of relevant documents: print nDCG, MRR, recall and MAP."""

    grades: Literal["best-last", "best-first"] = "best-last"
    """With --evaluate: whether a larger grade is better, or 1 is the best."""

    explain: arguments.Flag = False
    """Say which words and heads made each document match; by default of the 3 best."""

    heads_by: Literal["ablation", "gradient"] = "ablation"
    """With --explain: run the model without each head, or estimate that from gradients."""

    picture: arguments.PngFile = None
    """Draw why the best document matched: words, tokens and heads; implies --explain."""

    json: arguments.JsonFile = None
    """A JSON file for all that was found; - prints it instead of the page, one line per query."""

    index: IndexOptions = IndexOptions()
    compute: options.DeviceOptions = options.DeviceOptions()

    def run(self) -> None:
        """Print the documents found, from best to worst."""
        exclusive = (self.query, self.like, self.evaluate)
        arguments.check_exclusive("QUERY, --like and --evaluate", *exclusive)
        if self.top_k is not None:
            arguments.check_minimum("--top-k", self.top_k, 1)
        arguments.check_not_empty("QUERY", self.query)
        if self.evaluate is not None and self.index.where is not None:
            raise InputError("--where cannot be combined with --evaluate", "leave out one of them")
        if self._explains and (self.like is not None or self.evaluate is not None):
            raise InputError("--explain needs a QUERY", "leave out --like and --evaluate")
        arguments.check_picture(self.picture, (".png", ".svg"))
        results = JsonResults(self.json)
        index = self.compute.open_index(self.address, self.index.model)
        if self._explains:
            from manyheads.tasks.search.match_explanation import check_explains

            check_explains(index)
        if self.evaluate is not None:
            self._score(index, self.evaluate)
            return
        if self.like is not None:
            self._show(results, self.like, index.like(self.like, top_k=self._count), "")
        else:
            for query in read_questions() if self.query is None else (self.query,):
                self._search(index, query, results)
        results.write()

    @property
    def _count(self) -> int:
        return self.top_k or (EXPLAINED if self._explains else SHOWN)

    @property
    def _explains(self) -> bool:
        return self.explain or self.picture is not None

    def _search(self, index: "Index", query: str, results: "JsonResults") -> None:
        # A file of code is found for each of its functions.
        where, every = self.index.where, index.settings.code
        hits = index.search(query, top_k=self._count, where=where, every_chunk=every)
        if not self._explains:
            self._show(results, query, hits, query)
            return
        from manyheads.tasks.search.match_explanation import explain_hit

        why = [explain_hit(index, query, hit, by=self.heads_by) for hit in hits]
        self._show(results, query, hits, query, why)
        if self.picture is not None and why:
            from manyheads.pictures import draw_match

            draw_match(path=self.picture, **why[0].picture_data())
            print(f"the picture is in {self.picture}", file=sys.stderr)

    def _show(
        self,
        results: "JsonResults",
        query: str,
        hits: "Sequence[Hit]",
        words: str,
        why: "Sequence[MatchExplanation]" = (),
    ) -> None:
        if self.json is not None:
            rows = [hit.as_dict() for hit in hits]
            for row, explanation in zip(rows, why, strict=False):
                row["explanation"] = explanation.record()
            results.add({"query": query, "hits": rows})
        if arguments.prints_json(self.json):
            return
        if self.query is None and self.like is None:
            print_question(query)
        page = _new_page()
        if not hits:
            page.paragraph("No document was found.")
        for number, hit in enumerate(hits, 1):
            print_hit(page, number, hit, words, passage=not why)
            if why:
                print_explanation(page, why[number - 1])
        sys.stdout.flush()

    def _score(self, index: "Index", file: Path) -> None:
        from manyheads.tasks.search.ranking_measures import evaluate_retrieval

        scores = evaluate_retrieval(index, file, top_k=self.top_k or SCORED, grades=self.grades)
        print(scores)
        arguments.write_json(self.json, scores.as_dict())


def read_questions() -> Iterator[str]:
    """Lines of the standard input; at a terminal they are asked for until one is empty."""
    while line := inputs.read_question():
        if line.strip():
            yield line.strip()
        elif sys.stdin.isatty():
            return


def print_question(question: str) -> None:
    """Repeat what a pipe asked, above what was found."""
    if not sys.stdin.isatty():
        page = _new_page()
        page.blank_line()
        page.title(question)


def _new_page() -> "TerminalPage":
    from manyheads.console import TerminalPage

    return TerminalPage()


class JsonResults:
    """What --json asks for: a list in a file, lines on the standard output for "-", or nothing."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._values: list[Any] = []
        arguments.check_json(file)

    def add(self, value: Any) -> None:
        """Print a result, or keep it for the file."""
        if arguments.prints_json(self._file):
            arguments.print_json(value)
        else:
            self._values.append(value)

    def write(self) -> None:
        """Write the file, if there is one."""
        if not arguments.prints_json(self._file):
            arguments.write_json(self._file, self._values)


def print_hit(
    page: "TerminalPage", number: int, hit: "Hit", query: str, *, passage: bool = True
) -> None:
    """Number, title and score of a document, and its passage with the words of the query marked."""
    from rich.text import Text

    from manyheads.console import visible
    from manyheads.tasks.search.highlights import best_excerpt, highlight

    page.heading(f"{number}. {visible(hit.title or hit.id)}", right=f"{hit.score:.3f}")
    details = [hit.id] if hit.title and hit.id != hit.title else []
    details += [hit.source] if hit.source and hit.source != hit.id else []
    details += [f"{name}: {value}" for name, value in hit.metadata.items()]
    if details:
        page.paragraph(visible(" · ".join(map(str, details))), style="dim")
    if not passage:
        return
    flat = visible(" ".join(hit.text.split()))
    start, end = best_excerpt(flat, highlight(query, flat), EXCERPT)
    excerpt = Text(flat[start:end])
    for first, last in highlight(query, excerpt.plain):
        excerpt.stylize("bold yellow", first, last)
    before, after = "… " if start else "", " …" if end < len(flat) else ""
    page.wrapped(Text.assemble(before, excerpt, after))


def print_explanation(page: "TerminalPage", explained: "MatchExplanation") -> None:
    """The passage with its words colored by what they add, and the strongest words and heads."""
    from rich.text import Text

    from manyheads.console import heat, visible

    flat = "".join(" " if letter.isspace() else letter for letter in explained.document.text)
    text = Text(visible(flat))
    words = explained.document.words()
    largest = max((word.contribution for word in words), default=0.0)
    for word in words:
        if largest > 0 and word.contribution >= COLORED * largest:
            text.stylize(heat(word.contribution / largest), word.start, word.end)
    page.wrapped(text)
    page.blank_line()
    # The first line gives the kind of match, those after it words of both sides and heads.
    for sentence in str(explained).splitlines():
        page.paragraph(visible(sentence.strip()), style="dim")
