"""manyheads attribute: why a model goes on with a word."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from manyheads.cli.arguments import (
    DEFAULT,
    DeviceName,
    Flag,
    JsonFile,
    ModelName,
    TextFile,
    check_json,
    cuts_told,
    open_model,
    read_file,
)
from manyheads.errors import InputError

Word = Annotated[str | None, tyro.conf.arg(metavar="WORD", help_behavior_hint="")]


@dataclass(frozen=True, slots=True)
class Attribute:
    """Trace the next word after a text to the heads, layers or tokens that speak for it.

    For example: manyheads attribute gpt2/ --text "The capital of France is" --target Paris
    """

    model: ModelName = DEFAULT
    """The folder of a model with a tokenizer, a house model, or a model of the hub: org/name."""

    text: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """The text to go on from; without it the beginning of an article of our own."""

    file: TextFile = None
    """The text to go on from, all of a file; for a model that translates, with a tab in it."""

    target: Word = None
    """The word to trace, one token; by default the likeliest."""

    against: Word = None
    """A word whose logit is taken off, as in --target his --against her."""

    method: Literal["direct", "integrated", "heads", "rollout"] = "direct"
    """Direct logit attribution, integrated gradients by token or by head, or attention rollout."""

    steps: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """In how many steps gradients are integrated; by default in as many as it takes, up to 512."""

    all: Flag = False
    """Show every token or part, and not those alone that add most and the last tokens."""

    json: JsonFile = None
    """Where everything goes as JSON, whole or not at all."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    def run(self) -> int:
        """Print what speaks for the word, and what the model would say after each layer."""
        from rich.console import Console

        from manyheads.cli.pages.attribute_page import show
        from manyheads.lens import attribute

        check_json(self.json)
        text = self._text()
        model = open_model(self.model, self.device)
        with cuts_told():
            found = attribute(
                model, text, self.target, self.against, method=self.method, steps=self.steps
            )
        show(Console(), self.model, found, whole=self.all)
        if self.json is not None:
            found.save(self.json)
            print(f"everything is in {self.json}")
        return 0

    def _text(self) -> str:
        if self.text is not None and self.file is not None:
            raise InputError("the text comes from --text or from --file", "give one of both")
        if self.text is not None and not self.text.strip():
            raise InputError("the text is empty", "give some words")
        if self.file is not None:
            return read_file(self.file).strip("\n")
        from manyheads.lens.inputs.synthetic import BEGUN

        return BEGUN if self.text is None else self.text
