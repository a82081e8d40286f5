"""manyheads index: make documents searchable, and keep the index up to date."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyheads.cli import arguments
from manyheads.cli.options import ComputeOptions
from manyheads.errors import InputError
from manyheads.formatting import pluralise


@dataclass(frozen=True, slots=True)
class IndexCommand:
    """Index documents, so that manyheads search finds them.

    For example: manyheads index notes/ -o notes.index --model minilm
    Run again, it encodes only what is new or has changed, and removes what is gone; interrupted, it
    continues where it was.
    """

    documents: Annotated[tuple[Path, ...], tyro.conf.Positional, arguments.metavar("DOCS ...")] = ()
    """Folders, files or quoted globs: text, .md, .html, code, .jsonl and .parquet with a field
    "text"."""

    out: Annotated[Path | None, arguments.metavar("INDEX", aliases=["-o"])] = None
    """The folder of the index, or an address of an object store: s3://bucket/notes."""

    model: Annotated[str | None, arguments.metavar("MODEL")] = None
    """The model that encodes the documents: a folder, minilm (after manyheads get minilm),
    house-bert or org/name; bm25 needs none."""

    kind: Literal["dense", "late", "bm25", "hybrid"] = "dense"
    """One vector per chunk, one per token, keywords, or keywords together with vectors."""

    code: arguments.Flag = False
    """Split Python by function and class, and other files at the ends of lines."""

    whole: arguments.Flag = False
    """Do not split documents; longer ones than the model reads are truncated."""

    chunk_tokens: int = 256
    """Tokens per chunk, title included; at most as many as the model reads."""

    overlap: int = 32
    """Tokens that neighboring chunks share."""

    vectors: Literal["float32", "float16", "2bit"] = "float32"
    """How vectors are stored; 2bit is for late interaction."""

    add: arguments.Flag = False
    """Add the documents to an index, instead of making it equal to them."""

    delete: Annotated[arguments.Strings, arguments.repeatable("ID")] = ()
    """Remove the document with this id from an index."""

    compute: ComputeOptions = ComputeOptions()

    def run(self) -> None:
        """Print what was indexed, how fast, and what was skipped and why."""
        from manyheads.tasks.search.index import Index

        if self.out is None:
            raise InputError("manyheads index needs --out INDEX", "add -o notes.index")
        if self.delete and (self.documents or self.add):
            raise InputError("--delete takes no documents", "add and delete in two steps")
        if not self.delete and not self.documents:
            remedy = "name a folder, a file or a quoted glob"
            raise InputError("manyheads index needs documents", remedy)
        if self.add or self.delete:
            name = self.model or Index.model_name(self.out)
            index = Index.open(self.out, self.compute.open(name) if name else None)
            report = index.delete(self.delete) if self.delete else index.add(self.documents)
        else:
            if self.model is None and self.kind != "bm25":
                raise InputError(
                    f"--kind {self.kind} needs --model",
                    "run manyheads get minilm and add --model minilm, or use --kind bm25",
                )
            index = Index.create(
                self.out,
                None
                if self.model is None or self.kind == "bm25"
                else self.compute.open(self.model),
                self.documents,
                kind=self.kind,
                chunk_tokens=self.chunk_tokens,
                overlap=self.overlap,
                whole=self.whole,
                code=self.code,
                vectors=self.vectors,
            )
            assert index.report is not None
            report = index.report
        size = f"{pluralise(len(index), 'document')} and {pluralise(index.chunks, 'chunk')}"
        print(f"{report}: {index.kind} index of {size} in {self.out}")
        for line in report.details():
            print(line)
        model = index.model
        if model is not None and model.sentence is None and model.late is None:
            print(
                f"{self.model or 'the model'} was not trained to embed texts, so that its ranking "
                "is rough: train it for search, or use minilm, after manyheads get minilm"
            )
