import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyheads.checkpoints.folder import save
from manyheads.cli.main import main
from manyheads.lens.corpus import corpus_pass
from manyheads.report.atlas_folder import STATE, read_atlas
from tests.report.small import EVIL, WORDS, decoder, quick_kinds

OPTIONS = ["--by", "none", "--max-length", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("atlas")
    save(decoder(), place / "model")
    texts = [EVIL + WORDS, *(WORDS * count for count in range(1, 6))]
    (place / "corpus.txt").write_text("\n\n".join(texts), encoding="utf-8")
    return place


@pytest.fixture(autouse=True)
def _quick_kinds() -> Iterator[None]:
    with quick_kinds():
        yield


def test_a_corpus_becomes_a_page_and_files_of_headvis(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, corpus, out = str(folder / "model"), str(folder / "corpus.txt"), tmp_path / "atlas"
    headvis = ["--headvis", str(tmp_path / "headvis")]
    assert main(["atlas", model, "--corpus", corpus, "-o", str(out), *OPTIONS, *headvis]) == 0
    [files] = read_atlas(out)
    assert files.index["corpus"]["name"] == "corpus.txt"
    assert files.index["corpus"]["texts"] == 6
    assert (out / "index.html").is_file()
    assert not (out / STATE).exists()
    assert f"saved the atlas to {out}" in capsys.readouterr().out

    again = tmp_path / "again"
    assert main(["atlas", "--from-headvis", headvis[1], "-o", str(again)]) == 0
    assert [*read_atlas(again)[0].heads] == [*files.heads]

    both = tmp_path / "both"
    assert main(["atlas", "--join", str(out), str(again), "-o", str(both)]) == 0
    assert [atlas.index["name"] for atlas in read_atlas(both)] == ["atlas", "again"]


def test_a_killed_command_continues_without_loss(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_pass, "TEXTS_PER_CHUNK", 2)
    monkeypatch.setattr(corpus_pass, "SECONDS_BETWEEN_SAVES", 0.0)
    words = ["atlas", str(folder / "model"), "--corpus", str(folder / "corpus.txt"), *OPTIONS]
    read, chunks = corpus_pass._ChunkReader.read, 0
    fatal = 3

    def killed(reader: corpus_pass._ChunkReader, chunk: list[str], *rest: Any) -> Any:
        nonlocal chunks
        chunks += 1
        if chunks == fatal:
            raise SystemExit(137)
        return read(reader, chunk, *rest)

    assert main([*words, "-o", str(tmp_path / "whole")]) == 0
    monkeypatch.setattr(corpus_pass._ChunkReader, "read", killed)
    with pytest.raises(SystemExit):
        main([*words, "-o", str(tmp_path / "killed")])
    assert (tmp_path / "killed" / STATE).is_file()
    assert main([*words, "-o", str(tmp_path / "killed")]) == 0
    # Two chunks were read before, the third one twice.
    assert chunks == 4
    assert _content(tmp_path / "killed") == _content(tmp_path / "whole")


def _content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_rows_are_read_by_their_column(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": WORDS}) + "\n" for _ in range(3)))
    words = ["atlas", str(folder / "model"), "--corpus", str(rows), "--text-column", "body"]
    few = ["--sharpest", "2", "--per-tenth", "1"]
    assert main([*words, "-o", str(tmp_path / "atlas"), *OPTIONS, *few]) == 0
    [atlas] = read_atlas(tmp_path / "atlas")
    assert atlas.index["corpus"]["texts"] == 3
    for head in atlas.heads.values():
        tenths = [example["decile"] for example in head["examples"]]
        assert tenths.count(0) == 2
        assert max(map(tenths.count, range(1, 11))) <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--corpus", "none.txt"], "none.txt does not exist"),
        (["--corpus", "corpus.txt", "--max-length", "1"], "--max-length must be at least 2"),
        (["--corpus", "corpus.txt", "--sharpest", "0"], "--sharpest must be at least 1"),
        (["--corpus", "corpus.txt", "--join", "a"], "exclude each other"),
        (["--from-headvis", "model"], "name a folder of HeadVis"),
        (["--join", "model"], "cannot be read"),
        (["--corpus", "corpus.txt", "-o", "model"], "name another folder"),
        (["--corpus", "corpus.txt", "--headvis", "corpus.txt"], "is a file"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    out = [] if "-o" in options else ["-o", str(tmp_path / "atlas")]
    assert main(["atlas", "nowhere", *options, *out]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "atlas").exists()
