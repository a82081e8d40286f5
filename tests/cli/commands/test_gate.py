"""manyheads gate as a person at a terminal meets it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import build, load, save
from manyheads.checkpoints.side_files import read_tokenizer
from manyheads.cli.main import main
from tests.train.tiny import write_corpus

SHAPE: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 300, "positions": 16}
FAST = ("--batch-tokens", "64", "--lr", "0.3")
SLOW = ("--batch-tokens", "64", "--lr", "0.01")
ASKED = ["gate", "base", "--file", "corpus.txt", "-o", "gated", "--max-length", "16"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path, documents=60)
    model: Any = build("gpt2", **SHAPE, dropout=0.0, seed=0)
    tokenizer = (tmp_path / "tokenizer.json").read_bytes()
    model.tokenizer = read_tokenizer({"tokenizer.json": tokenizer}, tmp_path)
    save(model, tmp_path / "base")
    return tmp_path


def test_gates_are_trained_and_the_numbers_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, "--steps", "6", *FAST, "--layers", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["before", "after"]
    figures = {
        line[:26].strip(): [float(each) for each in line[26:].split()] for line in lines[1:4]
    }
    assert set(figures) == {"attention to first token", "largest activation", "perplexity"}
    assert all(before != after for before, after in figures.values())
    assert "34 parameters trained" in lines[4]
    base, gated = (load(folder / name) for name in ("base", "gated"))
    assert [len(layer.attention.inner.gates) for layer in gated.config.stack.layers] == [1, 0]
    # What was there before rests, but for the doubling that undoes the gate.
    one, other = (model.stack.layers[0].attention for model in (base, gated))
    assert torch.equal(2 * one.output.weight, other.output.weight)
    assert torch.equal(one.project.weight[:16], other.project.weight[:16])
    assert other.project.weight[16:18].any()


def test_all_weights_can_be_trained_with_the_gates(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = ["--json", "figures.json", "--shared"]
    assert main([*ASKED, "--steps", "8", "--lr", "0.01", "--train", "all", *message]) == 0
    words = capsys.readouterr().out.splitlines()[3].split()
    assert float(words[2]) < float(words[1])
    assert (folder / "gated" / "config.json").exists()
    figures = json.loads((folder / "figures.json").read_text("utf-8"))
    assert figures["after"]["perplexity"] == pytest.approx(float(words[2]), abs=1e-3)
    [gate] = load(folder / "gated").config.stack.layers[0].attention.inner.gates
    assert gate.heads == "shared"


def test_an_encoder_is_scored_by_masked_words(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = SHAPE | {"vocabulary": 301, "hidden": 32, "dropout": 0.0}
    model: Any = build("bert-base", **shape, seed=0)
    model.tokenizer = load(folder / "base").tokenizer
    model.tokenizer.add_special_tokens(["[MASK]"])
    save(model, folder / "base")
    arguments = [*ASKED, "--steps", "8", *SLOW, "--train", "all"]
    assert main(arguments) == 0
    before, after = map(float, capsys.readouterr().out.splitlines()[3].split()[1:])
    assert after < before == pytest.approx(300, rel=0.2)
    assert load(folder / "gated").config.stack.layers[0].attention.inner.gates


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--layers", "5"], "layer 5 of main has no attention: use 0, 1."),
        (["--held-out", "0"], "--held-out must be in (0, 0.5], got 0."),
        (["--device", "cuda"], "torch finds no CUDA device: use cpu."),
        (["--steps", "0"], "--steps must be at least 1, got 0."),
        (["--batch-tokens", "0"], "--batch-tokens must be at least 1, got 0."),
        (["-o", "corpus.txt"], "--out corpus.txt is a file: name a folder."),
    ],
)
def test_wrong_options_are_refused(
    more: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *more]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith(words)
    assert not (folder / "gated").exists()
