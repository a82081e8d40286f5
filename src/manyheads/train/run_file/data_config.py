"""The data section of a run file: what is read, how it is cut, how much of it makes a step."""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from manyheads.data.chunks import Documents, Fixed, Pieces
from manyheads.data.eos import END, ENDS, known_end, own_end
from manyheads.data.images import ByChannel, ImageFolder, images_of_idx, images_of_npz
from manyheads.data.labelled import (
    LabelledTexts,
    TaggedTexts,
    labelled_examples,
    paired_examples,
    tagged_examples,
)
from manyheads.data.labelled import Pairs as PairSource
from manyheads.data.sources.rows import HUB, rows_of
from manyheads.data.sources.texts import Errors, Format, TextSource, texts_of
from manyheads.data.store import Store
from manyheads.data.tokenise import made_otherwise, write_store
from manyheads.errors import ConfigError, InputError
from manyheads.train.interrupt import at_once
from manyheads.train.optim.schedules import BatchGrowth


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much makes a step: `batch` tokens (of images, images), at most `micro_batch` at a time.

    A batch may grow. 0 takes it whole; gradients of its micro-batches are summed, so that the
    second number changes memory and speed alone.
    """

    batch: int | BatchGrowth
    micro_batch: int = 0

    def __post_init__(self) -> None:
        if min(self.sizes) < 1 or self.micro_batch < 0:
            raise ConfigError(
                f"batch={min(self.sizes)} and micro_batch={self.micro_batch}", "use 1 or more"
            )
        if isinstance(self.batch, BatchGrowth) and not self.micro_batch:
            raise ConfigError("a batch that grows is made of micro-batches", "give micro_batch")
        for size in self.sizes:
            if size % self.room:
                raise ConfigError(
                    f"batch={size} is no multiple of micro_batch={self.room}",
                    f"use a batch of {-(-size // self.room) * self.room}",
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """All that the batch ever is."""
        if isinstance(self.batch, BatchGrowth):
            return (*self.batch.sizes, self.batch.last)
        return (self.batch,)

    @property
    def room(self) -> int:
        """Of one micro-batch."""
        return self.micro_batch or self.sizes[0]

    def micro_batches(self, step: int) -> int:
        """Of a step, counted from the start of its phase."""
        tokens = self.batch.tokens(step) if isinstance(self.batch, BatchGrowth) else self.batch
        return tokens // self.room


READING = "reading the data"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fed:
    """What a phase trains on and is tested on; `bytes_a_token` is of the latter, 0 if unknown."""

    training: Pieces
    validation: Pieces | None
    bytes_a_token: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes, where the data name them."""
        names: tuple[str, ...] = getattr(self.training, "names", ())
        return names


def peek(read: Iterable[Any], paths: tuple[str, ...]) -> None:
    """The first of it, which tells of a field that is not there; the hub is asked when needed."""
    if not paths[0].startswith(HUB):
        next(iter(read), None)


def check_share(validation: float | tuple[str, ...]) -> None:
    if isinstance(validation, float) and not 0 <= validation < 1:
        raise ConfigError(f"validation={validation:g} is no share", "use 0 <= share < 1")


def check_room(amount: Amount, tokens: int, what: str) -> None:
    if amount.room < tokens:
        key = "micro_batch" if amount.micro_batch else "batch"
        raise ConfigError(f"{key}={amount.room} cannot hold {what}", f"use {tokens} or more")


