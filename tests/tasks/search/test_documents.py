import gzip
import json
from pathlib import Path

import pytest

from manyheads.errors import InputError
from manyheads.tasks import Document, read_documents
from manyheads.tasks.search.documents import html_text, markdown_title

PAGE = """<!doctype html><html><head><title> Sea &amp; land </title><style>p {}</style></head>
<body><h1>Waves</h1><p>One   <b>two</b>.<script>var no;</script><br>Three</p>
<svg><title>no</title></svg>
<ul><li>a<li>b</ul></body></html>"""


def test_a_folder_gives_a_document_per_file_with_its_path_as_id(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("text\n\n# The *title*\n", encoding="utf-8")
    (tmp_path / "b.html").write_text(PAGE, encoding="utf-8")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "curve.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    (tmp_path / ".hidden").write_text("no", encoding="utf-8")
    skipped: dict[str, str] = {}
    result = {each.id: each for each in read_documents(tmp_path, on_skip=skipped.__setitem__)}
    assert list(result) == ["b.html", "c.txt.gz", "sub/a.md"]
    assert result["sub/a.md"].title == "The *title*"
    assert result["b.html"].title == "Sea & land"
    assert result["b.html"].text == "Waves\nOne two.\nThree\na\nb"
    assert result["c.txt.gz"].text == "packed"
    assert skipped["image.png"] == "binary"
    assert skipped["latin.txt"] == "not UTF-8"
    assert skipped["empty.txt"] == "empty"
    assert "text" in skipped["curve.jsonl"]


def test_rows_have_ids_titles_and_metadata(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {"_id": 7, "title": "T", "text": "one", "year": 1999, "tags": ["x"], "none": None},
        {"text": "two", "year": 2000.5},
        {"text": ""},
    ]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    first, second = read_documents(lines)
    assert first == Document("7", "one", "T", {"year": 1999}, f"{lines}:1")
    assert (second.id, second.metadata) == ("rows.jsonl:2", {"year": 2000.5})
    table = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"body": ["x"], "id": ["k"], "even": [True]}), table)
    [row] = read_documents(table, text_column="body")
    assert (row.id, row.text, row.metadata) == ("k", "x", {"even": True})
    with pytest.raises(InputError, match="body") as caught:
        list(read_documents(table))
    assert "text" in caught.value.problem


def test_ids_of_strings_follow_their_text_and_the_fingerprint_everything() -> None:
    one, two, again = read_documents(["a", "b", "a"])
    assert one.id == again.id != two.id
    assert one.fingerprint == again.fingerprint
    changed = [
        Document("i", "t"),
        Document("j", "t"),
        Document("i", "t", "title"),
        Document("i", "t", metadata={"k": 1}),
        Document("i", "t", metadata={"k": "1"}),
        Document("i", "ttitle"),
    ]
    assert len({each.fingerprint for each in changed}) == len(changed)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (iter([3]), "document 0"),
        ([{"id": "a"}], "no field 'text'"),
        ([{"text": "\ud800"}], "surrogate"),
        ("nowhere/at/all", "does not exist"),
    ],
)
def test_what_is_no_document_is_named(documents: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(read_documents(documents))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="metadata 'k'"):
        Document("a", "b", metadata={"k": float("nan")})


def test_titles_of_front_matter_and_unclosed_heads() -> None:
    assert markdown_title("---\ntitle: 'Mine'\n---\n# Other") == "Mine"
    assert markdown_title("no heading\n#hashtag") == ""
    assert html_text("<head><title>T</title><body>text") == ("T", "text")
