"""manyheads adapt as a person at a terminal meets it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GPT2LMHeadModel

from manyheads import build, load, save
from manyheads.checkpoints.companions import read_tokenizer
from manyheads.cli.main import main
from manyheads.surgery import load_adapter
from tests.train.tiny import write_corpus

SHAPE: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 300, "positions": 16}
FILE = """
[adapter]
rank = 4
targets = ["query", "value", "output"]
heads = ["L0H1", "L1H0"]

[data]
train = "corpus.txt"
separator = '''

'''
length = 16
batch = 64

[objective]
kind = "CausalLM"

[optimiser]
rate = 0.02

[run]
folder = "out"
steps = 6
device = "cpu"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path, documents=40)
    model: Any = build("gpt2", **SHAPE, dropout=0.0, seed=0)
    tokenizer = (tmp_path / "tokenizer.json").read_bytes()
    model.tokenizer = read_tokenizer({"tokenizer.json": tokenizer}, tmp_path)
    save(model, tmp_path / "base")
    (tmp_path / "run.toml").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize("base", ["as it is", "nf4"])
def test_an_adapter_is_trained_and_opens_in_peft(
    base: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", f"adapter.base={base}"]
    assert main(["adapt", "base", "run.toml", "--set", "run.steps=3", *settings]) == 0
    said = capsys.readouterr().out
    assert said.endswith("saved to out/adapter as an adapter of gpt2, as peft reads it\n")
    # Started again, it goes on.
    assert main(["adapt", "base", "run.toml", *settings]) == 0
    assert "step 3 of 6, in out" in capsys.readouterr().err
    model: Any = load(folder / "base")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        plain = model(ids).logits
        load_adapter(model, folder / "out" / "adapter")
        adapted = model(ids).logits
        theirs = GPT2LMHeadModel.from_pretrained(folder / "base")
        expected = PeftModel.from_pretrained(theirs, folder / "out" / "adapter")(ids).logits
    assert (adapted - plain).abs().max() > 1e-3
    torch.testing.assert_close(adapted, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("adapter.rang=4", "run.toml: adapter.rang is unknown: write adapter.rank."),
        ("adapter.rank=0", "run.toml: adapter: rank=0 updates nothing: use 1 or more."),
        ("adapter.heads=L7H0", "the model has no head L7H0: its layers begin with L0H0, L1H0."),
        ("model.size=gpt2", "run.toml: [model] is given and the model is base: leave [model] out."),
    ],
)
def test_a_wrong_file_is_refused_before_any_work(
    setting: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapt", "base", "run.toml", "--set", setting]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: {words}"
    assert not (folder / "out").exists()
