"""manyheads compare: two models head by head."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from manyheads.cli import arguments
from manyheads.cli.options import DeviceOptions, TextOrImageOptions

if TYPE_CHECKING:
    from manyheads.lens.diff.comparison import Comparison

TABLE_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare two models head by head: which heads changed, by every statistic, and how.

    For example: manyheads compare gpt2/ gpt2-tuned/ --file book.txt --json changes.json

    The default is to compare house-gpt with house-gpt-gated.
    """

    before: Annotated[
        arguments.PositionalText, arguments.metavar("[BEFORE]", "(default: house-gpt)")
    ] = "house-gpt"
    """The folder of a model with a tokenizer, a bundled model, or a model of the hub: org/name."""

    after: Annotated[
        arguments.PositionalText, arguments.metavar("[AFTER]", "(default: house-gpt-gated)")
    ] = "house-gpt-gated"
    """The same model after fine-tuning, gating or pruning."""

    no_kinds: arguments.Flag = False
    """Do not compare the kinds of the heads."""

    replace_with: Annotated[
        Literal["zero", "mean", "resample"] | None, arguments.metavar("{zero,mean,resample}")
    ] = None
    """Also ablate every head of both models, and replace it with this."""

    json: arguments.ResultFile = None

    input: TextOrImageOptions = TextOrImageOptions()
    compute: DeviceOptions = DeviceOptions()

    def run(self) -> int:
        """Print the heads that changed most; 1 if the measurement was interrupted."""
        from manyheads.lens import compare
        from manyheads.surgery.pruning import origins_in

        arguments.check_json(self.json)
        before, after = map(self.compute.open, (self.before, self.after))
        texts, targets = self.input.load(before)
        comparison = compare(
            before,
            after,
            texts,
            targets=targets,
            origins=origins_in(before, after),
            compare_kinds=not self.no_kinds,
            replace_with=self.replace_with,
        )
        _print(f"{self.before} → {self.after}", comparison)
        arguments.save_result(self.json, comparison)
        return 0 if comparison.metadata["complete"] else 1


def _print(title: str, comparison: "Comparison") -> None:
    from manyheads.console import TerminalPage, visible

    page = TerminalPage(table_width=TABLE_WIDTH)
    page.title(title)
    for line in str(comparison).splitlines():
        page.paragraph(visible(line))
    if not any(shift > 0 for _, shift in comparison.ranked()):
        return
    page.heading("Heads that changed most")
    page.console.print(comparison.table())
    page.paragraph("shift: the change over all measures, relative to how heads differ.", "dim")
