"""Documents to search: from folders, plain files, rows of .jsonl and .parquet, or in memory."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from html.parser import HTMLParser
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manyheads.argument_checks import checked
from manyheads.data.sources import files, rows
from manyheads.errors import InputError, short_repr

Scalar = str | int | float | bool
NO_METADATA: Mapping[str, Scalar] = MappingProxyType({})

# Folders that hold copies, caches and other people's code.
SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages")
# Bytes that are looked at to tell a text from a binary file.
SNIFF = 2**13
# Names of the field with the id of a row; the second is that of BEIR.
ID_COLUMNS = ("id", "_id")

# Called with the name of a document and the reason why it is left out.
OnSkip = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Document:
    """A text with an id, a title and some metadata; `source` is where it came from.

    >>> Document(id="a.md", text="Attention is all you need.").title
    ''
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Scalar] = field(default_factory=lambda: NO_METADATA)
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("id", "text", "title", "source"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InputError(f"{name} of a document must be a string, got {short_repr(value)}")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{name} of document {self.id!a} has a lone surrogate at {error.start}",
                    "decode it again, for example with errors='replace'",
                ) from None
        if not self.id:
            raise InputError("a document has an empty id", "give it one")
        if not isinstance(self.metadata, Mapping):
            raise InputError(f"metadata must be a mapping, got {short_repr(self.metadata)}")
        for key, entry in self.metadata.items():
            if not isinstance(key, str) or not _is_scalar(entry):
                raise InputError(
                    f"metadata {key!r} of document {self.id!r} is {short_repr(entry)}",
                    "use strings, numbers, True or False",
                )

    @property
    def fingerprint(self) -> str:
        """A hash of the id and of everything that is stored of the document."""
        digest = blake2b(digest_size=12)
        entries = [f"{key}={value!r}" for key, value in sorted(self.metadata.items())]
        for part in (self.id, self.text, self.title, self.source, *entries):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


# A path or glob, several paths, or documents as such, as strings or as mappings.
Documents = str | Path | Iterable[Document | str | Path | Mapping[str, Any]]


@checked
def read_documents(
    where: Documents,
    *,
    text_column: str = "text",
    title_column: str = "title",
    on_skip: OnSkip | None = None,
) -> Iterator[Document]:
    """The documents of a folder, a file, a glob or an iterable, one at a time.

    A plain file is one document whose id is its path in the folder. Of HTML the visible text is
    read, and its title; the title of Markdown is its first heading. A row of .jsonl or .parquet is
    a document with the columns `text_column`, `title_column` and "id"; the others are metadata.
    Files may be compressed. Items of an iterable are documents, mappings with the same keys,
    paths, or strings, whose ids are hashes of their text. Hidden files are left out; files that are
    binary, empty or not UTF-8 are reported to `on_skip`.

    >>> [document.text for document in read_documents(["one", {"id": "2", "text": "two"}])]
    ['one', 'two']
    """
    skip = on_skip or (lambda name, reason: None)  # noqa: ARG005
    if isinstance(where, str | Path):
        where = [Path(where)]
    if isinstance(where, Document | Mapping):
        where = [where]
    if not isinstance(where, Iterable):
        raise InputError(
            f"documents must be a path or an iterable, got {short_repr(where)}",
            "give a folder, a file, or a list of documents",
        )
    # With several folders the same relative path may occur twice.
    several = isinstance(where, Sequence) and sum(isinstance(item, Path) for item in where) > 1
    for number, item in enumerate(where):
        match item:
            case Document():
                yield from _unless_empty(item, skip)
            case Path():
                named = not item.expanduser().is_dir()
                for file, name in _files(item, several):
                    yield from _of_file(file, name, text_column, title_column, skip, named=named)
            case str():
                yield from _unless_empty(Document(id=_hashed(item), text=item), skip)
            case Mapping():
                row = rows.Row(item, "documents", number, "item")
                yield from _of_row(row, "", text_column, title_column, skip)
            case _:
                raise InputError(
                    f"document {number} is {short_repr(item)}",
                    "give a Document, a string, a mapping or a path",
                )


def _unless_empty(document: Document, skip: OnSkip) -> Iterator[Document]:
    if document.text.strip():
        yield document
    else:
        skip(document.id, "empty")


