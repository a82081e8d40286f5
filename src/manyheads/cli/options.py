"""Groups of options that several commands contain, with their help and what follows from them."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.cli import arguments, inputs
from manyheads.errors import InputError

if TYPE_CHECKING:
    from manyheads.models.build import Model
    from manyheads.tasks.search.index import Index


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Where to compute."""

    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def open(self, name: str) -> "Model":
        """Load a model onto the device."""
        return inputs.open_model(name, self.device)

    def open_index(self, address: str, model: str | None = None) -> "Index":
        """Open an index, with its own model or another, and put the model onto the device."""
        from manyheads.devices import resolve_device
        from manyheads.tasks.search.index import Index

        device = resolve_device(self.device, "--device")
        index = Index.open(address, model)
        if index.model is not None:
            index.model.to(device)
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions(DeviceOptions):
    """Where to compute, and how."""

    dtype: arguments.DtypeName = "auto"
    """The dtype to compute in; by default that of the weights."""

    weights: arguments.WeightName = None
    """Round the weights to 8 or 4 bits, for the CPU."""

    def open(self, name: str) -> "Model":
        """Load a model onto the device, in the dtype."""
        return inputs.open_model(name, self.device, self.dtype, self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(ComputeOptions):
    """Where to compute, and how."""

    batch_tokens: arguments.OptionalInt = None
    """Tokens per batch; by default as many as suit the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(BatchOptions):
    """Where to compute, and how."""

    engine: Literal["plain", "ray"] = "plain"
    """Work in this process, or on all machines of a Ray cluster."""

    workers: arguments.OptionalInt = None
    """With --engine ray: copies of the model; by default one per GPU, or per CPU."""

    @property
    def ray(self) -> bool:
        return self.engine == "ray"

    def check(self) -> None:
        """Refuse a number of workers that nobody would use."""
        if self.workers is None:
            return
        if not self.ray:
            raise InputError("--workers is for --engine ray", "add --engine ray, or leave it out")
        arguments.check_minimum("--workers", self.workers, 1)

    def open_for_engine(self, name: str) -> "Model":
        """Load a model in the dtype; the workers of a cluster move it to their devices."""
        device = "cpu" if self.ray else self.device
        return inputs.open_model(name, device, self.dtype, self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusEngineOptions(EngineOptions):
    """Where to compute, and how."""

    state: arguments.OptionalFolder = None
    """With --engine ray: a folder for finished batches, from which the same command goes on."""

    def check(self) -> None:
        EngineOptions.check(self)
        if self.state is not None and not self.ray:
            raise InputError("--state is for --engine ray", "add --engine ray, or leave it out")

    @property
    def ray_options(self) -> dict[str, Any]:
        """The arguments of the functions that run on Ray."""
        return {"workers": self.workers, "device": self.device, "state": self.state}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What to read; by default a few short articles, or random tokens without a tokenizer."""

    text: arguments.ManyTexts = ()
    """A text to read."""

    file: arguments.TextFile = None
    """A file of texts separated by blank lines, or one text per line without any."""

    ids: arguments.ManyIds = ()
    """Token ids to read instead of a text; a model without a tokenizer needs them."""

    tokens: int = 5_000
    """How many tokens of the file to read; an image has one per patch, and one more."""

    @property
    def has_texts(self) -> bool:
        return bool(self.text or self.file or self.ids)

    def load_texts(self, model: "Model") -> Any:
        """The texts or ids, the first tokens of the file, or texts that come with manyheads.

        For an encoder-decoder each line is a source, a tab and its target.
        """
        from manyheads.lens.inputs.synthetic import default_texts
        from manyheads.models.seq2seq import Seq2Seq

        arguments.check_exclusive("--text, --file and --ids", self.text, self.file, self.ids)
        if self.ids:
            return inputs.read_ids(self.ids, pairs=isinstance(model, Seq2Seq))
        texts: list[Any] = list(self.text)
        if self.file is not None:
            texts = inputs.read_texts(self.file)
        if not texts:
            return default_texts(model)
        inputs.check_tokenizer(model)
        for text in texts:
            arguments.check_not_empty("--text", text)
        if isinstance(model, Seq2Seq):
            texts = inputs.split_pairs(texts)
        return inputs.split_texts(model, texts, sys.maxsize if self.text else self.tokens)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOrImageOptions(TextOptions):
    """What to read; by default a few short articles, or random tokens without a tokenizer."""

    image: arguments.ImageFolder = None

    def load(self, model: "Model", seed: int = 0) -> inputs.ClassInputs:
        """The texts, or a sample of the images with their classes if there are any."""
        folder = inputs.image_source(model, self.image, texts=self.has_texts)
        if folder is None:
            return inputs.ClassInputs(self.load_texts(model), None)
        return inputs.sample_images(model, folder, self.tokens, seed)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTextOptions:
    """What to read."""

    text: arguments.ManyTexts = ()
    """A text to read."""

    file: arguments.LineFiles = ()
    """A file of texts separated by blank lines, or one per line without any; - is the standard
    input."""

    def texts(self) -> list[str]:
        """The texts, or those of the files."""
        return list(self.text) or inputs.read_texts(*self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedTextOptions:
    """Texts whose syntax or coreference is known, to find heads that follow it."""

    syntax: arguments.TextFile = None
    """A treebank in CoNLL-U, to find syntactic heads with."""

    coreference: arguments.LineFiles = ()
    """Two files of counterbalanced text with mentions and pronouns in brackets, as of WinoBias."""