def token_of(tokenizer: Any, name: str, key: str) -> int | None:
    if not name:
        return None
    number: int | None = tokenizer.token_to_id(name)
    if number is None:
        raise ConfigError(
            f"{key}: the tokenizer has no token {name!r}", "name one that it has, or none"
        )
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Amount, ABC):
    """Rows of .jsonl or .parquet files, or of a dataset of the hub, tokenised in memory.

    Texts are cut to `length`. `validation` is other files, or a share of the rows.
    """

    train: tuple[str, ...]
    validation: float | tuple[str, ...] = 0.0
    tokenizer: str = ""
    length: int

    def __post_init__(self) -> None:
        Amount.__post_init__(self)
        check_share(self.validation)
        check_room(self, self.length, f"length={self.length}")

    def check(self) -> None:
        for paths in (self.train, self.validation):
            if isinstance(paths, tuple):
                rows_of(paths).check()
                peek(self._source(paths), paths)

    def feed(self, tokenizer: Any, folder: Path, names: tuple[str, ...] = ()) -> Fed:
        del folder
        held = None
        with at_once(READING):
            training = self._examples(self.train, tokenizer, names)
            if isinstance(self.validation, tuple):
                held = self._examples(self.validation, tokenizer, training.names)
            elif self.validation:
                training, held = training.split(self.validation)
        for read in (training, held):
            if read is not None and len(read):
                longest = int(read.sizes.max())
                check_room(self, longest, f"a row of {longest} tokens")
        return Fed(training=training, validation=held)

    @abstractmethod
    def _source(self, paths: tuple[str, ...]) -> Any:
        """What is read of the rows of these files."""

    @abstractmethod
    def _examples(self, paths: tuple[str, ...], tokenizer: Any, names: tuple[str, ...]) -> Any:
        """The same in tokens, labels numbered as those of the names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled(Rows):
    """A text and a label a row."""

    text: str = "text"
    label: str = "label"

    def _source(self, paths: tuple[str, ...]) -> LabelledTexts:
        return LabelledTexts(rows_of(paths), self.text, self.label)

    def _examples(self, paths: tuple[str, ...], tokenizer: Any, names: tuple[str, ...]) -> Any:
        source = self._source(paths)
        return labelled_examples(source, tokenizer, longest=self.length, names=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Rows):
    """Two texts a row: for translation, or for sentences that should lie close.

    `end` is the token put behind each: by default what the tokenizer has for it, and nothing where
    the tokenizer itself ends texts; "" is none.
    """

    first: str = "first"
    second: str = "second"
    end: str = END

    def check_words(self, tokenizer: Any) -> None:
        """Refuse a token that the tokenizer does not have."""
        self._added(tokenizer)

    def ends_with(self, tokenizer: Any) -> int | None:
        """The token that ends every text, whoever puts it there."""
        added = self._added(tokenizer)
        return own_end(tokenizer) if added is None else added

    def _added(self, tokenizer: Any) -> int | None:
        name = self.end
        if name == END:
            name = "" if own_end(tokenizer) is not None else known_end(tokenizer) or ""
        return token_of(tokenizer, name, "data.end")

    def _source(self, paths: tuple[str, ...]) -> PairSource:
        return PairSource(rows_of(paths), self.first, self.second)

    def _examples(self, paths: tuple[str, ...], tokenizer: Any, names: tuple[str, ...]) -> Any:
        del names
        end = self._added(tokenizer)
        return paired_examples(self._source(paths), tokenizer, longest=self.length, end=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(Rows):
    """Words and as many tags a row."""

    words: str = "tokens"
    tags: str = "tags"

    def _source(self, paths: tuple[str, ...]) -> TaggedTexts:
        return TaggedTexts(rows_of(paths), self.words, self.tags)

    def _examples(self, paths: tuple[str, ...], tokenizer: Any, names: tuple[str, ...]) -> Any:
        source = self._source(paths)
        return tagged_examples(source, tokenizer, longest=self.length, names=names)


RANGE = "use finite numbers, and deviations other than 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts(Amount):
    """Plain texts: files, folders, globs, or a dataset of the hub, tokenised once into `store`.

    `validation` is other files, or the last share of the training texts. Documents are kept apart
    and cut to `length`, or all laid end to end and cut every `length` tokens ("fixed"), or for
    training every `stride`, so that passes differ. `end` is the token put behind a document: by
    default <|end|>, or what the tokenizer has for it. `opening` and `closing` are those around
    every piece; "" is none.
    `tokenizer` is a tokenizer.json; "" is the model's own. `format` says what files hold whose
    names do not; `errors` = "replace" reads bytes that are no UTF-8 as question marks.
    """

    train: tuple[str, ...]
    validation: float | tuple[str, ...] = 0.0
    tokenizer: str = ""
    length: int
    layout: Literal["documents", "fixed"] = "documents"
    stride: int = 0
    field: str = "text"
    separator: str = ""
    format: Format = "as named"
    errors: Errors = "strict"
    end: str = END
    opening: str = ""
    closing: str = ""
    store: str = ""

    def __post_init__(self) -> None:
        Amount.__post_init__(self)
        check_share(self.validation)
        check_room(self, self.length, f"length={self.length}")
        if self.layout == "fixed" and (self.opening or self.closing):
            raise ConfigError(
                'layout="fixed" has no pieces to put tokens around', 'use layout="documents"'
            )
        if self.stride and (self.layout != "fixed" or not 0 < self.stride <= self.length):
            raise ConfigError(
                f"stride={self.stride} is for cuts of length={self.length}",
                'use layout="fixed" and a stride up to the length, or none',
            )

    def check(self) -> None:
        for paths in (self.train, self.validation):
            if isinstance(paths, tuple):
                source = self._source(paths)
                source.check()
                peek(source.read(), paths)

    def check_words(self, tokenizer: Any) -> None:
        """Refuse tokens that the tokenizer does not have."""
        self._end(tokenizer)
        for key in ("opening", "closing"):
            token_of(tokenizer, getattr(self, key), f"data.{key}")

    def feed(self, tokenizer: Any, folder: Path, names: tuple[str, ...] = ()) -> Fed:
        del names
        place = Path(self.store) if self.store else folder
        training = self._stored(self.train, tokenizer, place)
        held: Store | None = None
        if isinstance(self.validation, tuple):
            held = self._stored(self.validation, tokenizer, place)
        elif self.validation:
            training, held = training.split(self.validation)
        return Fed(
            training=self._pieces(training, tokenizer, self.stride),
            validation=None if held is None else self._pieces(held, tokenizer),
            bytes_a_token=0.0 if held is None else held.bytes_per_token,
        )

    def renew(self, tokenizer: Any, folder: Path) -> None:
        """Set aside what the folder holds of texts that are others now; they are tokenised anew."""
        for paths in (self.train, self.validation):
            if self.store or not isinstance(paths, tuple):
                continue
            place = self._place(paths, folder)
            if self._changed(paths, tokenizer, place):
                count = len(list(folder.glob(f"{place.name}.before-*")))
                place.rename(place.with_name(f"{place.name}.before-{count + 1}"))

    def _source(self, paths: tuple[str, ...]) -> TextSource:
        return texts_of(
            paths,
            field=self.field,
            separator=self.separator or None,
            format=self.format,
            errors=self.errors,
        )

    def _place(self, paths: tuple[str, ...], folder: Path) -> Path:
        # Phases may read different texts, and each has a place of its own.
        read = (self.field, self.separator, self.format, self.errors)
        said = repr((paths, read, self.end, self.tokenizer))
        return folder / f"texts-{zlib.crc32(said.encode()):08x}"

    def _changed(self, paths: tuple[str, ...], tokenizer: Any, place: Path) -> str:
        return made_otherwise(self._source(paths), tokenizer, place, end=self._end(tokenizer))

    def _stored(self, paths: tuple[str, ...], tokenizer: Any, folder: Path) -> Store:
        place = self._place(paths, folder)
        changed = self._changed(paths, tokenizer, place)
        if changed and not self.store:
            raise ConfigError(
                f"{', '.join(paths)}: what this run has read of it was made {changed}",
                "put back what was there, or begin anew with --fresh",
            )
        with at_once("tokenising, of which finished parts are kept"):
            source, end = self._source(paths), self._end(tokenizer)
            store = write_store(source, tokenizer, place, end=end)
        if not store.size:
            raise InputError(f"{', '.join(paths)}: there is no text in it", "name other files")
        return store

    def ends_with(self, tokenizer: Any) -> int | None:
        """The token that ends every document."""
        return token_of(tokenizer, self._end(tokenizer) or "", "data.end")

    def _end(self, tokenizer: Any) -> str | None:
        """The token behind a document; tokenizers of others have other names for it."""
        if self.end != END:
            token_of(tokenizer, self.end, "data.end")
            return self.end or None
        found = known_end(tokenizer)
        if found is not None:
            return found
        raise ConfigError(
            f"data.end: the tokenizer has no token {END!r}, nor {', '.join(map(repr, ENDS[1:]))}",
            'name the one that ends a document, or write end = "" for none',
        )

    def _pieces(self, store: Store, tokenizer: Any, stride: int = 0) -> Pieces:
        if self.layout == "fixed":
            return Fixed(store, length=self.length, stride=stride)
        return Documents(
            store,
            length=self.length,
            opening=token_of(tokenizer, self.opening, "data.opening"),
            closing=token_of(tokenizer, self.closing, "data.closing"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Images(Amount):
    """A folder a class, an .npz, or two idx files, images and labels; a batch counts images.

    `mean` and `std`, of all channels or of each, are the model's own unless they are given.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...] = ()
    size: int | None = None
    channels: Literal[1, 3] = 3
    mean: ByChannel | Literal["model"] = "model"
    std: ByChannel | Literal["model"] = "model"

    def __post_init__(self) -> None:
        Amount.__post_init__(self)
        if self.size is not None and self.size < 1:
            raise ConfigError(f"size={self.size} pixels a side", "use 1 or more, or leave it out")
        for name in ("mean", "std"):
            given = getattr(self, name)
            numbers = () if given == "model" else given if isinstance(given, tuple) else (given,)
            if not all(map(math.isfinite, numbers)) or (name == "std" and 0 in numbers):
                raise ConfigError(f"{name}={given} brings images to no numbers", RANGE)

    @property
    def length(self) -> int:
        return 1

    @property
    def tokenizer(self) -> str:
        return ""

    def check(self) -> None:
        for path in (*self.train, *self.validation):
            if not Path(path).exists():
                raise InputError(f"there is no {path}", "check the name")

    def feed(self, tokenizer: Any, folder: Path, names: tuple[str, ...] = ()) -> Fed:
        del tokenizer, folder
        held = None
        with at_once(READING):
            training = self._images(self.train, names)
            if self.validation:
                held = self._images(self.validation, getattr(training, "names", ()))
        return Fed(training=training, validation=held)

    def _images(self, paths: tuple[str, ...], names: tuple[str, ...]) -> Pieces:
        given = {"mean": self.mean, "std": self.std}
        options: dict[str, Any] = {name: each for name, each in given.items() if each != "model"}
        first = Path(paths[0])
        if first.is_dir():
            options |= {"size": self.size, "channels": self.channels}
            return ImageFolder(first, names=names, **options)
        if first.suffix == ".npz":
            return images_of_npz(first, **options)
        if len(paths) == 2:
            return images_of_idx(first, paths[1], **options)
        raise ConfigError(
            f"{first} is no folder and no .npz", "name these, or two idx files: images, labels"
        )


Data = Texts | Labelled | Pairs | Tagged | Images


def without_end(data: Data) -> Data:
    """Pairs that nothing is put behind, unless somebody asked for it."""
    return replace(data, end="") if isinstance(data, Pairs) and data.end == END else data


def without_place(data: Data) -> Data:
    """The same data wherever they are kept: what a place in them depends on."""
    return replace(data, store="") if isinstance(data, Texts) else data
