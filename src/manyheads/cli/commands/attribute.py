"""manyheads attribute: which heads, layers or tokens a prediction comes from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from manyheads.cli.arguments import (
    DEFAULT_MODEL,
    DeviceName,
    Flag,
    JsonFile,
    OneText,
    OptionalModel,
    TextFile,
    check_json,
    open_model,
    read_file,
)
from manyheads.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from manyheads.lens.attribution.attribute import Attribution

Word = Annotated[str | None, tyro.conf.arg(metavar="WORD", help_behavior_hint="")]

# How many characters of the end of a text are printed.
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Attribute:
    """Attribute the next word after a text to the heads, layers or tokens that it comes from.

    For example: manyheads attribute gpt2/ --text "The capital of France is" --target Paris
    """

    model: OptionalModel = DEFAULT_MODEL
    """The folder of a model with a tokenizer, a bundled model, or a model of the hub: org/name."""

    text: OneText = None
    """The text to continue; by default the beginning of an article that comes with manyheads."""

    file: TextFile = None
    """A file with the text to continue; for an encoder-decoder, source and target with a tab."""

    target: Word = None
    """The next word, which must be one token; by default the most likely one."""

    against: Word = None
    """A word whose logit is subtracted, as in --target his --against her."""

    method: Literal["direct", "integrated", "heads", "rollout"] = "direct"
    """Direct logit attribution, integrated gradients by token or by head, or attention rollout."""

    steps: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Steps of integrated gradients; by default as many as it takes, up to 512."""

    all: Flag = False
    """Print every token or part, not only the largest contributions and the last tokens."""

    json: JsonFile = None
    """A JSON file to save everything to."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Print the contributions, and the prediction after each layer."""
        from manyheads.lens import attribute

        check_json(self.json)
        text = self._text()
        model = open_model(self.model, self.device)
        attribution = attribute(
            model, text, self.target, self.against, method=self.method, steps=self.steps
        )
        _print(self.model, attribution, every_row=self.all)
        if self.json is not None:
            attribution.save(self.json)
            print(f"saved everything to {self.json}")
        return 0

    def _text(self) -> str:
        if self.text is not None and self.file is not None:
            raise InputError("--text and --file exclude each other", "give one of them")
        if self.text is not None and not self.text.strip():
            raise InputError(f"--text {self.text!r} is empty", "give at least one word")
        if self.file is not None:
            return read_file(self.file).strip("\n")
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
        page.show(_logit_lens(attribution))


def _logit_lens(attribution: "Attribution") -> "Table":
    from rich.table import Table
    from rich.text import Text

    from manyheads.console import visible

    table = Table("after", "prediction", box=None, pad_edge=False)
    for column in ("probability", f"of {visible(repr(attribution.target))}", "its rank"):
        table.add_column(column, justify="right")
    for step in attribution.steps:
        table.add_row(
            "embeddings" if step.layer < 0 else f"layer {step.layer}",
            Text(visible(repr(step.prediction))),
            f"{step.probability:.3f}",
            f"{step.answer:.3f}",
            str(step.rank + 1),
        )
    return table
