"""manyheads prune: a model without the heads, neurons or layers that a text does not need."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.cli.asked import (
    DeviceName,
    Flag,
    JsonFile,
    PartName,
    Picture,
    TextFile,
    check_folder,
    check_json,
    cuts_told,
    first_labelled,
    first_texts,
    open_model,
    pairs_of,
    tells_classes,
    texts_of,
    where,
    write_json,
)
from manyheads.cli.pictured import ImagePlace, first_images, image_folder
from manyheads.errors import InputError
from manyheads.wording import counted

if TYPE_CHECKING:
    from manyheads.surgery.operation import Operation, Wish

__all__ = ["Prune"]

CURVE = "curve.png"
SEEN = (
    "all that is given is measured on, and mending learns from it too: the loss after mending is "
    "of what it has seen; give more, or less to --tokens"
)


@dataclass(frozen=True, slots=True)
class Prune:
    """Take away the heads, neurons or layers that a text does not need; leave a smaller model.

    For example: manyheads prune gpt2/ --file book.txt --keep 0.6 -o gpt2-small/

    As many as cost no more than a budget, mended after: manyheads prune gpt2/ --file book.txt
    --loss-budget 0.01 --mend 200 -o gpt2-small/
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model with a tokenizer, or a model of the hub: org/name."""

    file: TextFile = None
    """Texts to judge by, apart by blank lines, or one a line where there are none.

    For a model that translates, each line is a source, a tab and its target; for one of classes it
    is a file of rows, .jsonl or .parquet, with a text and a label each.
    """

    image: ImagePlace = None
    """For a model that reads images: a folder of them; for one of classes, a folder a class."""

    out: Annotated[
        Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER", help_behavior_hint="")
    ] = None
    """Where the pruned model goes, with its curve; without it nothing is written."""

    what: Literal["heads", "neurons", "layers"] = "heads"
    """Heads, neurons of the feed-forwards, or whole layers."""

    keep: Annotated[float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="")] = None
    """The share of them that stays, such as 0.6."""

    loss_budget: Annotated[float | None, tyro.conf.arg(metavar="NATS", help_behavior_hint="")] = (
        None
    )
    """How much the loss a token may rise; of a model of vectors, how much likeness may be lost."""

    by: Annotated[
        Literal["ablation", "gradient", "redundancy", "l0", "random"] | None,
        tyro.conf.arg(help_behavior_hint=""),
    ] = None
    """What they are ordered by; left out, heads and layers by ablation, neurons by gradient."""

    gate_steps: int = 300
    """Steps of training that close gates, by l0."""

    iterative: Flag = False
    """Measure all that are left anew after each head or layer, or each tenth of the neurons."""

    mean: Flag = False
    """Let what a head says on average stay behind."""

    of: PartName = "attention"
    """Of an encoder-decoder: the decoder's own attention, the encoder's, or across."""

    mend: int = 0
    """Steps of training after cutting, on what of the text was not measured on, or else on all."""

    tokens: int = 20_000
    """How much is measured on; an image has as many tokens as patches, and one more."""

    picture: Picture = None
    """Where the curve is drawn; by default in the folder of the model."""

    json: JsonFile = None
    """Where all numbers go as JSON, whole or not at all."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    seed: int = 0
    """For random orders, masked words, gates and mending."""

    def run(self) -> int:
        """Say what went and why, how large and fast the model is now; 1 where it cannot be had."""
        from rich.console import Console

        from manyheads.cli.prune_page import show
        from manyheads.surgery.operation import operate

        wish = self._wish()
        if self.file is None and self.image is None:
            raise InputError("there is nothing to judge by", "give --file, or --image")
        texts = [] if self.file is None else texts_of(self.file)
        model = open_model(self.model, self.device)
        folder = image_folder(model, self.image, texts=self.file is not None)
        read = self._texts(model, texts) if folder is None else self._images(model, folder)
        (measured, asked), (more, others) = read
        if self.mend and not more:
            print(SEEN, file=sys.stderr)
        with cuts_told():
            done = operate(model, measured, wish, more=more, targets=asked, more_targets=others)
        show(Console(), done, counted(len(measured), "text" if folder is None else "image"))
        if self.json is not None:
            write_json(self.json, done.told())
        if done.model is None:
            print(f"nothing was written: {done.chosen.shortfall}", file=sys.stderr)
            return 1
        self._write(done)
        return 0

    def _texts(self, model: Any, texts: list[str]) -> tuple[Any, Any]:
        """What to measure on and what to mend by, each with the classes where it tells any."""
        from manyheads.encoding.reading import reads_texts
        from manyheads.models.seq2seq import Seq2Seq

        if reads_texts(model).tokenizer is None:
            raise InputError("this model has no tokenizer", "put a tokenizer.json into its folder")
        if tells_classes(model):
            return first_labelled(model, self.file, self.tokens)
        given: list[Any] = pairs_of(texts) if isinstance(model, Seq2Seq) else texts
        measured, more = first_texts(model, given, self.tokens)
        return (measured, None), (more, None)

    def _images(self, model: Any, folder: Path) -> tuple[Any, Any]:
        from manyheads.surgery.mending import Mending

        more = self.mend * Mending().batch_tokens
        return first_images(model, folder, self.tokens, self.seed, more)

    def _wish(self) -> "Wish":
        from manyheads.pictures.png import check_path
        from manyheads.surgery.closing import Closing
        from manyheads.surgery.operation import Wish

        if self.gate_steps < 1:
            raise InputError(f"--gate-steps {self.gate_steps} close nothing", "use 1 or more")
        if self.keep is not None and not 0 <= self.keep <= 1:
            raise InputError(f"--keep {self.keep:g} is no share of the {self.what}", "use 0 to 1")
        check_json(self.json)
        if self.picture is not None:
            check_path(self.picture)
        check_folder(self.out, self.model)
        return Wish(
            what=self.what,
            share=None if self.keep is None else 1 - self.keep,
            budget=self.loss_budget,
            by=self.by,
            iterative=self.iterative,
            keep="mean" if self.mean else "zero",
            **where(self.of),
            closing=Closing(steps=self.gate_steps),
            mend_steps=self.mend,
            seed=self.seed,
        )

    def _write(self, done: "Operation") -> None:
        from manyheads.checkpoints.folder import save
        from manyheads.cli.prune_page import draw

        assert done.model is not None
        if self.out is not None:
            print(save(done.model, self.out))
        picture = self.picture or (None if self.out is None else self.out / CURVE)
        if picture is not None:
            draw(done, picture)
            print(f"the curve is in {picture}")
