"""manyheads generate as a person at a terminal meets it."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import build, generate, load, save
from manyheads.cli.commands.generate import _printable
from manyheads.cli.main import main
from tests.decoding.scripted import by_bytes

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small writer by bytes; its letters mean nothing."""
    place = tmp_path_factory.mktemp("models") / "writer"
    model: Any = build("gpt2", layers=1, width=16, heads=2, vocabulary=257, seed=3)
    model.tokenizer = by_bytes()
    save(model, place)
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command that must succeed prints."""
    code = main(["generate", *map(str, arguments)])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    return printed.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a command used wrongly says, after `error: `."""
    code = main(["generate", *map(str, arguments)])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("error: ").rstrip("\n")


def test_one_prompt_is_continued_as_by_generate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, folder, "--prompt", "Hello", "--max-new-tokens", 20)
    assert result == f"{generate(load(folder), 'Hello', max_new_tokens=20).text}\n"


def test_a_token_may_end_a_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = generate(load(folder), "Hello", max_new_tokens=20)
    stop = written.ids[2]
    result = run(
        capsys, folder, "--prompt", "Hello", "--max-new-tokens", 20, "--eos-token-id", stop
    )
    expected = generate(load(folder), "Hello", max_new_tokens=20, eos_token_ids=[stop])
    assert expected.finish_reason == "eos"
    assert result == f"{expected.text}\n"


def test_a_temperature_of_zero_is_refused_by_its_flag(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, folder, "--prompt", "Hello", "--temperature", 0)
    assert said.endswith("leave it out to choose the most likely token.")


def test_many_prompts_are_named_and_come_in_order(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("two\n\nthree\n")
    result = run(capsys, folder, "--text", "one", "--file", lines, "--max-new-tokens", 5)
    written = generate(load(folder), ["one", "two", "three"], max_new_tokens=5)
    named = zip(("one", "two", "three"), written, strict=True)
    assert result == "".join(f"> {name}\n{each.text}\n\n" for name, each in named)


@pytest.mark.parametrize(
    "how",
    [
        ["--temperature", "0.8", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01"],
        ["--top-k", "5"],
        ["--num-beams", "3"],
        ["--repetition-penalty", "1.5", "--stop-string", "zzz"],
    ],
)
def test_json_has_everything_and_a_seed_repeats_it(
    how: list[str], folder: Path, tmp_path: Path
) -> None:
    texts = ["--text", "ä", "--text", "b"]
    arguments = [
        "generate",
        str(folder),
        *texts,
        "--max-new-tokens",
        "6",
        "--logprobs",
        "--seed",
        "1",
    ]
    once, again = tmp_path / "once.json", tmp_path / "again.json"
    assert main([*arguments, *how, "--json", str(once)]) == 0
    first, second = json.loads(once.read_text("utf-8"))
    assert (first["prompt"], second["prompt"]) == ("ä", "b")
    for each in (first, second):
        assert set(each) == {"prompt", "text", "ids", "finish_reason", "logprobs"}
        assert len(each["ids"]) == len(each["logprobs"]) == 6
        assert each["finish_reason"] == "length"
    assert main([*arguments, *how, "--json", str(again)]) == 0
    assert once.read_bytes() == again.read_bytes()


def test_logprobs_are_printable_token_by_token(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, folder, "--text", "a", "--max-new-tokens", 4, "--logprobs")
    written = generate(load(folder), "a", max_new_tokens=4, logprobs=True)
    rows = result[len(written.text or "") + 1 :].splitlines()
    assert [float(row.split()[0]) for row in rows] == pytest.approx(written.logprobs, abs=1e-3)
    assert [int(row.split()[1]) for row in rows] == list(written.ids)


def test_json_goes_to_a_file_and_the_text_to_the_terminal(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, arguments = tmp_path / "written.json", ["--text", "Hello", "--max-new-tokens", "5"]
    plain = run(capsys, folder, *arguments)
    assert main(["generate", str(folder), *arguments, "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == plain
    assert printed.err == f"saved everything to {out}\n"
    [row] = json.loads(out.read_text("utf-8"))
    assert (row["prompt"], f"{row['text']}\n") == ("Hello", plain)


def test_the_default_model_generates(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--text", "The city of", "--max-new-tokens", 3).strip()


def test_chat_speaks_by_the_template(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--chat", "--text", "Hi", "--system", "Be brief", "--max-new-tokens", 8]
    text = generate(load(folder), "s:Be brief;u:Hi;a:", max_new_tokens=8).text
    assert run(capsys, folder, *arguments) == f"{text}\n"
    out = str(tmp_path / "said.json")
    assert main(["generate", str(folder), *map(str, arguments), "--json", out]) == 0
    assert json.loads(Path(out).read_text("utf-8"))[0]["text"] == text


def test_a_conversation_remembers_and_ends_with_an_empty_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder)
    first = generate(model, "u:Hi;a:", max_new_tokens=5).text
    second = generate(model, f"u:Hi;a:{first};u:And?;a:", max_new_tokens=5).text
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAnd?\n\nnever read\n"))
    result = run(capsys, folder, "--chat", "--max-new-tokens", 5)
    assert result == f"{first}\n{second}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert run(capsys, folder, "--chat", "--max-new-tokens", 5) == f"{first}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "manyheads generate needs a prompt: give --text, --file, --ids or --chat."),
        (["--file", "nowhere.txt"], "--file nowhere.txt does not exist: name a file with text."),
        (["--text", "a", "--json", "out.txt"], "--json out.txt does not end in .json: "),
        (["--text", "a", "--temperature", "-1"], "--temperature must be above 0, got -1: "),
        (["--text", "a", "--num-beams", "0"], "--num-beams must be at least 1, got 0."),
        (
            ["--text", "a", "--num-beams", "2", "--top-k", "2"],
            "--num-beams cannot be combined",
        ),
        (
            ["--text", "a", "--num-beams", "2", "--stop-string", "b"],
            "--stop-string cannot be combined",
        ),
        (
            ["--text", "a", "--max-new-tokens", "5000"],
            "a prompt of 1 tokens and --max-new-",
        ),
        (["--text", "a", "--system", "b"], "--system needs --chat: "),
        (["--chat", "--json", "a.json"], "an interactive chat cannot use --json, "),
        (["--text", "a", "--device", "abacus"], "--device must be auto, cpu or cuda, got 'abacus'"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, folder, *arguments).startswith(message)


def test_models_that_cannot_are_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0), tmp_path / "mute")
    said = refused(capsys, tmp_path / "mute", "--text", "a")
    assert said.startswith("a text prompt needs a tokenizer and this model has none: ")
    save(build("tiny-encoder", seed=0), tmp_path / "reader")
    assert "an Encoder cannot generate text: " in refused(
        capsys, tmp_path / "reader", "--text", "a"
    )


def test_on_a_terminal_nothing_moves_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = "a\x1b[31m\nb\tc\x07"
    assert _printable(inputs) == inputs
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert _printable(inputs) == "a\ufffd[31m\nb\tc\ufffd"


def test_help_is_answered_without_torch() -> None:
    script = (
        "import sys; from manyheads.cli.main import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--repetition-penalty" in done.stdout


def test_weights_with_nan_are_named_at_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(folder)
    with torch.no_grad():
        next(iter(model.stack.layers.parameters()))[0] = torch.nan
    save(model, tmp_path / "damaged")
    main(["generate", str(tmp_path / "damaged"), "--text", "a", "--max-new-tokens", "1"])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("note: ")
    assert "NaN or infinity" in line
