"""manyheads prune as a person at a terminal meets it."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from manyheads import build, load, save
from manyheads.checkpoints.side_files import read_tokenizer
from manyheads.cli.main import main
from manyheads.lens.causal import evaluate
from manyheads.surgery import origins
from tests.train.tiny import write_corpus


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("prune")
    write_corpus(folder, documents=12)
    model = build("gpt2", layers=2, width=16, heads=4, vocabulary=300, positions=64, seed=0)
    files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    model.tokenizer = read_tokenizer(files, folder)
    save(model, folder / "model")
    return folder


def prune(place: Path, *more: str) -> int:
    text = str(place / "corpus.txt")
    return main(["prune", str(place / "model"), "--file", text, "--tokens", "100", *more])


def test_a_fraction_is_removed_and_everything_is_printed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    assert prune(place, "--fraction", "0.5", "--recover", "2", "-o", str(out)) == 0
    said = capsys.readouterr().out
    assert "4 of 8 heads removed by ablation" in said
    for word in ("the full model", "±", "parameters", "tokens per second", "after recovery"):
        assert word in said
    small = load(out)
    assert len(origins(small)) == 4
    assert small.tokenizer is not None
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(origins(load(place / "model"))) == 8


def test_recovery_on_the_measured_texts_is_noted(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(place, "--fraction", "0.5", "--recover", "1", "--tokens", "100000") == 0
    assert "recovery trains on them too" in capsys.readouterr().err
    assert prune(place, "--fraction", "0.5", "--recover", "1") == 0
    assert "recovery trains on them too" not in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    within = place / "corpus.txt" / "small"
    for wanted in (["-o", str(within)], ["--json", str(within.with_suffix(".json"))]):
        assert prune(place, "--fraction", "0.5", *wanted) == 2
        said = capsys.readouterr()
        assert "choose another folder" in said.err
        assert not said.out


def test_what_is_not_known_of_one_text_is_null_in_json(place: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("the cat sat on a mat")
    out = tmp_path / "one.json"
    arguments = [
        "prune",
        str(place / "model"),
        "--file",
        str(tmp_path / "one.txt"),
        "--fraction",
        "0.5",
    ]
    assert main([*arguments, "--json", str(out)]) == 0
    assert "NaN" not in out.read_text()
    assert json.loads(out.read_text())["curve"][0]["change_error"] is None


@pytest.mark.parametrize("way", ["model", "nowhere"])
def test_the_model_is_not_written_over(
    way: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(place, "--fraction", "0.5", "-o", str(place / way / ".." / "model")) == 2
    assert "would overwrite the model itself: name another folder." in capsys.readouterr().err


def test_numbers_come_as_json(place: Path, tmp_path: Path) -> None:
    picture, numbers = tmp_path / "curve.png", tmp_path / "numbers.json"
    wanted = ["--fraction", "0.25", "--by", "random", "--picture", str(picture)]
    assert prune(place, *wanted, "--json", str(numbers)) == 0
    message = json.loads(numbers.read_text("utf-8"))
    assert len(message["removed"]) == 2
    assert message["after"]["parameters"] < message["before"]["parameters"]
    assert message["pruned"] == pytest.approx(message["curve"][-1]["value"], abs=1e-5)
    assert picture.exists()


def test_neurons_are_pruned_and_named_by_layer(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, numbers = tmp_path / "small", tmp_path / "numbers.json"
    assert (
        prune(
            place, "--what", "neurons", "--fraction", "0.25", "-o", str(out), "--json", str(numbers)
        )
        == 0
    )
    assert "32 of 128 neurons removed by gradient" in capsys.readouterr().out
    message = json.loads(numbers.read_text("utf-8"))
    assert message["neurons"] == 128
    assert sum(map(len, message["removed"].values())) == 32
    assert message["pruned"] == pytest.approx(message["curve"][-1]["value"], abs=1e-5)
    assert (out / "curve.png").exists()
    hidden = [layer.feedforward.inner.hidden for layer in load(out).config.stack.layers]
    assert sum(hidden) == 96


def test_layers_are_pruned(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small"
    assert prune(place, "--what", "layers", "--fraction", "0.5", "-o", str(out)) == 0
    said = capsys.readouterr().out
    assert "1 of 2 layers removed by ablation" in said
    assert "layer " in said
    assert len(load(out).stack.layers) == 1


def test_gates_are_trained_for_the_number_of_steps(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(place, "--fraction", "0.5", "--by", "l0", "--gate-steps", "3") == 0
    assert "4 of 8 heads removed by l0" in capsys.readouterr().out
    assert prune(place, "--fraction", "0.5", "--by", "l0", "--gate-steps", "0") == 2
    assert "--gate-steps must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["gradient", "redundancy", "l0", "random"])
@pytest.mark.parametrize("what", ["neurons", "layers"])
def test_neurons_and_layers_are_pruned_by_every_measure(
    place: Path, tmp_path: Path, what: str, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "numbers.json"
    wanted = ["--what", what, "--by", by, "--gate-steps", "2", "--json", str(numbers)]
    code = prune(place, *wanted, "--fraction", "0.5")
    said, message = capsys.readouterr(), json.loads(numbers.read_text("utf-8"))
    assert f"{what} " in said.out
    assert f"by {by}" in said.out
    assert message["by"] == by
    if (what, by) == ("neurons", "redundancy"):
        assert code == 1
        assert "are redundant" in said.err
        assert message["removed"] == []
    else:
        assert code == 0
        assert message["pruned"] == pytest.approx(message["curve"][-1]["value"], abs=1e-5)


def test_neurons_and_layers_are_measured_anew(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(place, "--what", "neurons", "--fraction", "0.5", "--iterative") == 0
    assert "64 of 128 neurons removed by gradient" in capsys.readouterr().out
    by = ["--by", "redundancy", "--iterative"]
    assert prune(place, "--what", "layers", "--fraction", "0.5", *by) == 0
    assert "input and output similarity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["neurons", "--by", "l0", "--iterative"], "--iterative"),
        (["layers", "--by", "random", "--iterative"], "--iterative"),
        (["layers", "--replace-with", "mean"], "'mean' cannot be used with --what 'layers'"),
        (["neurons", "--replace-with", "mean"], "'mean' cannot be used with --what 'neurons'"),
    ],
)
def test_what_is_for_heads_alone_is_refused(
    place: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(place, "--fraction", "0.5", "--what", *more) == 2
    assert message in capsys.readouterr().err


def test_of_one_text_no_error_is_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(place, "--tokens", "5", "--fraction", "0.25", "--by", "random") == 0
    said = capsys.readouterr().out
    assert "evaluated on 1 text\n" in said
    assert "nan" not in said


def test_a_budget_that_cannot_be_met_writes_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    assert prune(place, "--loss-budget", "-5", "-o", str(out)) == 1
    said = capsys.readouterr().err
    assert "nothing was saved" in said
    assert "at best" in said
    assert [file.name for file in out.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--fraction", "1.5"], "--fraction must be in [0, 1], got 1.5"),
        (["--picture", "curve.jpg"], ".png"),
        (["--by", "random", "--iterative"], "--iterative"),
    ],
)
def test_wrong_use_is_refused(
    place: Path, more: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(place, *more) == 2
    assert match in capsys.readouterr().err


def test_a_missing_text_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(place / "model"), "--file", str(place / "nowhere.txt")]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    assert main(["prune", str(place / "model"), "--file", str(place)]) == 2
    assert f"{place} is a folder: name a file with text." in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prune", "gate"])
def test_a_vision_model_needs_no_tokenizer(
    command: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(build("vit-b16", layers=1, width=16, heads=2, hidden=16, seed=0), tmp_path / "vit")
    arguments = [
        str(tmp_path / "vit"),
        "--file",
        str(place / "corpus.txt"),
        "-o",
        str(tmp_path / "o"),
    ]
    assert main([command, *arguments]) == 2
    assert "a Vision does not read texts: give it images" in capsys.readouterr().err


def test_ctrl_c_reports_the_interruption_and_what_was_measured(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collect, calls = evaluate.Evaluation.collect, []

    def interrupted(runs: Any) -> Any:
        yield from islice(runs, 2)
        raise KeyboardInterrupt

    def first_interrupted(self: Any, label: str, count: int, runs: Any) -> Any:
        calls.append(label)
        return collect(self, label, count, interrupted(runs) if len(calls) == 1 else runs)

    monkeypatch.setattr(evaluate.Evaluation, "collect", first_interrupted)
    out, numbers = tmp_path / "pruned", tmp_path / "numbers.json"
    assert prune(place, "--fraction", "0.5", "-o", str(out), "--json", str(numbers)) == 1
    message = capsys.readouterr().err
    assert "interrupted after " in message
    assert " of 8 heads" in message
    assert "no model was saved" in message
    assert not out.exists()
    assert numbers.exists()
