"""manyheads tokenizer as a person at a terminal meets it."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from manyheads import load
from manyheads.cli.main import main
from tests.train.tiny import write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 50)
    (tmp_path / "b.jsonl").write_text('{"text": "the dog"}\n{"text": "the dog"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\n')
    return tmp_path


def test_a_tokenizer_is_trained_and_written(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = corpus / "tokenizer.json"
    files = [str(corpus / "a.txt"), str(corpus / "b.jsonl")]
    assert main(["tokenizer", *files, "-o", str(out), "--vocab-size", "300"]) == 0
    learnt = Tokenizer.from_file(str(out))
    size = learnt.get_vocab_size()
    assert capsys.readouterr().out == f"a vocabulary of {size:,} from 2 files: {out}\n"
    assert learnt.decode(learnt.encode("the cat ß").ids) == "the cat ß"
    assert sorted(file.name for file in corpus.iterdir()) == [
        "a.txt",
        "b.jsonl",
        "bad.jsonl",
        "tokenizer.json",
    ]


def test_wordpiece_may_keep_capitals(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "c.txt").write_text("The The the the")
    out = corpus / "t.json"
    arguments = [str(corpus / "c.txt"), "-o", str(out), "--kind", "wordpiece", "--cased"]
    assert main(["tokenizer", *arguments]) == 0
    assert "from 1 file: " in capsys.readouterr().out
    assert Tokenizer.from_file(str(out)).encode("The").tokens == ["[CLS]", "The", "[SEP]"]


@pytest.mark.parametrize("kind", ["bytes", "wordpiece"])
def test_a_masked_encoder_is_trained_by_commands_alone(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path, documents=40)
    special = ["--special-token", "[MASK]"] if kind == "bytes" else []
    learn = ["tokenizer", "corpus.txt", "--kind", kind, "--vocab-size", "300", *special]
    assert main(learn) == 0
    (tmp_path / "run.toml").write_text("""
[model]
size = "modernbert-base"
change = { layers = 2, width = 16, heads = 2, hidden = 16, vocabulary = 300 }

[data]
train = "corpus.txt"
tokenizer = "tokenizer.json"
max_length = 16
batch = 64

[objective]
kind = "MaskedLM"

[run]
folder = "out"
steps = 2
device = "cpu"
""")
    assert main(["train", "run.toml"]) == 0
    assert "saved to out/model as modernbert" in capsys.readouterr().out
    model = load("out/model")
    mask = Tokenizer.from_file("tokenizer.json").token_to_id("[MASK]")
    assert model.tokenizer.encode("the cat [MASK]").ids.count(mask) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.txt"], "no.txt does not exist: check the path."),
        (["{}/*.md"], "no file matches {}/*.md: check the folder and the pattern."),
        (["{}/bad.jsonl"], "{}/bad.jsonl, line 2 has no field 'text': use one of: body."),
        (["{}/a.txt", "--vocab-size", "9"], "--vocab-size 9 is too small"),
        (
            ["{}/a.txt", "-o", "{}/no/t.json"],
            "--out: the folder {}/no does not exist: ",
        ),
        (["{}/a.txt", "-o", "{}"], "--out {} is a folder: name a file in it."),
        (
            ["{}/a.txt", "--special-token", "<|end|>"],
            "the special token '<|end|>' occurs twice: remove one.",
        ),
        (
            ["{}/a.txt", "--special-token", ""],
            "special token 0 is '': use a name such as [MASK].",
        ),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], message: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [argument.replace("{}", str(corpus)) for argument in arguments]
    assert main(["tokenizer", *inputs]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message.replace('{}', str(corpus))}")
    assert printed.err.count("\n") == 1


def test_help_is_answered_without_torch() -> None:
    script = (
        "import sys; from manyheads.cli.main import main\n"
        "try: main(['tokenizer', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--kind" in done.stdout
