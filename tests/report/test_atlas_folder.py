from dataclasses import replace
from pathlib import Path

import pytest

from manyheads.errors import InputError
from manyheads.lens.corpus.atlas import Atlas
from manyheads.report.atlas_folder import (
    STATE,
    AtlasFiles,
    atlas_files,
    check_atlas_folder,
    file_name,
    read_atlas,
    read_chunk,
    script,
    standard_places,
    write_atlas,
)
from tests.report import small


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return small.atlas()


@pytest.fixture(scope="module")
def files(atlas: Atlas) -> AtlasFiles:
    return atlas_files(atlas, name="a <b>model</b>", corpus="words", origin="Today.")


def test_the_index_has_every_measure_of_every_head(atlas: Atlas, files: AtlasFiles) -> None:
    names = [measure["name"] for measure in files.index["measures"]]
    assert names[0] == "loss_change"
    for head in files.index["heads"]:
        values = dict(zip(names, head["values"], strict=True))
        for name in ("entropy", "previous_token"):
            column = atlas.inspection.statistics[name]
            assert values[name] == pytest.approx(float(column.of(head["name"])), rel=1e-3)
        assert all(0 <= part <= 1 for part in head["place"])


def test_an_example_is_found_again_in_the_files(atlas: Atlas, files: AtlasFiles) -> None:
    example, entry = atlas.of("L1H0").sharpest[0], files.heads["L1H0"]["examples"][0]
    words = [files.tokens[token] for token in files.texts[entry["text"]]["main"]]
    assert words == atlas.words(example.text)
    rows = dict(zip(range(entry["start"], len(words)), entry["counts"], strict=False))
    first = sum(count for query, count in rows.items() if query < entry["query"])
    assert entry["weights"][first] == pytest.approx(1000 * example.activation, abs=1)
    keys = [key for query, key, _ in example.links() if query == example.query]
    assert entry["keys"][first : first + rows[entry["query"]]] == keys


def test_an_atlas_is_read_as_it_was_written(files: AtlasFiles, tmp_path: Path) -> None:
    size = write_atlas(files, tmp_path)
    assert size == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    [again] = read_atlas(tmp_path)
    assert again.index == files.index
    assert again.heads == files.heads
    assert again.texts == files.texts
    assert again.tokens == files.tokens


def test_several_atlases_share_a_page_and_a_map(files: AtlasFiles, tmp_path: Path) -> None:
    moved = [
        head | {"values": [None if value is None else 2 * value for value in head["values"]]}
        for head in files.index["heads"]
    ]
    later = replace(files, index=files.index | {"name": "later", "heads": moved})
    write_atlas([files, later], tmp_path)
    first, second = read_atlas(tmp_path)
    assert (first.index["name"], second.index["name"]) == ("a <b>model</b>", "later")
    assert second.heads == files.heads
    places = [head["place"] for atlas in (first, second) for head in atlas.index["heads"]]
    assert {0.0, 1.0} <= {part for place in places for part in place}
    assert first.index["heads"][0]["place"] != second.index["heads"][0]["place"]
    # What only the earlier atlases had is removed.
    write_atlas(files, tmp_path)
    assert not list(tmp_path.glob("1/**/*.js"))
    assert len(read_atlas(tmp_path)) == 1


def test_a_chunk_holds_no_markup_and_no_half_letters(files: AtlasFiles, tmp_path: Path) -> None:
    hostile = ["</script><script>alert(1)</script>", "\u2028<!--", "\ud83d"]
    texts = {0: {"main": [0, 1, 2]}}
    write_atlas(replace(files, tokens=hostile, texts=texts), tmp_path)
    content = (tmp_path / "tokens.js").read_text("utf-8")
    assert "<" not in content
    assert "\u2028" not in content
    assert read_chunk(tmp_path / "tokens.js") == [*hostile[:2], "?"]


def test_a_head_of_a_stack_has_a_plain_file_name() -> None:
    assert file_name("decoder L2H0 cross") == "decoder-L2H0-cross.js"


def test_places_keep_apart_what_differs() -> None:
    places = standard_places([[0.0, 5.0, None], [1.0, 5.0, 2.0], [4.0, 5.0, 3.0]])
    assert sorted(place[0] for place in places) in ([0.0, 0.25, 1.0], [0.0, 0.75, 1.0])
    assert standard_places([[1.0], [1.0]]) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("alert(1)", "is not a part of an atlas"),
        ('manyheads("index",{"format":1);\n', "cannot be read"),
        ('manyheads("index",[]);\n', "is no atlas"),
        (script("index", {"format": 99, "atlases": []}), "has the format 99"),
        (script("index", {"format": 1, "atlases": [{"folder": ""}]}), "is no atlas"),
    ],
)
def test_a_damaged_folder_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "atlas.js").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_atlas(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_with_other_content_is_left_alone(tmp_path: Path) -> None:
    check_atlas_folder(tmp_path)
    check_atlas_folder(tmp_path / "new")
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="name another folder"):
        check_atlas_folder(tmp_path)
    with pytest.raises(InputError, match="is a file"):
        check_atlas_folder(tmp_path / "thesis.tex")
    (tmp_path / STATE).write_bytes(b"")
    check_atlas_folder(tmp_path)
