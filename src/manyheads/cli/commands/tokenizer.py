"""manyheads tokenizer: train a tokenizer on files of text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from manyheads.atomic_write import atomic_write
from manyheads.cli import arguments
from manyheads.errors import InputError
from manyheads.formatting import pluralise


@dataclass(frozen=True, slots=True)
class TrainTokenizer:
    """Train a tokenizer on texts and save it as tokenizer.json.

    For example: manyheads tokenizer corpus/ -o tokenizer.json --vocab-size 4096
    """

    PYTHON_NAMES: ClassVar = {"size": "--vocab-size", "specials": "--special-token"}

    files: Annotated[tuple[str, ...], tyro.conf.Positional, arguments.metavar("FILE ...")]
    """Files, folders or quoted globs: plain text and code, .jsonl, .parquet, compressed too; or
    hub:ORG/NAME, a dataset of the Hugging Face hub."""

    out: Annotated[Path, tyro.conf.arg(aliases=("-o",), metavar="FILE")] = Path("tokenizer.json")
    """The file to save the tokenizer to."""

    vocab_size: int = 4096
    """The maximum size of the vocabulary."""

    kind: Literal["bytes", "wordpiece"] = "bytes"
    """Byte-level BPE, which can encode any text, or WordPiece as in BERT."""

    special_token: Annotated[arguments.Strings, arguments.repeatable("TOKEN")] = ()
    """A token that is never produced from text, such as [MASK] for a masked model of bytes."""

    text_column: Annotated[str, tyro.conf.arg(metavar="COLUMN")] = "text"
    """The column with the text of a .jsonl or .parquet file."""

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """The format of the files; by default as their names end."""

    errors: Literal["strict", "replace"] = "strict"
    """What to do with bytes that are not UTF-8: refuse them, or replace them by question marks."""

    cased: arguments.Flag = False
    """Distinguish capital letters in wordpiece; bytes always does."""

    def run(self) -> None:
        """Print the size of the vocabulary and where it is."""
        folder = self.out.absolute().parent
        if not folder.is_dir():
            raise InputError(f"--out: the folder {folder} does not exist", "create it first")
        if self.out.is_dir():
            raise InputError(f"--out {self.out} is a folder", "name a file in it")
        from manyheads.data.sources.texts import TextFiles, text_source
        from manyheads.data.tokenizer_training import train_tokenizer

        format = "as named" if self.format == "auto" else self.format
        source = text_source(
            self.files, text_column=self.text_column, format=format, errors=self.errors
        )
        source.check()
        size, lowercase, specials = self.vocab_size, not self.cased, self.special_token
        tokenizer = train_tokenizer(source, size, self.kind, lowercase=lowercase, specials=specials)
        with atomic_write(self.out) as partial:
            tokenizer.save(str(partial))
        origin = "the hub"
        if isinstance(source, TextFiles):
            origin = pluralise(len(source.files()), "file")
        print(f"a vocabulary of {tokenizer.get_vocab_size():,} from {origin}: {self.out}")
