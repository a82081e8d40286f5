"""Files, ids and texts as the commands read them."""

import gzip
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet

from manyheads.cli.inputs import read_file, read_texts, split_pairs, split_texts, stream_texts
from manyheads.errors import InputError
from manyheads.models.provenance import SentenceConfig
from tests.studio import models


def test_tokens_limit_what_is_measured_on() -> None:
    model = models.decoder(layers=1)
    assert model.tokenizer is not None
    texts = ["the cat sat on a mat", "one dog ran over some hill", "and sun was low"]
    counts = [len(model.tokenizer.encode(text)) for text in texts]
    first, others = split_texts(model, texts, counts[0] + 2)
    assert (first[0], others[1:]) == (texts[0], texts[2:])
    assert first[1] + others[0] == texts[1]
    assert len(model.tokenizer.encode(first[1])) == 2
    assert split_texts(model, texts, counts[0]) == (texts[:1], texts[1:])
    assert split_texts(model, texts, 1000) == (texts, [])
    pairs = [("the cat sat", "on a mat"), ("one dog", "ran")]
    assert split_texts(model, pairs, 1) == (pairs[:1], pairs[1:])


def test_a_text_longer_than_the_model_reads_is_split_into_pieces() -> None:
    model = models.decoder(layers=1)
    assert model.tokenizer is not None
    model.sentence = SentenceConfig(max_length=4)
    text = "the cat sat on a mat and one dog ran"
    pieces, rest = split_texts(model, [text, "sun"], 1000)
    assert rest == []
    assert "".join(pieces[:-1]) == text
    assert [len(model.tokenizer.encode(piece)) for piece in pieces[:2]] == [4, 4]


def test_only_line_ends_separate_lines_and_blank_lines_paragraphs(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("one\u2028two\n \t\n\nthree\nfour\n\n", "utf-8")
    assert read_texts(file) == ["one\u2028two", "three\nfour"]
    file.write_text("\none\r\n two\n", "utf-8")
    assert read_texts(file, file) == ["one", " two"] * 2


@pytest.mark.parametrize(("content", "reason"), [(b"", "contains no text"), (b"\xff", "not UTF-8")])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=reason):
        read_file(file)


def test_a_pair_needs_a_tab() -> None:
    assert split_pairs(["a\tb\nc\td"]) == [("a", "b"), ("c", "d")]
    with pytest.raises(InputError, match="text 1 has no tab"):
        split_pairs(["a\tb", "c"])


@pytest.mark.parametrize(
    "content",
    [
        "one\ntwo\n\nthree\n",
        "one\ntwo\nthree",
        "\n\none\ntwo\n\n",
        "one\r\n \t\r\ntwo\r\nthree\r\n",
        "one\n\n\n\n  two\n  three\n\n",
        "one line",
    ],
)
def test_streamed_texts_are_those_of_a_whole_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes(content.encode())
    assert list(stream_texts([file], max_characters=1000)) == read_texts(file)


def test_a_long_text_comes_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 25 + "\n\n" + "word\n" * 4)
    (tmp_path / "b.jsonl").write_text('{"body": "abcdefghijklm"}\n{"body": " "}\n')
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("packed")
    pieces = list(stream_texts([tmp_path], "body", max_characters=10))
    assert pieces[:5] == ["x" * 10, "x" * 10, "xxxxx", "word\nword", "word\nword"]
    assert pieces[5:] == ["abcdefghij", "klm", "packed"]


def test_the_fraction_of_a_stream_follows_the_bytes_of_its_files(tmp_path: Path) -> None:
    paragraphs = "\n\n".join(str(number) * 400 for number in range(100))
    (tmp_path / "a.txt").write_text(paragraphs)
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write(paragraphs)
    with (tmp_path / "c.jsonl").open("w") as rows:
        rows.writelines(f'{{"text": "{number}"}}\n' for number in range(4000))
    parquet.write_table(arrow.table({"text": ["x" * 99] * 500}), tmp_path / "d.parquet")
    sizes = [file.stat().st_size for file in sorted(tmp_path.iterdir())]
    stream = stream_texts([tmp_path], max_characters=1000)
    fractions = [stream.fraction() for _ in stream]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    # In the middle of each file; a compressed one is read in large blocks.
    ends = [sum(sizes[:count]) / sum(sizes) for count in range(5)]
    for place, end, middle in ((0, 1, 50), (2, 3, 2200), (3, 4, 4450)):
        assert fractions[middle] == pytest.approx((ends[place] + ends[end]) / 2, abs=0.05)


def test_a_stream_names_a_file_that_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt does not exist"):
        stream_texts([tmp_path / "none.txt"], max_characters=10)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.txt is not UTF-8"):
        list(stream_texts([tmp_path / "latin.txt"], max_characters=10))
