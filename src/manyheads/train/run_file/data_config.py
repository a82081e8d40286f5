"""The data section of a run file: which data, how texts are cut, the size of a batch."""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from manyheads.annotations import NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.data import labeled, tag_schemes, tokenizer_training
from manyheads.data.chunks import Chunks, DocumentChunks, FixedChunks, MixedChunks
from manyheads.data.images import ImageArrays, ImageFolder, PerChannel, load_idx, load_npz
from manyheads.data.sources import conll, texts
from manyheads.data.sources.rows import HUB, RowSource, row_source
from manyheads.data.store import TokenStore
from manyheads.data.tokenize import store_mismatch, write_store
from manyheads.errors import ConfigError, InputError
from manyheads.progress import interruptible
from manyheads.train.optim.schedules import BatchGrowth
from manyheads.train.run_file.data_sources import (
    HeldOut,
    HeldOutFiles,
    Paths,
    PhaseData,
    ValidationSet,
    WeightedSource,
    validation_paths,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """The size of a step: `batch` tokens (or images), at most `micro_batch` of them at a time.

    A batch may grow. With 0 a batch is one micro-batch. Gradients of micro-batches are summed, so
    `micro_batch` changes memory and speed only.
    """

    batch: PositiveInt | BatchGrowth
    micro_batch: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if isinstance(self.batch, BatchGrowth) and not self.micro_batch:
            raise ConfigError("a batch that grows needs micro_batch", "set micro_batch")
        for size in self.sizes:
            if size % self.micro_batch_size:
                raise ConfigError(
                    f"batch={size} is not a multiple of micro_batch={self.micro_batch_size}",
                    f"use a batch of {-(-size // self.micro_batch_size) * self.micro_batch_size}",
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes of the batch during the phase."""
        if isinstance(self.batch, BatchGrowth):
            return (*self.batch.sizes, self.batch.last)
        return (self.batch,)

    @property
    def micro_batch_size(self) -> int:
        """Tokens (or images) of a micro-batch."""
        return self.micro_batch or self.sizes[0]

    def micro_batches(self, step: int) -> int:
        """The number of micro-batches of a step, counted from the start of its phase."""
        tokens = self.batch.tokens(step) if isinstance(self.batch, BatchGrowth) else self.batch
        return tokens // self.micro_batch_size


READING = "reading the data"


def check_first_row(rows: Iterable[Any], paths: tuple[str, ...]) -> None:
    """Read the first row of local files, to find missing fields before training."""
    if not paths[0].startswith(HUB):
        next(iter(rows), None)


def check_batch_holds(config: BatchConfig, tokens: int, what: str) -> None:
    if config.micro_batch_size < tokens:
        key = "micro_batch" if config.micro_batch else "batch"
        raise ConfigError(
            f"{key}={config.micro_batch_size} cannot hold {what}", f"use {tokens} or more"
        )


def token_id(tokenizer: Any, name: str, key: str) -> int | None:
    if not name:
        return None
    number: int | None = tokenizer.token_to_id(name)
    if number is None:
        raise ConfigError(
            f"{key}: the tokenizer has no token {name!r}", 'use one of its tokens, or "" for none'
        )
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsData(BatchConfig, ABC):
    """Rows of .jsonl or .parquet files, or of a dataset of the hub, tokenized in memory.

    Texts are truncated to `max_length` tokens. `validation` is other files, in one set or several
    by name, or a fraction of the rows.
    """

    train: tuple[str, ...]
    validation: HeldOut = 0.0
    tokenizer: str = ""
    max_length: int

    def __post_init__(self) -> None:
        BatchConfig.__post_init__(self)
        check_batch_holds(self, self.max_length, f"max_length={self.max_length}")
        validation_paths(self.validation)

    def check(self) -> None:
        for paths in (self.train, *validation_paths(self.validation).values()):
            self._rows(paths).check()
            check_first_row(self._source(paths), paths)

    def load(self, tokenizer: Any, folder: Path, names: tuple[str, ...] = ()) -> PhaseData:
        del folder
        with interruptible(READING):
            training = self._examples(self.train, tokenizer, names)
            held = {
                name: self._examples(paths, tokenizer, training.names)
                for name, paths in validation_paths(self.validation).items()
            }
            if isinstance(self.validation, float) and self.validation:
                training, held[""] = training.split(self.validation)
        for examples in (training, *held.values()):
            if len(examples):
                longest = int(examples.sizes.max())
                check_batch_holds(self, longest, f"a row of {longest} tokens")
        sets = (ValidationSet(name=name, chunks=chunks) for name, chunks in held.items())
        return PhaseData(training=training, validation=tuple(sets))

    def _rows(self, paths: tuple[str, ...]) -> RowSource:
        return row_source(paths)

    @abstractmethod
    def _source(self, paths: tuple[str, ...]) -> Any:
        """The examples in the rows of these files."""

    @abstractmethod
    def _examples(self, paths: tuple[str, ...], tokenizer: Any, names: tuple[str, ...]) -> Any:
        """The examples as tokens, with labels numbered by `names`."""


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Labeled(RowsData):
    """A text and a label per row, or a list of any number of labels."""

    text: str = "text"
    label: str = "label"

    def _source(self, paths: tuple[str, ...]) -> labeled.LabeledTexts:
        return labeled.LabeledTexts(row_source(paths), self.text, self.label)

    def _examples(self, paths: tuple[str, ...], tokenizer: Any, names: tuple[str, ...]) -> Any:
        source = self._source(paths)
        return labeled.labeled_examples(source, tokenizer, max_length=self.max_length, names=names)

    def find_classes(self) -> int | tuple[str, ...]:
        """The names of the classes in the training data, or their number."""
        with interruptible(READING):
            labels, names = labeled.label_array(list(self._source(self.train)), ())
        return names or int(labels.shape[1] if labels.ndim > 1 else labels.max() + 1)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(RowsData):
    """Two texts per row: for translation, or for embeddings, which can have `negatives` too.

    `negatives` names the fields with wrong second texts, each a text or a list; `scores` the field
    with a teacher's scores of the second text and of the negatives. `end` is the token appended to
    each text: by default the tokenizer's end-of-sequence token, and none if the tokenizer appends
    one itself; "" is none.
    """

    first: str = "first"
    second: str = "second"
    negatives: tuple[str, ...] = ()
    scores: str = ""
    end: str = tokenizer_training.EOS

    def __post_init__(self) -> None:
        RowsData.__post_init__(self)
        if self.scores and not self.negatives:
            raise ConfigError(
                f"scores={self.scores!r} needs negatives", "set negatives to their field"
            )

    def check_tokens(self, tokenizer: Any) -> None:
        """Raise if the tokenizer lacks the token."""
        self._added(tokenizer)

    def eos_id(self, tokenizer: Any) -> int | None:
        """The id of the token that ends every text, ours or the tokenizer's."""
        added = self._added(tokenizer)
        return tokenizer_training.appended_eos(tokenizer) if added is None else added

    def ending_tokenizer(self, tokenizer: Any) -> Any:
        """The tokenizer that ends texts as training does, for the trained model."""
        added = self._added(tokenizer)
        return tokenizer if added is None else tokenizer_training.appending(tokenizer, added)

    def _added(self, tokenizer: Any) -> int | None:
        name: str | None = self.end
        if name == tokenizer_training.EOS:
            appends = tokenizer_training.appended_eos(tokenizer) is not None
            name = None if appends else tokenizer_training.find_eos(tokenizer)
        return token_id(tokenizer, name or "", "data.end")

    def _source(self, paths: tuple[str, ...]) -> labeled.TextPairs:
        source = row_source(paths)
        return labeled.TextPairs(source, self.first, self.second, self.negatives, self.scores)

    def _examples(
        self, paths: tuple[str, ...], tokenizer: Any, names: Any, first_length: int | None = None
    ) -> Any:
        del names
        lengths = {"max_length": self.max_length, "first_length": first_length}
        end = self._added(tokenizer)
        return labeled.paired_examples(self._source(paths), tokenizer, **lengths, end=end)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RolePairs(Pairs):
    """Pairs as a model with late interaction reads them: queries and documents.

    Each has a prompt in front of it; queries are truncated to `query_length` tokens.
    """

    query_prompt: str = ""
    document_prompt: str = ""
    query_length: int | None = None

    def _source(self, paths: tuple[str, ...]) -> Any:
        ahead = self.document_prompt
        for pair in Pairs._source(self, paths):
            first, second = self.query_prompt + pair.first, ahead + pair.second
            negatives = tuple(ahead + text for text in pair.negatives)
            yield pair._replace(first=first, second=second, negatives=negatives)

    def _examples(self, paths: tuple[str, ...], tokenizer: Any, names: Any, *_: Any) -> Any:
        return Pairs._examples(self, paths, tokenizer, names, self.query_length)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(RowsData):
    """Words, and one tag per word, per row or per sentence of a CoNLL file.

    `scheme` converts the tags of entities to "IOB2", "BILOU" or "IO".
    """

    words: str = "tokens"
    tags: str = "tags"
    scheme: tag_schemes.Scheme | Literal["as written"] = "as written"

    def _rows(self, paths: tuple[str, ...]) -> RowSource:
        return conll.tagged_rows(paths)

    def _source(self, paths: tuple[str, ...]) -> labeled.TaggedTexts:
        return labeled.TaggedTexts(self._rows(paths), self.words, self.tags, self.scheme)

    def find_classes(self) -> int | tuple[str, ...]:
        """The tags of the training data, or their number."""
        with interruptible(READING):
            tags = {tag for row in self._source(self.train) for tag in row.tags}
        names = labeled.tag_names(tags)
        return names or max((int(tag) for tag in tags if isinstance(tag, int)), default=0) + 1

    def _examples(self, paths: tuple[str, ...], tokenizer: Any, names: tuple[str, ...]) -> Any:
        source = self._source(paths)
        return labeled.tagged_examples(source, tokenizer, max_length=self.max_length, names=names)


RANGE = "use finite numbers, and standard deviations above 0"


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Texts(BatchConfig):
    """Plain texts: files, folders, globs, or a dataset of the hub, tokenized once into `store`.

    `train` may be several sources mixed by weight. `validation` is other files, in one set or
    several by name, or a fraction of the training texts, taken from the end; that of a mixture has
    a set for each source. Documents are cut into chunks of `max_length` tokens, or concatenated
    and cut every `max_length` tokens ("fixed"), or for training every `stride` tokens, so that
    epochs differ. `end` is the token appended to a document: by default <|end|>, or the tokenizer's
    end-of-sequence token. `opening` and `closing` are the tokens around every chunk; "" is none.
    `text_column` is for tables. `tokenizer` is a tokenizer.json; "" is the model's own. `format` is
    for files whose names do not tell it; `errors` = "replace" replaces bytes that are not UTF-8 by
    question marks.
    """

    train: tuple[str | WeightedSource, ...]
    validation: HeldOut = 0.0
    tokenizer: str = ""
    max_length: int
    layout: Literal["documents", "fixed"] = "documents"
    stride: int = 0
    text_column: str = "text"
    separator: str = ""
    format: texts.Format = "as named"
    errors: texts.Errors = "strict"
    end: str = tokenizer_training.EOS
    opening: str = ""
    closing: str = ""
    store: str = ""

    def __post_init__(self) -> None:
        BatchConfig.__post_init__(self)
        check_batch_holds(self, self.max_length, f"max_length={self.max_length}")
        if self.layout == "fixed" and (self.opening or self.closing):
            raise ConfigError(
                'opening and closing need layout="documents"', 'use layout="documents"'
            )
        if self.stride and (self.layout != "fixed" or not 0 < self.stride <= self.max_length):
            raise ConfigError(
                f"stride={self.stride} does not fit max_length={self.max_length} and "
                f"layout={self.layout!r}",
                'use layout="fixed" and a stride up to max_length, or no stride',
            )
        titles = [source.title for source in self.train if isinstance(source, WeightedSource)]
        if titles and len(titles) < len(self.train):
            raise ConfigError(
                "train has paths and sources with a weight", "give every source a weight"
            )
        if twice := [title for title in titles if titles.count(title) > 1]:
            raise ConfigError(f"train has {twice[0]!r} twice", "give one of them another name")
        validation_paths(self.validation)

    @property
    def sources(self) -> dict[str, Paths]:
        """The training files by source; those of a single one are called ""."""
        paths = tuple(path for path in self.train if isinstance(path, str))
        weighted = [source for source in self.train if isinstance(source, WeightedSource)]
        return {source.title: source.path for source in weighted} or {"": paths}

    @property
    def _all_paths(self) -> tuple[Paths, ...]:
        return (*self.sources.values(), *validation_paths(self.validation).values())

    def check(self) -> None:
        for paths in self._all_paths:
            source = self._source(paths)
            source.check()
            check_first_row(source.read(), paths)

    def check_tokens(self, tokenizer: Any) -> None:
        """Raise if the tokenizer lacks one of the tokens."""
        self._end(tokenizer)
        for key in ("opening", "closing"):
            token_id(tokenizer, getattr(self, key), f"data.{key}")

    def load(self, tokenizer: Any, folder: Path, names: tuple[str, ...] = ()) -> PhaseData:
        del names
        store_folder = Path(self.store) if self.store else folder
        training, held = (
            {name: self._stored(paths, tokenizer, store_folder) for name, paths in sets.items()}
            for sets in (self.sources, validation_paths(self.validation))
        )
        if isinstance(self.validation, float) and self.validation:
            for name, store in training.items():
                training[name], held[name] = store.split(self.validation)
        chunks = {
            name: self._chunks(store, tokenizer, self.stride) for name, store in training.items()
        }
        weights = [source.weight for source in self.train if isinstance(source, WeightedSource)]
        sets = (
            ValidationSet(
                name=name,
                chunks=self._chunks(store, tokenizer),
                bytes_per_token=store.bytes_per_token,
            )
            for name, store in held.items()
        )
        mixed = MixedChunks(chunks, weights) if weights else chunks[""]
        return PhaseData(training=mixed, validation=tuple(sets))

    def set_aside_stale(self, tokenizer: Any, folder: Path) -> None:
        """Rename stores whose texts have changed, so that they are tokenized again."""
        for paths in () if self.store else self._all_paths:
            place = self._store_path(paths, folder)
            if self._changed(paths, tokenizer, place):
                count = len(list(folder.glob(f"{place.name}.before-*")))
                place.rename(place.with_name(f"{place.name}.before-{count + 1}"))

    def _source(self, paths: tuple[str, ...]) -> texts.TextSource:
        return texts.text_source(
            paths,
            text_column=self.text_column,
            separator=self.separator or None,
            format=self.format,
            errors=self.errors,
        )

    def _store_path(self, paths: tuple[str, ...], folder: Path) -> Path:
        # Phases may read different texts, each with a store of its own.
        options = (self.text_column, self.separator, self.format, self.errors)
        key = repr((paths, options, self.end, self.tokenizer))
        return folder / f"texts-{zlib.crc32(key.encode()):08x}"

    def _changed(self, paths: tuple[str, ...], tokenizer: Any, place: Path) -> str:
        return store_mismatch(self._source(paths), tokenizer, place, end=self._end(tokenizer))

    def _stored(self, paths: tuple[str, ...], tokenizer: Any, folder: Path) -> TokenStore:
        store_folder = self._store_path(paths, folder)
        changed = self._changed(paths, tokenizer, store_folder)
        if changed and not self.store:
            raise ConfigError(
                f"{', '.join(paths)}: the tokens of this run were made {changed}",
                "restore the texts, or start again with --fresh",
            )
        with interruptible("tokenizing (finished parts are kept)"):
            source, end = self._source(paths), self._end(tokenizer)
            store = write_store(source, tokenizer, store_folder, end=end)
        if not store.size:
            raise InputError(f"{', '.join(paths)}: there is no text in it", "give other files")
        return store

    def eos_id(self, tokenizer: Any) -> int | None:
        """The id of the token that ends every document."""
        return token_id(tokenizer, self._end(tokenizer) or "", "data.end")

    def _end(self, tokenizer: Any) -> str | None:
        """The name of the end-of-sequence token, which differs between tokenizers."""
        if self.end != tokenizer_training.EOS:
            token_id(tokenizer, self.end, "data.end")
            return self.end or None
        result = tokenizer_training.find_eos(tokenizer)
        if result is not None:
            return result
        names = ", ".join(map(repr, tokenizer_training.KNOWN_EOS))
        raise ConfigError(
            f"data.end: the tokenizer has none of {names}",
            'set data.end to the token that ends a document, or to "" for none',
        )

    def _chunks(self, store: TokenStore, tokenizer: Any, stride: int = 0) -> Chunks:
        if self.layout == "fixed":
            return FixedChunks(store, length=self.max_length, stride=stride)
        return DocumentChunks(
            store,
            length=self.max_length,
            opening=token_id(tokenizer, self.opening, "data.opening"),
            closing=token_id(tokenizer, self.closing, "data.closing"),
        )


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Images(BatchConfig):
    """One folder per class, an .npz, or two idx files (images, labels); a batch counts images.

    Image files are resized to squares of `size` pixels per side and converted to `channels`, in
    training as in use; both are the model's own by default. The arrays of the other files are not
    resized, and must have that shape. `validation` is other files, in one set or
    several by name. `mean` and `std`, one number or one per channel, are the
    model's own by default too.
    """

    train: tuple[str, ...]
    validation: HeldOutFiles = ()
    size: PositiveInt | None = None
    channels: Literal[1, 3, "model"] = "model"
    mean: PerChannel | Literal["model"] = "model"
    std: PerChannel | Literal["model"] = "model"

    def __post_init__(self) -> None:
        BatchConfig.__post_init__(self)
        for name in ("mean", "std"):
            value = getattr(self, name)
            numbers = () if value == "model" else value if isinstance(value, tuple) else (value,)
            if not all(map(math.isfinite, numbers)) or (
                name == "std" and min(numbers, default=1) <= 0
            ):
                raise ConfigError(f"{name}={value} cannot normalize images", RANGE)

    @property
    def max_length(self) -> int:
        return 1

    @property
    def tokenizer(self) -> str:
        return ""

    def check(self) -> None:
        for paths in (self.train, *validation_paths(self.validation).values()):
            for path in paths:
                if not Path(path).exists():
                    raise InputError(f"{path} does not exist", "check the path")

    def load(self, tokenizer: Any, folder: Path, names: tuple[str, ...] = ()) -> PhaseData:
        del tokenizer, folder
        with interruptible(READING):
            training = self._images(self.train, names)
            class_names = getattr(training, "names", ())
            sets = tuple(
                ValidationSet(name=name, chunks=self._images(paths, class_names))
                for name, paths in validation_paths(self.validation).items()
            )
        return PhaseData(training=training, validation=sets)

    def _images(self, paths: tuple[str, ...], names: tuple[str, ...]) -> Chunks:
        values = {"mean": self.mean, "std": self.std}
        options: dict[str, Any] = {
            name: value for name, value in values.items() if value != "model"
        }
        first = Path(paths[0])
        if first.is_dir():
            channels = 3 if self.channels == "model" else self.channels
            return ImageFolder(first, names=names, size=self.size, channels=channels, **options)
        if first.suffix == ".npz":
            return self._checked(load_npz(first, **options), first)
        if len(paths) == 2:
            return self._checked(load_idx(first, paths[1], **options), first)
        raise ConfigError(
            f"{first} is neither a folder nor an .npz", "give one, or two idx files: images, labels"
        )

    def _checked(self, arrays: ImageArrays, file: Path) -> ImageArrays:
        """Arrays are read as they are, so they must be as the model will read other images."""
        height, width, channels = (*arrays.pixels.shape[1:], 1)[:3]
        size = self.size or height
        if (height, width) != (size, size) or self.channels not in ("model", channels):
            expected = channels if self.channels == "model" else self.channels
            raise InputError(
                f"{file} has images of {height} x {width} pixels and {channels} channels, and "
                f"{size} x {size} and {expected} were expected",
                f"set data.size={height}, or resize the arrays: only image files are resized"
                if channels == expected and height == width
                else "convert the arrays: only image files are resized and converted",
            )
        return arrays


Data = Texts | Labeled | Pairs | Tagged | Images


def without_eos(data: Data) -> Data:
    """Pairs without an appended end token, unless the run file sets one."""
    if isinstance(data, Pairs) and data.end == tokenizer_training.EOS:
        return replace(data, end="")
    return data


def without_store(data: Data) -> Data:
    """The data without the path of their store, which does not change their order."""
    return replace(data, store="") if isinstance(data, Texts) else data
