"""manyheads compare as a person at a terminal meets it."""

from pathlib import Path

import numpy as np
import pytest

from manyheads import lens, load, save
from manyheads.cli.main import main
from manyheads.surgery import prune, prune_layers
from tests.cli.heads import write_models


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("compare"))
    model = load(folder / "decoder")
    once = prune(model, ["L0H0"])
    save(once, folder / "pruned")
    save(prune(once, ["L0H0"]), folder / "twice")
    save(prune_layers(model, [len(model.stack.layers) - 1]), folder / "shorter")
    return folder


def test_a_model_compared_with_itself_does_not_change(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "changes.json"
    pair = [str(place / "small")] * 2
    more = ["--file", str(place / "texts.txt"), "--no-kinds", "--json", str(out)]
    assert main(["compare", *pair, *more]) == 0
    said = capsys.readouterr().out
    assert "no head" in said
    assert "changed most" not in said
    result = lens.load(out)
    assert result.losses is not None
    assert result.losses.change == 0.0
    assert float(np.nanmax(np.abs(result.change.means["entropy"]))) == 0.0


def test_heads_of_a_pruned_model_are_compared_with_their_origins(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [str(place / "decoder"), str(place / "pruned")]
    assert main(["compare", *pair, "--file", str(place / "texts.txt"), "--no-kinds"]) == 0
    said = capsys.readouterr().out
    assert "removed: L0H0" in said
    assert "Heads that changed most" in said


def test_what_was_pruned_twice_is_compared_with_what_was_pruned_once(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "changes.json"
    more = ["--file", str(place / "texts.txt"), "--no-kinds"]
    pair = [str(place / "pruned"), str(place / "twice")]
    assert main(["compare", *pair, *more, "--json", str(out)]) == 0
    result = lens.load(out)
    assert [str(each) for each in result.removed] == ["L0H0"]
    # Weights are as they were, so that every head that is left met itself.
    assert float(np.nanmax(result.weights.means["all"])) == 0.0
    assert main(["compare", str(place / "twice"), str(place / "pruned"), *more]) == 2
    assert "L0H0 of the second model is L0H1 of the original" in capsys.readouterr().err


def test_a_model_without_its_last_layer_is_compared(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [str(place / "decoder"), str(place / "shorter")]
    assert main(["compare", *pair, "--file", str(place / "texts.txt"), "--no-kinds"]) == 0
    assert "removed: L" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["decoder", "small"], "layers"),
        (["bare", "bare", "--text", "a"], "has no tokenizer"),
        (["decoder", "decoder", "--file", "nowhere.txt"], "nowhere.txt does not exist"),
        (["decoder", "decoder", "--text", ""], "--text '' is empty"),
    ],
)
def test_wrong_use_is_refused(
    place: Path, more: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, *rest = more
    assert main(["compare", str(place / one), str(place / other), *rest]) == 2
    assert match in capsys.readouterr().err.lower()
