"""manyheads recall: what a model recalls from long contexts, and the heads that retrieve it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from manyheads.cli import arguments
from manyheads.cli.options import ComputeOptions
from manyheads.errors import InputError
from manyheads.formatting import listed

if TYPE_CHECKING:
    from manyheads.lens.task_heads.long_context import LongContextRecall

# Heads in the table.
MAX_HEADS = 12


@dataclass(frozen=True, slots=True)
class RecallCommand:
    """Recall hidden statements from texts of 1 to 16 times a base length, and find the heads.

    For example: manyheads recall smollm2 --base 256 --times 1,2,4,8,16 --json recall.json

    A text hides one statement (a needle) or eight (multi-key), and asks for one of them in the end.
    Nothing is downloaded. The heads that read the answers are switched off in a second pass.
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    times: Annotated[str, arguments.metavar("N,N,...")] = "1,2,4,8,16"
    """The lengths, as multiples of the base."""

    base: arguments.OptionalInt = None
    """Tokens of a text of length 1; by default the trained length, or 512 where it is not known."""

    samples: int = 8
    """Texts of each task and length, with the statement at as many depths."""

    no_ablation: arguments.Flag = False
    """Do not switch the retrieval heads off, and as many random heads, in a second pass."""

    seed: int = 0
    """The seed of the texts."""

    json: arguments.ResultFile = None

    compute: ComputeOptions = ComputeOptions()

    def run(self) -> None:
        """Print recall by task and length, and the heads."""
        from manyheads import lens

        arguments.check_json(self.json)
        arguments.check_minimum("--samples", self.samples, 2)
        try:
            times = [float(part) for part in self.times.split(",")]
        except ValueError:
            raise InputError(
                f"--times must be numbers with commas between them, got {self.times!r}",
                "use 1,2,4",
            ) from None
        model = self.compute.open(self.model)
        result = lens.long_context_recall(
            model,
            times,
            base=self.base,
            samples=self.samples,
            ablate=not self.no_ablation,
            seed=self.seed,
        )
        _print(self.model, result)
        arguments.save_result(self.json, result)


def _print(name: str, result: "LongContextRecall") -> None:
    from manyheads.console import TerminalPage

    page, metadata = TerminalPage(), result.metadata
    page.title(name)
    trained = metadata["trained_length"]
    limit = f", and the model was trained on up to {trained:,}" if trained else ""
    page.paragraph(f"1x is {metadata['base']:,} tokens{limit}.")
    if metadata["skipped"]:
        page.paragraph(f"Longer than its positions: {', '.join(metadata['skipped'])}.", "dim")
    page.heading("Recall")
    page.show(result.recall_table())
    page.heading("Retrieval heads")
    if not result.heads:
        page.paragraph("None: no head reads what the model copies.")
        return
    page.paragraph(listed([str(head) for head in result.heads], MAX_HEADS) + ".")
    first = result.names[0]
    table = result.table(by=first, max_rows=MAX_HEADS)
    table.title = table.caption = None
    page.show(table)
