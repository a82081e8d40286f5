"""manyheads tokenizer: learn a vocabulary from files of text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyheads.cli.arguments import Flag
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class TrainTokenizer:
    """Learn a tokenizer from texts and write it as tokenizer.json.

    For example: manyheads tokenizer corpus/ -o tokenizer.json --size 4096
    """

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE ...")]
    """Files, folders or quoted globs: plain text and code, .jsonl, .parquet, compressed too; or
    hub:ORG/NAME, a dataset of the Hugging Face hub."""

    out: Annotated[Path, tyro.conf.arg(aliases=("-o",), metavar="FILE")] = Path("tokenizer.json")
    """Where the tokenizer goes, whole or not at all."""

    size: int = 4096
    """The most entries it may have."""

    kind: Literal["bytes", "wordpiece"] = "bytes"
    """Byte-level pairs, which can write any text, or WordPiece as BERT has it."""

    special: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="TOKEN", help_behavior_hint="(repeatable)"),
    ] = ()
    """A token that no text is cut into, such as [MASK], which a masked model of bytes needs."""

    field: str = "text"
    """The field that holds the text of a .jsonl or .parquet row."""

    format: Literal["as named", "text", "jsonl", "parquet"] = "as named"
    """How to read the files, whatever their names end in."""

    errors: Literal["strict", "replace"] = "strict"
    """What to do with bytes that are no UTF-8: refuse them, or read them as question marks."""

    cased: Flag = False
    """Keep capitals apart in wordpiece; bytes always do."""

    def run(self) -> int:
        """Say how many entries were learnt from how much."""
        folder = self.out.absolute().parent
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}", "make it, or name another")
        if self.out.is_dir():
            raise InputError(f"{self.out} is a folder", "name a file in it")
        from manyheads.data.sources.texts import TextFiles, text_source
        from manyheads.data.tokenizer_training import train_tokenizer

        source = text_source(self.files, field=self.field, format=self.format, errors=self.errors)
        source.check()
        tokenizer = train_tokenizer(
            source, self.size, self.kind, lowercase=not self.cased, specials=self.special
        )
        beside = folder / f".{self.out.name}.new"
        tokenizer.save(str(beside))
        beside.replace(self.out)
        said = "the hub"
        if isinstance(source, TextFiles):
            count = len(source.files())
            said = f"{count:,} file{'s' if count != 1 else ''}"
        print(f"{tokenizer.get_vocab_size():,} entries learnt from {said}: {self.out}")
        return 0
