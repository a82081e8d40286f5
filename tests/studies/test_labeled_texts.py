"""Labels and tags of texts are read as they were written, and always in the same order."""

import gzip
from pathlib import Path

import pytest

from manyheads.errors import InputError
from studies import labeled_texts
from studies.labeled_texts import read_labeled, read_tagged


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHEADS_STUDY_DATA", str(tmp_path))
    labeled_texts._lines.cache_clear()
    return tmp_path


def test_neutral_reviews_are_left_out(folder: Path) -> None:
    lines = "1\t2.5\tA splash.\n2\t-0.6\tToo tepid\n3\t0.1\tA film.\n"
    (folder / "reviews.gz").write_bytes(gzip.compress(lines.encode()))
    assert sorted(read_labeled("reviews")) == [("A splash.", 1), ("Too tepid", 0)]


def test_entities_have_the_types_of_their_words(folder: Path) -> None:
    lines = "See\tO\nState\tB-creative-work\nBuilding\tI-creative-work\n\t\nyes\tO\n"
    (folder / "wnut17.gz").write_bytes(gzip.compress(lines.encode()))
    work = "creative-work"
    assert sorted(read_tagged("wnut17")) == [
        (["See", "State", "Building"], ["O", work, work]),
        (["yes"], ["O"]),
    ]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("read", "source"), [(read_labeled, "reviews"), (read_tagged, "wnut17")])
def test_a_missing_file_is_named_with_what_to_do(read: object, source: str) -> None:
    assert callable(read)
    with pytest.raises(InputError, match=rf"{source}\.gz is missing.*labeled_texts\.py"):
        read(source)


def test_topics_have_two_classes_and_words_of_code() -> None:
    texts, tagged = read_labeled("topics"), read_tagged("topics")
    assert {label for _, label in texts} == {0, 1}
    assert texts == read_labeled("topics")
    code = {
        word
        for words, tags in tagged
        for word, tag in zip(words, tags, strict=True)
        if tag == "code"
    }
    assert "yield" in code
    assert "The" not in code