def _hashed(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _files(path: Path, several: bool) -> Iterator[tuple[Path, str]]:
    """The files of a path or glob, each with its name relative to it."""
    folder = path.expanduser()
    for file in files.find_files(path, ("readable",), any_suffix=True):
        if folder.is_dir():
            relative = file.relative_to(folder)
            if set(relative.parts) & set(SKIPPED_FOLDERS):
                continue
            yield file, (path / relative if several else relative).as_posix()
        else:
            yield file, path.as_posix() if several and file == folder else file.name


def _of_file(
    file: Path, name: str, text_column: str, title_column: str, skip: OnSkip, *, named: bool
) -> Iterator[Document]:
    suffix = files.suffix_of(file)
    if suffix in rows.ROW_FORMATS:
        try:
            for row in rows.ROW_FORMATS[suffix](file):
                yield from _of_row(row, name, text_column, title_column, skip)
        except InputError as error:
            # A file that was named must be right; a folder may hold other things.
            if named:
                raise
            skip(name, error.problem.replace(f"{file}, ", ""))
        return
    try:
        with files.open_file(file) as opened:
            content = opened.read(SNIFF)
            if b"\0" in content:
                return skip(name, "binary")
            text = (content + opened.read()).decode("utf-8-sig")
    except UnicodeDecodeError:
        return skip(name, "not UTF-8")
    except OSError as error:
        return skip(name, f"unreadable ({error.strerror})")
    title = ""
    if suffix in (".html", ".htm", ".xhtml"):
        title, text = html_text(text)
    elif suffix in (".md", ".markdown"):
        title = markdown_title(text)
    yield from _unless_empty(Document(id=name, text=text, title=title, source=str(file)), skip)


def _of_row(
    row: rows.Row, name: str, text_column: str, title_column: str, skip: OnSkip
) -> Iterator[Document]:
    id_column = next((column for column in ID_COLUMNS if row.fields.get(column) is not None), None)
    title = row.fields.get(title_column)
    location = f"{name}:{row.number}" if name else f"{row.unit} {row.number}"
    if row.get(text_column) is None or not row.text(text_column).strip():
        return skip(location if id_column is None else str(row.fields[id_column]), "empty")
    text = row.text(text_column)
    identifier = str(row.fields[id_column]) if id_column else location if name else _hashed(text)
    columns = {text_column, title_column, id_column}
    yield Document(
        id=identifier,
        text=text,
        title=row.text(title_column) if title is not None else "",
        metadata={
            key: value
            for key, value in row.fields.items()
            if key not in columns and _is_scalar(value)
        },
        source=f"{row.file}:{row.number}" if name else "",
    )


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))


def markdown_title(text: str) -> str:
    """The first heading outside a block of code, or the title in the front matter.

    >>> markdown_title("```\\n# code\\n```\\n\\n# My *notes* #\\n\\nText")
    'My *notes*'
    """
    fence, front = "", text.startswith("---\n")
    for number, line in enumerate(text.splitlines()):
        stripped = line.strip()
        if front and number:
            if match := re.match(r"title:\s*(.+)", stripped):
                return match[1].strip("\"' ")
            front = stripped != "---"
        elif fence:
            fence = "" if stripped.startswith(fence) else fence
        elif stripped.startswith(("```", "~~~")):
            fence = stripped[:3]
        elif match := re.match(r"#{1,6}\s+(.+?)\s*#*$", line):
            return match[1]
    return ""


# Elements whose content nobody reads, and those that begin a new line.
INVISIBLE = {"script", "style", "noscript", "template", "svg", "head"}
BLOCKS = {
    *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main"),
    *("nav", "ol", "p", "pre", "section", "table", "td", "th", "title", "tr", "ul"),
}


class _VisibleText(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title: list[str] = []
        self.hidden: list[str] = []
        self.in_title = self.preformatted = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        # A body ends a head that nobody closed.
        if tag == "body" and self.hidden == ["head"]:
            self.hidden = []
        if tag in INVISIBLE:
            self.hidden.append(tag)
        self.in_title = tag == "title" and "svg" not in self.hidden
        self.preformatted = self.preformatted or tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.hidden:
            del self.hidden[self.hidden.index(tag) :]
        self.in_title = False
        self.preformatted = self.preformatted and tag != "pre"
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self.in_title and self.hidden in ([], ["head"]):
            self.title.append(data)
        elif not self.hidden:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def html_text(html: str) -> tuple[str, str]:
    """The title and the visible text of a page, with a line per paragraph.

    >>> html_text("<title>T</title><p>One <b>two</b></p><script>no()</script><p>three")
    ('T', 'One two\\nthree')
    """
    parser = _VisibleText()
    parser.feed(html)
    parser.close()
    lines = (line.strip(" ") for line in "".join(parser.parts).split("\n"))
    return " ".join("".join(parser.title).split()), "\n".join(line for line in lines if line)
