"""manyheads prune: a model without the heads, neurons or layers that a text does not need."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.cli.arguments import (
    DeviceName,
    Flag,
    ImagePlace,
    JsonFile,
    PartName,
    Picture,
    TextFile,
    check_folder,
    check_json,
    cuts_told,
    first_images,
    first_labelled,
    first_texts,
    image_folder,
    open_model,
    pairs_of,
    tells_classes,
    texts_of,
    where,
    write_json,
)
from manyheads.errors import InputError
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    from manyheads.surgery.pipeline import PruningConfig, PruningResult

CURVE = "curve.png"
SEEN = (
    "all texts are used for measuring, and recovery trains on them too: the loss after recovery is "
    "on seen texts; give more texts, or a smaller --tokens"
)


@dataclass(frozen=True, slots=True)
class Prune:
    """Remove the heads, neurons or layers that a text does not need.

    For example: manyheads prune gpt2/ --file book.txt --fraction 0.4 -o gpt2-small/

    As many as fit a budget, then recover: manyheads prune gpt2/ --file book.txt
    --loss-budget 0.01 --recover 200 -o gpt2-small/
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model with a tokenizer, or a model of the hub: org/name."""

    file: TextFile = None
    """Texts to evaluate on, separated by blank lines, or one per line without any.

    For an encoder-decoder, each line is a source, a tab and its target; for a classifier it is a
    file of rows, .jsonl or .parquet, with a text and a label each.
    """

    image: ImagePlace = None
    """For a vision model: a folder of images; for a classifier, one folder per class."""

    out: Annotated[
        Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER", help_behavior_hint="")
    ] = None
    """Where to save the pruned model and its curve; without it nothing is written."""

    what: Literal["heads", "neurons", "layers"] = "heads"
    """Heads, neurons of the feed-forwards, or whole layers."""

    fraction: Annotated[float | None, tyro.conf.arg(metavar="FRACTION", help_behavior_hint="")] = (
        None
    )
    """The fraction of them to remove, such as 0.4."""

    loss_budget: Annotated[float | None, tyro.conf.arg(metavar="NATS", help_behavior_hint="")] = (
        None
    )
    """How much the loss per token may rise, or the similarity of an embedding model may drop."""

    by: Annotated[
        Literal["ablation", "gradient", "redundancy", "l0", "random"] | None,
        tyro.conf.arg(help_behavior_hint=""),
    ] = None
    """What orders them; by default ablation for heads and layers, gradient for neurons."""

    gate_steps: int = 300
    """Training steps of the gates of l0."""

    iterative: Flag = False
    """Measure those that are left again after each head or layer, or each tenth of the neurons."""

    replace_with: Literal["zero", "mean"] = "zero"
    """What replaces a head: zero, or its mean output."""

    of: PartName = "attention"
    """Of an encoder-decoder: the decoder's self-attention, the encoder's, or cross-attention."""

    recover: int = 0
    """Training steps after pruning, on the texts not used for measuring, or on all without any."""

    tokens: int = 20_000
    """How many tokens to measure on; an image has one per patch, and one more."""

    picture: Picture = None
    """Where to draw the curve; by default in the folder of the model."""

    json: JsonFile = None
    """Write all numbers to this JSON file."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    seed: int = 0
    """Seed of random orders, masked tokens, gates and recovery."""

    def run(self) -> int:
        """Print what was removed and why, and size and speed; 1 where the request is not met."""
        from rich.console import Console

        from manyheads.cli.pages.prune_page import show
        from manyheads.surgery.pipeline import run_pruning

        config = self._config()
        if self.file is None and self.image is None:
            raise InputError("there is nothing to evaluate on", "give --file, or --image")
        texts = [] if self.file is None else texts_of(self.file)
        model = open_model(self.model, self.device)
        folder = image_folder(model, self.image, texts=self.file is not None)
        read = self._texts(model, texts) if folder is None else self._images(model, folder)
        (measured, asked), (more, others) = read
        if self.recover and not more:
            print(SEEN, file=sys.stderr)
        with cuts_told():
            done = run_pruning(
                model, measured, config, more=more, targets=asked, more_targets=others
            )
        show(Console(), done, pluralise(len(measured), "text" if folder is None else "image"))
        if self.json is not None:
            write_json(self.json, done.to_dict())
        if done.model is None:
            print(f"nothing was written: {done.selection.shortfall}", file=sys.stderr)
            return 1
        self._write(done)
        return 0

    def _texts(self, model: Any, texts: list[str]) -> tuple[Any, Any]:
        """The texts to measure and to recover on, each with the classes where there are any."""
        from manyheads.encoding.text_reader import require_text_model
        from manyheads.models.seq2seq import Seq2Seq

        if require_text_model(model).tokenizer is None:
            raise InputError("this model has no tokenizer", "put a tokenizer.json into its folder")
        if tells_classes(model):
            return first_labelled(model, self.file, self.tokens)
        given: list[Any] = pairs_of(texts) if isinstance(model, Seq2Seq) else texts
        measured, more = first_texts(model, given, self.tokens)
        return (measured, None), (more, None)

    def _images(self, model: Any, folder: Path) -> tuple[Any, Any]:
        from manyheads.surgery.finetune.loop import RecoveryConfig

        more = self.recover * RecoveryConfig().batch_tokens
        return first_images(model, folder, self.tokens, self.seed, more)

    def _config(self) -> "PruningConfig":
        from manyheads.pictures import check_image_path
        from manyheads.surgery.pipeline import PruningConfig
        from manyheads.surgery.selection.l0_selection import L0Config

        if self.gate_steps < 1:
            raise InputError(
                f"--gate-steps must be at least 1, got {self.gate_steps}", "use 1 or more"
            )
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise InputError(f"--fraction must be in [0, 1], got {self.fraction:g}", "use 0 to 1")
        if self.recover < 0:
            raise InputError(f"--recover must be at least 0, got {self.recover}", "use 0 or more")
        check_json(self.json)
        if self.picture is not None:
            check_image_path(self.picture)
        check_folder(self.out, self.model)
        return PruningConfig(
            unit=self.what,
            fraction=self.fraction,
            budget=self.loss_budget,
            by=self.by,
            iterative=self.iterative,
            replace_with=self.replace_with,
            **where(self.of),
            l0=L0Config(steps=self.gate_steps),
            recovery_steps=self.recover,
            seed=self.seed,
        )

    def _write(self, done: "PruningResult") -> None:
        from manyheads.checkpoints.folder import save
        from manyheads.cli.pages.prune_page import draw

        assert done.model is not None
        if self.out is not None:
            print(save(done.model, self.out))
        picture = self.picture or (None if self.out is None else self.out / CURVE)
        if picture is not None:
            draw(done, picture)
            print(f"the curve is in {picture}")
