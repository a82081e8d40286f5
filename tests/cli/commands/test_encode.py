"""manyheads encode as a person at a terminal meets it."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from manyheads import encode, load, save
from manyheads.cli.main import main
from tests.encoding.tiny import small

TEXTS = ["the cat sat", "", "on the mat"]
SAID = [word for text in TEXTS for word in ("--text", text)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(small(positions=24), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS) + "\n", "utf-8")
    return file


def test_each_text_of_a_file_becomes_a_row_and_blank_lines_none(
    folder: Path, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "vectors.npy"
    assert main(["encode", str(folder), "--file", str(lines), "-o", str(out)]) == 0
    expected = encode(load(folder), ["the cat sat", "on the mat"]).numpy()
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)
    assert capsys.readouterr().out.startswith("2 texts, 25 tokens in ")


def test_a_file_without_a_text_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, out = tmp_path / "empty.txt", tmp_path / "vectors.npy"
    empty.touch()
    assert main(["encode", str(folder), "--file", str(empty), "-o", str(out)]) == 2
    assert "empty.txt contains no text" in capsys.readouterr().err
    assert not out.exists()


def test_every_kind_of_file_holds_the_same(folder: Path, tmp_path: Path) -> None:
    for suffix in (".npy", ".safetensors", ".jsonl"):
        out = str(tmp_path / f"vectors{suffix}")
        assert main(["encode", str(folder), *SAID, "--out", out]) == 0
    rows = [json.loads(line) for line in (tmp_path / "vectors.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    vectors = torch.tensor([row["vector"] for row in rows])
    assert torch.equal(vectors, load_file(tmp_path / "vectors.safetensors")["vectors"])
    assert torch.equal(vectors, torch.from_numpy(np.load(tmp_path / "vectors.npy")))


def test_pooling_and_length_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.npy"
    arguments = ["--pooling", "cls", "--normalize", "--batch-tokens", "5", "--device", "cpu"]
    assert main(["encode", str(folder), *SAID, "--out", str(out), *arguments]) == 0
    expected = encode(load(folder), TEXTS, pooling="cls", normalize=True)
    np.testing.assert_allclose(np.load(out), expected.numpy(), atol=1e-6)


def test_weights_may_be_halved_while_encoding(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.npy"
    message = ["--out", str(out), "--dtype", "bfloat16", "--no-normalize"]
    assert main(["encode", str(folder), "--text", "the cat", *message]) == 0
    assert np.load(out).dtype == np.float32


def test_only_line_ends_separate_texts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\u2028still one\ntwo"))
    out = tmp_path / "vectors.jsonl"
    assert main(["encode", str(folder), "--file", "-", "--out", str(out)]) == 0
    assert len(out.read_text("utf-8").splitlines()) >= 2
    rows = [json.loads(line) for line in out.read_text("utf-8").split("\n")[:-1]]
    assert [row["text"] for row in rows] == ["one\u2028still one", "two"]


def test_truncated_texts_are_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "vectors.npy")
    assert main(["encode", str(folder), "--text", "a" * 40, "--text", "b", "--out", out]) == 0
    assert "1 of 2 texts were truncated to 24 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", "a"], "add --out vectors.npy."),
        (["--out", "x.npy"], "--text, --file or --ids: give one of them."),
        (["--text", "a", "--out", "x.txt"], "x.txt"),
        (["--text", "a", "--out", "no/x.npy"], "there is no folder no: "),
        (
            ["--file", "broken.txt", "--out", "x.npy"],
            "broken.txt is not UTF-8: invalid start byte at byte 1",
        ),
        (
            ["--text", "a", "--out", "x.npy", "--normalize", "--no-normalize"],
            "exclude each other",
        ),
        (["--text", "a", "--out", "x.npy", "--batch-tokens", "0"], "--batch-tokens"),
        (
            ["--text", "a", "--out", "x.npy", "--device", "cuda"],
            "torch finds no CUDA device: use cpu",
        ),
    ],
)
def test_a_wrong_option_is_refused_in_one_line_and_nothing_is_written(
    arguments: list[str],
    said: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("broken.txt").write_bytes(b"a\xff")
    before = sorted(tmp_path.iterdir())
    assert main(["encode", str(folder), *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert said in printed
    assert printed.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_file_is_refused_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "vectors.npy")
    missing = tmp_path / "nothing.txt"
    assert main(["encode", str(folder), "--file", str(missing), "--out", out]) == 2
    said = f"error: --file {missing} does not exist: name a file with text.\n"
    assert capsys.readouterr().err == said


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "vectors.npy"
    out.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(out))

    monkeypatch.setattr(np, "save", full)
    before = sorted(tmp_path.iterdir())
    assert main(["encode", str(folder), "--text", "a", "--out", str(out)]) == 1
    assert out.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == before


def test_help_comes_before_torch_is_loaded() -> None:
    script = (
        "import sys\nfrom manyheads.cli.main import main\n"
        "try: main(['encode', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0
