"""manyheads inspect: what every head of a model does."""

from dataclasses import dataclass

from manyheads.cli.asked import (
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

__all__ = ["Inspect"]

# Tokens of a batch where they take long, so that the bar moves and Ctrl-C loses little.
SMALL = 1024


@dataclass(frozen=True, slots=True)
class Inspect:
    """Look at every head: what it looks at, what kind it is, sinks, the dead and the doubled.

    For example: manyheads inspect gpt2/ --file book.txt --json gpt2.json

    Without a model house-gpt is looked at, and without a text a few short articles are read.
    Ctrl-C ends the measuring and keeps what was measured.
    """

    model: ModelName = DEFAULT
    """The folder of a model with a tokenizer, a house model, or a model of the hub: org/name."""

    text: Texts = ()
    """A text to read; given several times, each is one."""

    file: TextFile = None
    """Texts to read, apart by blank lines, or one a line where there are none."""

    tokens: int = 5_000
    """How much of a file is read."""

    json: JsonFile = None
    """Where everything goes as JSON, whole or not at all; manyheads.lens reads it back."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    seed: int = 0
    """For the random texts that kinds are told by."""

    def run(self) -> int:
        """Print the page, and write the file where one is asked for; 1 where it was broken off."""
        from rich.console import Console

        from manyheads.cli.inspect_page import show
        from manyheads.lens import inspect

        check_json(self.json)
        model = open_model(self.model, self.device)
        with cuts_told():
            given = bool(self.text) or self.file is not None
            texts = read_texts(model, self.text, self.file, self.tokens) if given else None
            small = SMALL if next(model.parameters()).device.type == "cpu" else None
            found = inspect(model, texts, seed=self.seed, batch_tokens=small)
        show(Console(), self.model, found, model.tokenizer)
        if self.json is not None:
            found.save(self.json)
            print(f"everything is in {self.json}")
        return 0 if found.complete else 1
