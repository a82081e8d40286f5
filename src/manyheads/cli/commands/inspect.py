"""manyheads inspect: what every head of a model does."""

from dataclasses import dataclass

from manyheads.cli.arguments import (
    DEFAULT,
    DeviceName,
    JsonFile,
    ModelName,
    TextFile,
    Texts,
    check_json,
    cuts_told,
    open_model,
    read_texts,
)

# Tokens per batch on a CPU: the progress bar moves often and Ctrl-C loses little.
SMALL = 1024


@dataclass(frozen=True, slots=True)
class Inspect:
    """Inspect every head: statistics, kinds, sinks, dead and duplicate heads.

    For example: manyheads inspect gpt2/ --file book.txt --json gpt2.json

    The default model is house-gpt, the default text a few short articles. Ctrl-C ends the
    measurement and keeps what was measured.
    """

    model: ModelName = DEFAULT
    """The folder of a model with a tokenizer, a house model, or a model of the hub: org/name."""

    text: Texts = ()
    """A text to read; repeat the option for several texts."""

    file: TextFile = None
    """A file of texts separated by blank lines, or one text per line without any."""

    tokens: int = 5_000
    """How many tokens of the file to read."""

    json: JsonFile = None
    """A JSON file to save everything to; manyheads.lens reads it back."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    seed: int = 0
    """The seed of the random texts that decide the kinds."""

    def run(self) -> int:
        """Print the page and save the file, if any; 1 if the measurement was interrupted."""
        from rich.console import Console

        from manyheads.cli.pages.inspect_page import show
        from manyheads.lens import inspect

        check_json(self.json)
        model = open_model(self.model, self.device)
        with cuts_told():
            given = bool(self.text) or self.file is not None
            texts = read_texts(model, self.text, self.file, self.tokens) if given else None
            small = SMALL if next(model.parameters()).device.type == "cpu" else None
            inspection = inspect(model, texts, seed=self.seed, batch_tokens=small)
        show(Console(), self.model, inspection, model.tokenizer)
        if self.json is not None:
            inspection.save(self.json)
            print(f"saved everything to {self.json}")
        return 0 if inspection.complete else 1
