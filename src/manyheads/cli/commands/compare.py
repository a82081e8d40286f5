"""manyheads compare: two models head by head."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.cli.arguments import (
    DeviceName,
    Flag,
    ImageDirectory,
    JsonFile,
    ManyIds,
    ManyTexts,
    TextFile,
    check_json,
    image_source,
    load_texts,
    open_model,
    sample_images,
)

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
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[BEFORE]", help_behavior_hint="(default: house-gpt)"),
    ] = "house-gpt"
    """The folder of a model with a tokenizer, a bundled model, or a model of the hub: org/name."""

    after: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[AFTER]", help_behavior_hint="(default: house-gpt-gated)"),
    ] = "house-gpt-gated"
    """The same model after fine-tuning, gating or pruning."""

    text: ManyTexts = ()
    """A text to read."""

    file: TextFile = None
    """A file of texts separated by blank lines, or one text per line without any."""

    ids: ManyIds = ()
    """Token ids to read instead of a text; a model without a tokenizer needs them."""

    image: ImageDirectory = None
    """For vision models: a folder of images; for classifiers, one folder per class."""

    tokens: int = 5_000
    """How many tokens of the file to read; an image has one per patch, and one more."""

    no_kinds: Flag = False
    """Do not compare the kinds of the heads."""

    replace_with: Annotated[
        Literal["zero", "mean", "resample"] | None,
        tyro.conf.arg(metavar="{zero,mean,resample}", help_behavior_hint=""),
    ] = None
    """Also ablate every head of both models, and replace it with this."""

    json: JsonFile = None
    """A JSON file to save everything to; manyheads.lens reads it back."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Print the heads that changed most; 1 if the measurement was interrupted."""
        from manyheads.lens import compare
        from manyheads.surgery.pruning import origins_in

        check_json(self.json)
        before, after = (open_model(name, self.device) for name in (self.before, self.after))
        texts, targets = self._inputs(before)
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
        if self.json is not None:
            comparison.save(self.json)
            print(f"saved everything to {self.json}")
        return 0 if comparison.metadata["complete"] else 1

    def _inputs(self, model: Any) -> tuple[Any, Any]:
        """What both models read, and the classes of images if they have any."""
        folder = image_source(model, self.image, texts=bool(self.text or self.file or self.ids))
        if folder is not None:
            return sample_images(model, folder, self.tokens, seed=0)[0]
        return load_texts(model, self.text, self.file, self.tokens, self.ids), None


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
