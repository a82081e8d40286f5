"""manyheads index: make documents searchable, and keep the index up to date."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from manyheads.cli.arguments import DeviceName, DtypeName, Flag, open_model
from manyheads.errors import InputError
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    from manyheads.tasks.search.index import Index
    from manyheads.tasks.search.storage.index_writer import IndexingReport

# Names of skipped files per reason that are printed.
NAMED = 3


@dataclass(frozen=True, slots=True)
class IndexCommand:
    """Index documents, so that manyheads search finds them.

    For example: manyheads index notes/ -o notes.index --model minilm
    Run again, it encodes only what is new or has changed, and removes what is gone; interrupted, it
    continues where it was.
    """

    documents: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="DOCS ...", help_behavior_hint=""),
    ] = ()
    """Folders, files or quoted globs: text, .md, .html, code, .jsonl and .parquet with a field
    "text"."""

    out: Annotated[
        Path | None, tyro.conf.arg(aliases=["-o"], metavar="INDEX", help_behavior_hint="")
    ] = None
    """The folder of the index, or an address of an object store: s3://bucket/notes."""

    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = None
    """The model that encodes the documents: a folder, minilm (after manyheads get minilm),
    house-bert or org/name; bm25 needs none."""

    kind: Literal["dense", "late", "bm25", "hybrid"] = "dense"
    """One vector per chunk, one per token, keywords, or keywords together with vectors."""

    code: Flag = False
    """Split Python by function and class, and other files at the ends of lines."""

    whole: Flag = False
    """Do not split documents; longer ones than the model reads are truncated."""

    chunk_tokens: int = 256
    """Tokens per chunk, title included; at most as many as the model reads."""

    overlap: int = 32
    """Tokens that neighboring chunks share."""

    vectors: Literal["float32", "float16", "2bit"] = "float32"
    """How vectors are stored; 2bit is for late interaction."""

    add: Flag = False
    """Add the documents to an index, instead of making it equal to them."""

    delete: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="ID", help_behavior_hint="(repeatable)"),
    ] = ()
    """Remove the document with this id from an index."""

    dtype: DtypeName = "auto"
    """The dtype to compute in; by default that of the weights."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Print what was indexed, how fast, and what was skipped and why."""
        if self.out is None:
            raise InputError("manyheads index needs --out INDEX", "add -o notes.index")
        if self.delete and (self.documents or self.add):
            raise InputError("--delete takes no documents", "add and delete in two steps")
        if not self.delete and not self.documents:
            raise InputError(
                "manyheads index needs documents", "name a folder, a file or a quoted glob"
            )
        if self.add or self.delete:
            index = self._open()
            report = index.delete(self.delete) if self.delete else index.add(self.documents)
        else:
            index = self._create()
            assert index.report is not None
            report = index.report
        print(_summary(index, report, self.out))
        for line in _details(report):
            print(line)
        model = index.model
        if model is not None and model.sentence is None and model.late is None:
            print(
                f"{self.model or 'the model'} was not trained to embed texts, so that its ranking "
                "is rough: train it for search, or use minilm, after manyheads get minilm"
            )
        return 0

    def _create(self) -> "Index":
        from manyheads.tasks.search.index import Index

        if self.model is None and self.kind != "bm25":
            raise InputError(
                f"--kind {self.kind} needs --model",
                "run manyheads get minilm and add --model minilm, or use --kind bm25",
            )
        assert self.out is not None
        return Index.create(
            self.out,
            None
            if self.model is None or self.kind == "bm25"
            else open_model(self.model, self.device, self.dtype),
            self.documents,
            kind=self.kind,
            chunk_tokens=self.chunk_tokens,
            overlap=self.overlap,
            whole=self.whole,
            code=self.code,
            vectors=self.vectors,
        )

    def _open(self) -> "Index":
        from manyheads.tasks.search.index import Index

        assert self.out is not None
        name = self.model or Index.model_name(self.out)
        return Index.open(self.out, open_model(name, self.device, self.dtype) if name else None)


def _summary(index: "Index", report: "IndexingReport", out: Path) -> str:
    """
    For example: 12 documents, 31 chunks, 5,280 tokens in 1.2 s (4,400 tokens/s): dense index ...
    """
    work = [pluralise(report.encoded, "document"), pluralise(report.chunks, "chunk")]
    if report.tokens:
        work.append(pluralise(report.tokens, "token"))
    rate = f" ({report.tokens / report.seconds:,.0f} tokens/s)" if report.tokens else ""
    size = f"{pluralise(len(index), 'document')} and {pluralise(index.chunks, 'chunk')}"
    return (
        f"{', '.join(work)} encoded in {report.seconds:.1f} s{rate}: "
        f"{index.kind} index of {size} in {out}"
    )


def _details(report: "IndexingReport") -> list[str]:
    counts = (
        (report.unchanged, "unchanged"),
        (report.resumed, "already encoded by a run before this one"),
        (report.removed, "removed"),
    )
    lines = [", ".join(f"{count:,} {what}" for count, what in counts if count)]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in report.skipped:
        reasons[reason].append(name)
    lines += [f"skipped {_skipped(names, reason)}" for reason, names in reasons.items()]
    return [line for line in lines if line]


def _skipped(names: Sequence[str], reason: str) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{len(names):,} ({reason}): {', '.join(names[:NAMED])}{more}"
