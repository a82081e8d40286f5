"""manyheads inspect as a person at a terminal meets it."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads import lens, load
from manyheads.cli.main import main
from tests.cli.heads import TEXT, write_models
from tests.processes import in_processes

# Long enough to be divided between processes.
LONG = " ".join([TEXT] * 10)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("inspect"))


def test_everything_is_printed_and_saved(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "all.json", place / "texts.txt"
    arguments = ["inspect", str(place / "small"), "--file", str(file), "--json", str(out)]
    assert main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "4 heads",
        "2 texts",
        "L0H3",
        "Normalized",
        "after layer 0",
        "dead",
        "Duplicate",
    ):
        assert words in said
    message = json.loads(out.read_text())
    assert message["kind"] == "Inspection"
    assert message["summary"]["heads"][-1] == "L0H3"
    result = lens.load(out)
    assert result.complete
    texts = file.read_text().strip().split("\n\n")
    seen = lens.statistics(load(place / "small"), texts)
    np.testing.assert_allclose(result.statistics.means["entropy"], seen.means["entropy"], rtol=1e-4)


def test_ctrl_c_keeps_what_was_measured(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken_off(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    before = []

    def broken_off_later(*_: Any, **__: Any) -> Any:
        # The statistics are on the page before the kinds begin.
        before.append(capsys.readouterr().out)
        return broken_off()

    monkeypatch.setattr("manyheads.lens.inspection.kinds", broken_off_later)
    out = tmp_path / "part.json"
    arguments = ["inspect", str(place / "small"), "--text", TEXT, "--text", "The cat", "--json"]
    assert main([*arguments, str(out)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "2 texts" in " ".join(before[0].split())
    assert "Normalized" in before[0]
    assert "Interrupted" in said
    result = lens.load(out)
    assert not result.complete
    assert result.statistics.complete
    assert result.kinds is None


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["decoder", "--file", "nowhere.txt"], "nowhere.txt does not exist"),
        (["decoder", "--file", "{place}/empty.txt"], "contains no text"),
        (["decoder", "--text", " "], "--text ' ' is empty"),
        (
            ["decoder", "--text", "a", "--file", "b.txt"],
            "--text, --file and --ids exclude each other",
        ),
        (["decoder", "--json", "out.txt"], "does not end in .json"),
        (["decoder", "--device", "abacus"], "auto, cpu or cuda"),
        (
            ["decoder", "--file", "{place}/texts.txt", "--tokens", "0"],
            "at least 1, got 0",
        ),
        (["decoder", "--tokens", "-5"], "--tokens must be at least 1, got -5"),
        (["bare", "--text", "a"], "has no tokenizer"),
        (["bare", "--ids", "1 x"], "--ids '1 x' must be integers"),
        (["bare", "--ids", "1 2 900000"], "900000"),
        (["decoder", "--ids", "1 2", "--text", "a"], "exclude each other"),
        (["decoder", "--image", "a.png"], "needs a vision model"),
        (["decoder", "--image", "a.png", "--ids", "1"], "--image excludes"),
    ],
)
def test_wrong_use_is_refused(
    place: Path, more: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, *rest = [each.format(place=place) for each in more]
    assert main(["inspect", str(place / model), *rest]) == 2
    assert match in capsys.readouterr().err


def test_a_model_without_tokenizer_is_inspected_on_ids(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(place / "bare"), "--ids", "5 6 7 5 6", "--ids", "8,9,10"]) == 0
    assert "2 texts, 8 tokens" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(place / "bare")]) == 0
    assert "16 texts of random tokens" in " ".join(capsys.readouterr().out.split())


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    assert "manyheads inspect gpt2/ --file book.txt" in capsys.readouterr().out


def test_layers_streamed_from_disk_give_the_same_statistics(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "streamed.json"
    arguments = ["inspect", str(place / "small"), "--stream", "--text", TEXT, "--json", str(out)]
    assert main(arguments) == 0
    assert "Not measured" in capsys.readouterr().out
    seen = lens.statistics(load(place / "small"), [TEXT])
    entropy = lens.load(out).statistics.means["entropy"]
    np.testing.assert_array_equal(entropy, seen.means["entropy"])
    assert main([*arguments, "--syntax", str(place / "texts.txt")]) != 0
    assert "--stream" in capsys.readouterr().err


def test_processes_that_share_the_texts_save_the_same_statistics(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shared.json"
    arguments = ["inspect", str(place / "small"), "--context-parallel", "--text", LONG]
    assert main(arguments) == 2
    assert "torchrun" in capfd.readouterr().err

    def inspect() -> None:
        os.environ["WORLD_SIZE"] = "2"
        assert main([*arguments, "--json", str(out), "--device", "cpu"]) == 0

    assert in_processes(2, inspect)
    assert capfd.readouterr().out.count("Dead heads") == 1
    expected = lens.statistics(load(place / "small"), [LONG], progress=False)
    result = lens.load(out).statistics
    for name in expected.names:
        np.testing.assert_allclose(result.means[name], expected.means[name], atol=1e-4)
