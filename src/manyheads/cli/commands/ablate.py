"""manyheads ablate: what a model loses without each of its heads."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.cli.arguments import (
    DEFAULT,
    DeviceName,
    ImagePlace,
    JsonFile,
    ModelName,
    PartName,
    TextFile,
    Texts,
    check_json,
    cuts_told,
    first_images,
    first_labelled,
    image_folder,
    open_model,
    read_texts,
    tells_classes,
    where,
)
from manyheads.errors import InputError
from manyheads.formatting import without_nan

if TYPE_CHECKING:
    from manyheads.lens.causal.ablation import Ablation, Cumulative
    from manyheads.lens.causal.gradient_importance import Importance


@dataclass(frozen=True, slots=True)
class Ablate:
    """Take away every head in turn and measure what the loss does, with standard errors.

    For example: manyheads ablate gpt2/ --file book.txt --replace-with mean --json ablation.json

    A model that writes is asked for each next word, one that reads for masked words, one of vectors
    how alike its vectors stay, and one of classes for the labels of a file of rows, or of a folder
    of images. Ctrl-C ends the measuring and keeps what was measured.
    """

    model: ModelName = DEFAULT
    """The folder of a model with a tokenizer, a house model, or a model of the hub: org/name."""

    text: Texts = ()
    """A text to read; given several times, each is one."""

    file: TextFile = None
    """Texts to read, apart by blank lines, or one a line where there are none."""

    image: ImagePlace = None
    """For a model that reads images: a folder of them; for one of classes, a folder a class."""

    tokens: int = 2_000
    """How much of a file is read; an image has as many tokens as patches, and one more."""

    heads: Annotated[str, tyro.conf.arg(metavar="L2H7,...", help_behavior_hint="(all)")] = ""
    """The heads to take away."""

    replace_with: Literal["zero", "mean", "resample"] = "zero"
    """What replaces a head: zero, its mean, or its output in another text."""

    greedy: Annotated[int, tyro.conf.arg(metavar="N", help_behavior_hint="")] = 0
    """Also take away so many one after another, each time the one that is missed least."""

    of: PartName = "attention"
    """Of an encoder-decoder: the decoder's own attention, the encoder's, or across."""

    json: JsonFile = None
    """Where everything goes as JSON, whole or not at all; manyheads.lens reads it back."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    seed: int = 0
    """For masked words and for what is put in a head's place."""

    def run(self) -> int:
        """Print the heads by what they are worth; 1 where it was broken off."""
        from manyheads.lens import ablate, ablate_greedily, importance
        from manyheads.surgery.evaluation_inputs import prepare_inputs

        check_json(self.json)
        heads: Any = [name for name in self.heads.split(",") if name.strip()] or "all"
        model = open_model(self.model, self.device)
        self._check(model, heads)
        with cuts_told():
            texts, targets = self._read(model)
            asked = prepare_inputs(model, texts, targets=targets, seed=self.seed)
        shared: dict[str, Any] = {"targets": asked.targets, **where(self.of)}
        ways: dict[str, Any] = {"replace_with": self.replace_with, "seed": self.seed}
        found = ablate(model, asked.given, heads, metric=asked.metric, **ways, **shared)
        estimate = taken = None
        if found.complete and asked.metric == "loss":
            estimate = importance(model, asked.given, **shared)
        if found.complete and self.greedy:
            taken = ablate_greedily(
                model, asked.given, self.greedy, heads, metric=asked.metric, **ways, **shared
            )
        self._tell(_joined(found, estimate, taken), taken)
        return 0 if found.complete and (taken is None or taken.complete) else 1

    def _read(self, model: Any) -> tuple[Any, Any]:
        """What to measure on, and the right classes where it is of any."""
        folder = image_folder(model, self.image, texts=bool(self.text or self.file))
        if folder is not None:
            return first_images(model, folder, self.tokens, self.seed)[0]
        if not tells_classes(model):
            return read_texts(model, self.text, self.file, self.tokens), None
        if self.text:
            raise InputError("--text says no class", "give --file with rows alone")
        return first_labelled(model, self.file, self.tokens)[0]

    def _check(self, model: Any, heads: Any) -> None:
        """Refuse what cannot be before anything is measured."""
        from manyheads.lens.inputs.cached_run import find_heads, part_of

        chosen = find_heads(part_of(model, **where(self.of)), heads)
        if not 0 <= self.greedy <= len(chosen):
            raise InputError(
                f"--greedy {self.greedy} of {len(chosen)} heads", f"use 1 to {len(chosen)}"
            )

    def _tell(self, found: "Ablation", taken: "Cumulative | None") -> None:
        from rich.console import Console

        from manyheads.cli.pages.ablate_page import show

        show(Console(), self.model, found, taken, "text" if self.image is None else "image")
        if self.json is not None:
            found.save(self.json)
            print(f"everything is in {self.json}")
        if not found.complete:
            print("broken off before all was measured", file=sys.stderr)


def _joined(
    found: "Ablation", estimate: "Importance | None", taken: "Cumulative | None"
) -> "Ablation":
    """All of it as one result by head, which can be saved as such."""
    facts = found.facts | {"harmful": [str(head) for head, _ in found.harmful()]}
    means, errors = dict(found.means), dict(found.errors)
    if estimate is not None:
        facts["rank_correlation"] = without_nan(estimate.agreement(found))
        means |= {name: estimate.means[name] for name in ("importance", "predicted")}
        errors |= {name: estimate.errors[name] for name in ("importance", "predicted")}
    if taken is not None:
        steps = without_nan(taken.rows())
        facts["greedy"] = {"baseline": taken.baseline, "complete": taken.complete, "steps": steps}
    return replace(found, means=means, errors=errors, facts=facts)
