"""manyheads attribute: which heads, layers or tokens a prediction comes from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from manyheads.cli import arguments, inputs
from manyheads.cli.options import DeviceOptions

if TYPE_CHECKING:
    from manyheads.lens.attribution.attribute import Attribution

Word = Annotated[str | None, arguments.metavar("WORD")]

# How many characters of the end of a text are printed.
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Attribute:
    """Attribute the next word after a text to the heads, layers or tokens that it comes from.

    For example: manyheads attribute gpt2/ --text "The capital of France is" --target Paris
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    text: arguments.OptionalText = None
    """The text to continue; by default the beginning of an article that comes with manyheads."""

    file: arguments.TextFile = None
    """A file with the text to continue; for an encoder-decoder, source and target with a tab."""

    target: Word = None
    """The next word, which must be one token; by default the most likely one."""

    against: Word = None
    """A word whose logit is subtracted, as in --target his --against her."""

    method: Literal["direct", "integrated", "heads", "rollout"] = "direct"
    """Direct logit attribution, integrated gradients by token or by head, or attention rollout."""

    steps: Annotated[int | None, arguments.metavar("N")] = None
    """Steps of integrated gradients; by default as many as it takes, up to 1,024."""

    all: arguments.Flag = False
    """Print every token or part, not only the largest contributions and the last tokens."""

    json: arguments.ResultFile = None

    compute: DeviceOptions = DeviceOptions()

    def run(self) -> int:
        """Print the contributions, and the prediction after each layer."""
        from manyheads.lens import attribute

        arguments.check_json(self.json)
        text = self._text()
        model = self.compute.open(self.model)
        attribution = attribute(
            model, text, self.target, self.against, method=self.method, steps=self.steps
        )
        _print(self.model, attribution, every_row=self.all)
        arguments.save_result(self.json, attribution)
        return 0

    def _text(self) -> str:
        arguments.check_exclusive("--text and --file", self.text, self.file)
        if self.file is not None:
            return inputs.read_file(self.file).strip("\n")
        arguments.check_not_empty("--text", self.text)
        from manyheads.lens.inputs.synthetic import UNFINISHED_PASSAGE

        return UNFINISHED_PASSAGE if self.text is None else self.text


def _print(name: str, attribution: "Attribution", *, every_row: bool) -> None:
    from manyheads.console import TerminalPage, visible
    from manyheads.lens.attribution.attribute import MAX_ROWS

    page = TerminalPage()
    page.title(name)
    end = visible(attribution.text.replace("\n", " "))
    end = f"…{end[-SHOWN_CHARACTERS:]}" if len(end) > SHOWN_CHARACTERS else end
    page.paragraph(f"After “{end}”: {visible(attribution.summary)}.")
    if not attribution.converged:
        page.paragraph(
            f"Not converged: {attribution.path_steps} steps leave {attribution.completeness:.2g} "
            f"of {attribution.value:.4g} unexplained. Give more --steps.",
            "bold red",
        )
    page.heading("Tokens" if attribution.by_token else "Parts")
    table = attribution.table(None if every_row else MAX_ROWS)
    # The caption is about Python.
    table.caption = None
    page.show(table)
    more = len(attribution.contributions) - table.row_count
    if more:
        page.paragraph(f"and {more} more: --all prints them", style="dim")
    if attribution.steps:
        page.heading("Logit lens")
        page.show(attribution.layer_table())
