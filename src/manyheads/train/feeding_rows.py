"""The data section of a run file whose rows say more than a text: a label, a pair, tags."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.data.ends import known_end, own_end
from manyheads.data.examples import labelled_examples, paired_examples, tagged_examples
from manyheads.data.labelled import LabelledTexts, TaggedTexts
from manyheads.data.labelled import Pairs as PairSource
from manyheads.data.sources import rows_of
from manyheads.data.writing import END
from manyheads.train.amounts import Amount
from manyheads.train.fed import READING, Fed, check_room, check_share, peek, token_of
from manyheads.train.stopping import at_once

__all__ = ["Labelled", "Pairs", "Tagged"]


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
