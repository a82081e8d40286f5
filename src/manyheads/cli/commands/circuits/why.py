"""manyheads why: why a head looks at a token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.cli import arguments, inputs
from manyheads.cli.options import DeviceOptions
from manyheads.errors import InputError

if TYPE_CHECKING:
    from manyheads.lens.attribution.link_reasons import LinkReasons

Token = Annotated[str, arguments.metavar("N")]
# Pairs and writers that are printed.
ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyCommand:
    """Explain why a head looks at a token: the score of one link, divided among pairs of writers.

    For example: manyheads why house-gpt L2H6 --text "Trondheim is an old town. Trond"
    """

    model: arguments.RequiredModel
    """The folder of a model, a bundled model, or a model of the hub: org/name."""

    head: Annotated[arguments.PositionalText, arguments.metavar("HEAD")]
    """The head, such as L5H1 or "decoder L2H0 cross"."""

    text: arguments.OptionalText = None
    """The text; of an encoder-decoder, source and target with a tab between them."""

    file: arguments.TextFile = None
    """A file with the text."""

    query: Token = "last"
    """The token that looks: its number, from 0, or "last"."""

    key: Token = "strongest"
    """The token that it looks at: its number, or "strongest", the one with the largest score."""

    against: Annotated[str, arguments.metavar("N")] = "mean"
    """The token whose score is subtracted: a number, "mean" of all that it sees, or "none"."""

    all: arguments.Flag = False
    """Print every pair, not only the strongest."""

    json: arguments.ResultFile = None

    compute: DeviceOptions = DeviceOptions()

    def run(self) -> int:
        """Print the strongest pairs and the strongest writers of both sides."""
        from manyheads.lens import why
        from manyheads.lens.attribution.attribute import split_pair

        arguments.check_json(self.json)
        arguments.check_one_of("why", "--text or --file", self.text, self.file)
        arguments.check_not_empty("--text", self.text)
        query, key = self._token("query", "last"), self._token("key", "last", "strongest")
        against = self._token("against", "last", "mean", "none")
        text: Any = self.text if self.file is None else inputs.read_file(self.file).strip("\n")
        model = self.compute.open(self.model)
        text = split_pair(text) if model.reads_pairs else text
        versus = None if against == "none" else against
        result = why(model, [text], self.head, query, key, against=versus)
        with arguments.page_for_json(self.json):
            _print(self.model, result, None if self.all else ROWS)
        arguments.save_result(self.json, result)
        return 0

    def _token(self, name: str, *words: str) -> Any:
        value: str = getattr(self, name)
        if value in words:
            return value
        if not value.isdecimal():
            options = " or ".join(f'"{word}"' for word in words)
            raise InputError(
                f"--{name} {value} is not the number of a token", f"count from 0, or use {options}"
            )
        return int(value)


def _print(name: str, result: "LinkReasons", rows: int | None) -> None:
    from rich.text import Text

    from manyheads.console import TerminalPage, visible
    from manyheads.formatting import plain_table

    page = TerminalPage()
    page.title(name)
    page.paragraph(f"{visible(result.summary)}.")
    page.heading("Pairs")
    table = result.table(rows)
    table.title = None
    page.show(table)
    more = len(result.query_writers) * len(result.key_writers) - table.row_count
    if more:
        page.paragraph(f"and {more} more: --all prints them", style="dim")
    for title, side in (("query", result.query_side), ("key", result.key_side)):
        page.heading(f"Writers to the {title}")
        parts = [(Text(writer), f"{value:+.4f}") for writer, value in side.items()][:rows]
        page.show(plain_table(["writer"], ["adds"], parts))
