"""manyheads inspect: what every head of a model does."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyheads.cli.arguments import (
    DEFAULT_MODEL,
    DeviceName,
    ImageFiles,
    JsonFile,
    LineFiles,
    ManyIds,
    ManyTexts,
    OptionalModel,
    TextFile,
    check_json,
    check_minimum,
    load_images,
    load_texts,
    open_model,
)
from manyheads.errors import InputError
from manyheads.formatting import percent, pluralise

if TYPE_CHECKING:
    from manyheads.console import TerminalPage
    from manyheads.lens.inspection import Inspection
    from manyheads.lens.measure.watcher import Activation

# Tokens per batch on a CPU: the progress bar moves often and Ctrl-C loses little.
CPU_BATCH_TOKENS = 1024
MAX_SINKS = 10
TABLE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Inspect:
    """Inspect every head: statistics, kinds, sinks, dead and duplicate heads.

    For example: manyheads inspect gpt2/ --file book.txt --json gpt2.json

    The default model is house-gpt, the default text a few short articles, or random tokens for a
    model without a tokenizer. Ctrl-C ends the measurement and keeps what was measured.
    """

    model: OptionalModel = DEFAULT_MODEL
    """The folder of a model, a bundled model, or a model of the hub: org/name."""

    text: ManyTexts = ()
    """A text to read."""

    file: TextFile = None
    """A file of texts separated by blank lines, or one text per line without any."""

    ids: ManyIds = ()
    """Token ids to read instead of a text; a model without a tokenizer needs them."""

    image: ImageFiles = ()
    """Images to read, or folders of them, for a vision model; by default random images."""

    tokens: int = 5_000
    """How many tokens of the file to read; an image has one per patch, and one more."""

    syntax: TextFile = None
    """A treebank in CoNLL-U, to find syntactic heads with."""

    coreference: LineFiles = ()
    """Two files of counterbalanced text with mentions and pronouns in brackets, as of WinoBias."""

    json: JsonFile = None
    """A JSON file to save everything to; manyheads.lens reads it back."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    seed: int = 0
    """The seed of the random texts that head kinds are tested on."""

    def run(self) -> int:
        """Print the page and save the file, if any; 1 if the measurement was interrupted."""
        from manyheads.lens import inspect

        check_json(self.json)
        check_minimum("--tokens", self.tokens, 1)
        model = open_model(self.model, self.device)
        texts = self._inputs(model)
        batch_tokens = _batch_tokens(model)
        inspection = inspect(
            model,
            texts,
            syntax=self.syntax,
            coreference=self.coreference or None,
            seed=self.seed,
            batch_tokens=batch_tokens,
        )
        _print(self.model, inspection, model.tokenizer)
        if self.json is not None:
            inspection.save(self.json)
            print(f"saved everything to {self.json}")
        return 0 if inspection.complete else 1

    def _inputs(self, model: Any) -> Any:
        """What to read; None for the defaults."""
        texts = bool(self.text or self.ids or self.file)
        if self.image and texts:
            raise InputError("--image excludes --text, --file and --ids", "give one of them")
        if self.image:
            return load_images(model, self.image, self.tokens)
        if not texts:
            return None
        return load_texts(model, self.text, self.file, self.tokens, self.ids)


def _batch_tokens(model: Any) -> int | None:
    from manyheads.lens.inputs.texts import default_batch_tokens

    if next(model.parameters()).device.type != "cpu":
        return None
    return min(CPU_BATCH_TOKENS, default_batch_tokens(model))


def _print(name: str, inspection: "Inspection", tokenizer: Any) -> None:
    from manyheads.console import TerminalPage

    page = TerminalPage(table_width=TABLE_WIDTH)
    page.title(name)
    metadata = inspection.statistics.metadata
    vision = inspection.model.type == "Vision"
    own = " that come with manyheads" if tokenizer is not None else " of random tokens"
    own = own if inspection.metadata["default_texts"] and not vision else ""
    noun = "image" if vision else "text"
    if vision and inspection.metadata["default_texts"]:
        noun = "random image"
    page.paragraph(
        f"{inspection.model} Measured on {pluralise(metadata['texts'], noun)}{own}, "
        f"{pluralise(metadata['tokens'], 'patch' if vision else 'token')}."
    )
    if inspection.kinds is not None:
        page.paragraph(str(inspection.kinds).splitlines()[0].capitalize() + ".")
        one_half = inspection.kinds.missing.get("coreference", "")
        if "coreference" in inspection.kinds.scores and one_half:
            page.paragraph(f"No coreference labels: {one_half}.")
    page.heading("Heads")
    page.console.print(inspection.table(max_rows=None))
    page.heading("Sinks and largest activations")
    _sinks(page, inspection)
    for each in inspection.activations:
        page.paragraph(_activation(each, tokenizer))
    page.heading("Dead heads")
    for line in str(inspection.dead).splitlines():
        page.paragraph(line)
    page.paragraph(
        "Judged by entropy and norm; manyheads ablate measures the loss without each head.", "dim"
    )
    page.heading("Duplicate heads")
    _duplicates(page, inspection)
    if not inspection.complete:
        page.paragraph("Interrupted: what is missing was not measured.", "bold red")


def _sinks(page: "TerminalPage", inspection: "Inspection") -> None:
    above = inspection.statistics.metadata["sink_above"]
    sinks = inspection.sinks
    if not sinks:
        page.paragraph(
            f"No head puts more than {percent(above)} of its weight on the first token of a text."
        )
        return
    heads = ", ".join(f"{head} {percent(weight)}" for head, weight in sinks[:MAX_SINKS])
    more = f" and {len(sinks) - MAX_SINKS} more" if len(sinks) > MAX_SINKS else ""
    page.paragraph(
        f"Heads with more than {percent(above)} of the weight on the first token of some text, "
        f"with their mean over all texts: {heads}{more}."
    )


def _activation(each: "Activation", tokenizer: Any) -> str:
    from manyheads.console import visible

    stack = "" if each.stack == "main" else f"{each.stack} "
    token = ""
    if each.token is not None and tokenizer is not None:
        token = f" ({visible(repr(tokenizer.decode([each.token], skip_special_tokens=False)))})"
    massive = ", massive" if each.massive else ""
    return (
        f"after {stack}layer {each.layer}: {each.largest:.1f} in channel {each.channel} at "
        f"position {each.position}{token} of text {each.text}, median {each.median:.2g}{massive}"
    )


def _duplicates(page: "TerminalPage", inspection: "Inspection") -> None:
    if not inspection.redundancy:
        page.paragraph("Not measured.")
    for each in inspection.redundancy:
        for line in str(each).splitlines():
            page.paragraph(line)
