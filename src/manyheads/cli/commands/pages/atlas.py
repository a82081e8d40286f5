"""manyheads atlas: a page with every head of a model over a whole corpus."""

import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.cli import arguments, inputs
from manyheads.cli.commands.report import name_of_model
from manyheads.cli.options import BatchOptions
from manyheads.errors import InputError
from manyheads.formatting import pluralise
from manyheads.progress import MeasuredStream

if TYPE_CHECKING:
    from manyheads.lens.corpus.atlas import Atlas
    from manyheads.models.build import Model
    from manyheads.report.atlas_folder import AtlasFiles

# A text is read up to this many characters per token of a passage: enough to fill one, while a
# file without line breaks is never in memory as a whole.
CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class AtlasCommand:
    """Look at every head of a model over a whole corpus, and write a page to find heads in.

    For example: manyheads atlas gpt2/ --corpus books/ -o atlas/
    then open atlas/index.html. The same command continues after an interruption.
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    corpus: Annotated[
        tuple[Path, ...], arguments.metavar("FILE ...", "(articles of manyheads)")
    ] = ()
    """Files or folders of texts: .txt with texts separated by blank lines, or one per line without
    any, .jsonl and .parquet, compressed or not; source, tab and target for an encoder-decoder."""

    out: arguments.OutFolder = Path("atlas")
    """The folder to write; its index.html opens from disk or from any web server."""

    text_column: Annotated[str, tyro.conf.arg(metavar="COLUMN")] = "text"
    """The column of .jsonl and .parquet files with the text."""

    image: arguments.ImageFolder = None

    max_length: int = 512
    """Tokens per passage; longer texts are read in several."""

    sharpest: int = 10
    """How many of the sharpest examples of each head to store."""

    per_tenth: int = 2
    """How many examples of each tenth of all passages to store for each head."""

    by: Literal["gradient", "ablation", "none"] = "gradient"
    """How to measure the importance of a head: by gradients, or exactly by ablation."""

    headvis: arguments.OptionalFolder = None
    """A folder to write the files of HeadVis to, for its viewers."""

    from_headvis: arguments.OptionalFolder = None
    """Make the page from a folder of HeadVis, without a model."""

    join: Annotated[tuple[Path, ...], arguments.metavar("FOLDER ...", "(none)")] = ()
    """Make one page from the folders of several atlases, such as steps of a training run."""

    compute: BatchOptions = BatchOptions()

    def run(self) -> int:
        """Write the folder and print where it is; 1 if the corpus was not read to its end."""
        from manyheads.report.atlas_folder import STATE, check_atlas_folder, write_atlas
        from manyheads.report.headvis import read_headvis

        check_atlas_folder(self.out)
        arguments.check_exclusive(
            "--corpus, --image, --from-headvis and --join",
            *(self.corpus, self.image, self.from_headvis, self.join),
        )
        files: AtlasFiles | list[AtlasFiles]
        complete = True
        if self.from_headvis is not None:
            files = read_headvis(self.from_headvis)
        elif self.join:
            files = self._joined()
        else:
            files, complete = self._measure(self.out / STATE)
        size = write_atlas(files, self.out)
        print(f"saved the atlas to {self.out} ({size / 1e6:.1f} MB): open {self.out}/index.html")
        if not complete:
            print("interrupted: run the same command again to continue", file=sys.stderr)
            return 1
        (self.out / STATE).unlink(missing_ok=True)
        return 0

    def _joined(self) -> "list[AtlasFiles]":
        """The atlases of --join; those of one name are named after their folders."""
        from manyheads.report.atlas_folder import read_atlas

        folders = [(folder, atlas) for folder in self.join for atlas in read_atlas(folder)]
        names = Counter(atlas.index["name"] for _, atlas in folders)
        return [
            atlas
            if names[atlas.index["name"]] == 1
            else replace(atlas, index=atlas.index | {"name": folder.resolve().name})
            for folder, atlas in folders
        ]

    def _measure(self, state: Path) -> "tuple[AtlasFiles, bool]":
        from manyheads.report.atlas_folder import atlas_files
        from manyheads.report.headvis import write_headvis

        arguments.check_minimum("--max-length", self.max_length, 2)
        arguments.check_minimum("--sharpest", self.sharpest, 1)
        arguments.check_minimum("--per-tenth", self.per_tenth, 1)
        arguments.check_out_folder(self.headvis, flag="--headvis")
        texts = self._texts()

        from manyheads.lens import atlas

        model = self.compute.open(self.model)
        state.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        result = atlas(
            model,
            self._inputs(model, texts),
            max_length=self.max_length,
            by=self.by,
            sharpest=self.sharpest,
            per_decile=self.per_tenth,
            state=state,
            batch_tokens=self.compute.batch_tokens,
            on_progress=lambda step: print(step, file=sys.stderr, flush=True),
        )
        name = name_of_model(self.model)
        self._print(result, time.monotonic() - started)
        if self.headvis is not None:
            write_headvis(result, self.headvis, model=name, corpus=self._corpus_name)
            print(f"saved the files of HeadVis to {self.headvis}")
        origin = f"Made on {time.strftime('%d %B %Y')}."
        files = atlas_files(result, name=name, corpus=self._corpus_name, origin=origin)
        return files, result.complete

    def _texts(self) -> MeasuredStream[str] | None:
        """The texts of --corpus; a missing file is reported before a model is loaded."""
        if not self.corpus:
            return None
        length = self.max_length * CHARACTERS_PER_TOKEN
        return inputs.stream_texts(self.corpus, self.text_column, max_characters=length)

    def _inputs(self, model: "Model", texts: MeasuredStream[str] | None) -> Any:
        from manyheads.data.images import find_images, read_image
        from manyheads.lens.inputs.synthetic import default_texts
        from manyheads.models.vision import Vision

        if self.image is not None:
            if not isinstance(model, Vision):
                raise InputError("--image needs a vision model", "give --corpus instead")
            return MeasuredStream.over(find_images(self.image), partial(read_image, model))
        if texts is None:
            return default_texts(model)
        inputs.check_tokenizer(model)
        if model.reads_pairs:
            pairs = (pair for text in texts for pair in inputs.split_pairs([text]))
            return MeasuredStream(pairs, texts.fraction)
        return texts

    @property
    def _corpus_name(self) -> str:
        if self.image is not None:
            return self.image.name
        if not self.corpus:
            return "articles that come with manyheads"
        return self.corpus[0].name if len(self.corpus) == 1 else f"{len(self.corpus)} files"

    def _print(self, result: "Atlas", seconds: float) -> None:
        for line in str(result).splitlines():
            print(line)
        tokens = pluralise(result.metadata["tokens"], "token")
        print(f"read {tokens} of {self._corpus_name} in {seconds:.0f} s")
