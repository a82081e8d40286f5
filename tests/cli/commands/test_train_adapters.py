"""manyheads adapt as a person at a terminal meets it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GPT2LMHeadModel

from manyheads import build, load, save, with_classes
from manyheads.checkpoints.side_files import read_tokenizer
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
max_length = 16
batch = 64

[objective]
kind = "CausalLM"

[optimizer]
lr = 0.02

[run]
folder = "out"
steps = 6
device = "cpu"
"""

CLASSES = """
[model]
classes = 2

[adapter]
merged = true

[data]
kind = "labeled"
train = "moods.jsonl"
validation = "moods.jsonl"
max_length = 16
batch = 64

[objective]
kind = "SequenceClassification"

[optimizer]
lr = 0.05

[run]
folder = "out"
steps = 12
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
    assert said.endswith("saved to out/adapter as an adapter of gpt2, which peft can open\n")
    # Started again, it goes on.
    assert main(["adapt", "base", "run.toml", *settings]) == 0
    assert "resuming at step 3 of 6 in out" in capsys.readouterr().err
    model: Any = load(folder / "base")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        plain = model(ids).logits
        load_adapter(model, folder / "out" / "adapter")
        adapted = model(ids).logits
        peer = GPT2LMHeadModel.from_pretrained(folder / "base")
        expected = PeftModel.from_pretrained(peer, folder / "out" / "adapter")(ids).logits
    assert (adapted - plain).abs().max() > 1e-3
    torch.testing.assert_close(adapted, expected, atol=1e-5, rtol=0)


def test_a_new_head_is_trained_with_the_adapter(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": text, "label": text} for text in ("sun", "cat")] * 20
    (folder / "moods.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.toml").write_text(CLASSES)
    assert main(["adapt", "base", "run.toml"]) == 0
    assert "accuracy 1.0000" in capsys.readouterr().err
    model = with_classes(load(folder / "base"), 2)
    load_adapter(model, folder / "out" / "adapter")
    merged = load(folder / "out" / "model")
    assert merged.class_names == ("cat", "sun")
    ids = torch.arange(5)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, merged(ids).logits)
    assert main(["adapt", "base", "run.toml", "--set", "model.classes=3", "--fresh"]) == 2
    only = CLASSES.replace("[adapter]\nmerged = true", '[freeze]\nall_except = ["L0H1"]')
    (folder / "run.toml").write_text(only)
    capsys.readouterr()
    assert main(["adapt", "base", "run.toml", "--fresh"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: run.toml: model.classes is set and only L0H1 would be trained, not the new "
        "classes: use freeze.heads, or [adapter]."
    )


def test_merged_the_model_opens_by_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--set", "adapter.merged=true", "--set", "run.steps=2"]
    assert main(["adapt", "base", "run.toml", *wanted]) == 0
    said = capsys.readouterr().out
    assert "as an adapter of gpt2, merged into out/model, which peft can open" in said
    model: Any = load("base")
    load_adapter(model, folder / "out" / "adapter")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            load("out/model")(ids).logits, model(ids).logits, atol=1e-5, rtol=0
        )
    assert main(["generate", "out/model", "--text", "the cat", "--max-new-tokens", "3"]) == 0


GATES = """
[[regularizer]]
kind = "L0Gates"
weight = 5.0
start = 0.5
"""


def test_gates_stay_in_the_merged_model_and_no_adapter_is_left_without_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.toml").write_text(FILE + GATES)
    wanted = ["--set", "adapter.merged=true", "--set", "optimizer.lr=0.3"]
    assert main(["adapt", "base", "run.toml", *wanted]) == 0
    assert "saved to out/model as gpt2, which transformers can open" in capsys.readouterr().out
    before, after = load("base").state_dict(), load("out/model").state_dict()
    # A head that has no adapter is what it was, but for its gate.
    name, own = "stack.layers.0.attention.output.weight", slice(0, 8)
    gates = after[name][:, own] / before[name][:, own]
    assert float(gates.max() - gates.min()) < 1e-4
    assert 0 <= float(gates.mean()) < 0.9
    assert not (folder / "out" / "adapter").exists()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "L0Gates",
            "L0Gates closes heads of the model, which the files of an adapter cannot store: set "
            "adapter.merged=true, which saves the whole model, or leave L0Gates out.",
        ),
        (
            "L1Scales",
            "L1Scales needs trainable head scales, and an adapter does not train them: leave it "
            "out.",
        ),
    ],
)
def test_what_an_adapter_cannot_hold_is_refused_before_any_work(
    kind: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.toml").write_text(f'{FILE}\n[[regularizer]]\nkind = "{kind}"\nweight = 1.0\n')
    assert main(["adapt", "base", "run.toml"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: run.toml: {words}"
    assert not (folder / "out").exists()


def learning(folder: Path, which: str, *more: str) -> dict[str, torch.Tensor]:
    """How far every weight moves in a run of a few steps."""
    text = FILE[FILE.index("[data]") :]
    (folder / "learn.toml").write_text(f"{text}\n[freeze]\n{which}\n")
    assert main(["adapt", "base", "learn.toml", *more]) == 0
    before, after = load("base").state_dict(), load("out/model").state_dict()
    return {name: (after[name] - before[name]).abs() for name in before}


def own_rows(moved: torch.Tensor, head: int) -> torch.Tensor:
    """Of a fused projection the rows of queries, keys and values of one of two heads."""
    return moved.unflatten(0, (3, 2, 8))[:, head]


def test_only_chosen_heads_are_trained_even_when_resumed(folder: Path) -> None:
    learning(folder, 'all_except = ["L0H1"]', "--set", "run.steps=3")
    moved = learning(folder, 'all_except = ["L0H1"]')
    project = moved.pop("stack.layers.0.attention.project.weight")
    assert float(own_rows(project, 1).min()) > 0
    assert float(own_rows(project, 0).max()) == 0
    output = moved.pop("stack.layers.0.attention.output.weight")
    assert float(output[:, 8:].min()) > 0
    assert float(output[:, :8].max()) == 0
    moved.pop("stack.layers.0.attention.project.bias")
    assert not any(bool(each.any()) for each in moved.values())


def test_all_but_chosen_heads_are_trained(folder: Path) -> None:
    moved = learning(folder, 'heads = ["L0H1"]')
    project = moved["stack.layers.0.attention.project.weight"]
    assert float(own_rows(project, 1).max()) == 0
    assert float(own_rows(project, 0).min()) > 0
    assert all(bool(each.any()) for each in moved.values())


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ('all_except = ["L9H0"]', "there is no head L9H0: use L0H0 to L1H1."),
        (
            "",
            "learn.toml: freeze: [freeze] needs heads or all_except, got heads=[] and "
            "all_except=[]: "
            'give one of them, such as all_except = ["L0H1"].',
        ),
        (
            f'all_except = ["L0H1"]\n{GATES}',
            "learn.toml: L0Gates may close any head, also those that [freeze] keeps unchanged: "
            "leave one of them out.",
        ),
        ('haeds = ["L0H0"]', "learn.toml: freeze.haeds is not a known key: use freeze.heads."),
    ],
)
def test_wrong_heads_to_train_are_refused(
    which: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "learn.toml").write_text(f"{FILE[FILE.index('[data]') :]}\n[freeze]\n{which}\n")
    assert main(["adapt", "base", "learn.toml"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: {words}"
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("adapter.rang=4", "run.toml: adapter.rang is not a known key: use adapter.rank."),
        ("adapter.rank=0", "run.toml: adapter: rank must be at least 1, got 0."),
        ("adapter.heads=L7H0", "there is no head L7H0: use L0H0 to L1H1."),
        (
            "freeze.all_except=L0H1",
            "run.toml: [adapter] and [freeze] are both set: leave one of them out.",
        ),
        (
            "run.distributed=fsdp",
            "run.toml: run.distributed='fsdp' cannot be used with adapters or frozen heads: "
            "use 'ddp'.",
        ),
        (
            "model.size=gpt2",
            "run.toml: [model] is set, and the model is base: keep only classes in it.",
        ),
    ],
)
def test_a_wrong_file_is_refused_before_any_work(
    setting: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapt", "base", "run.toml", "--set", setting]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: {words}"
    assert not (folder / "out").exists()
