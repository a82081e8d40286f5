"""manyheads ablate as a person at a terminal meets it."""

import json
from pathlib import Path

import numpy as np
import pytest

from manyheads import lens, load
from manyheads.cli.main import main
from tests.cli.heads import TEXT, write_models


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("ablate"))


def test_every_head_is_printed_with_the_numbers_of_the_lens(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "all.json", place / "texts.txt"
    arguments = ["ablate", str(place / "decoder"), "--file", str(file), "--json", str(out)]
    assert main([*arguments, "--greedy", "2", "--replace-with", "mean"]) == 0
    said = capsys.readouterr().out
    for words in (
        "The loss of the full model",
        "L1H3",
        "Spearman",
        "Better without",
        "Greedy ablation",
    ):
        assert words in said
    texts = file.read_text().strip().split("\n\n")
    model = load(place / "decoder")
    exact = lens.ablate(model, texts, replace_with="mean", progress=False)
    result = lens.load(out)
    np.testing.assert_allclose(result.means["change"], exact.means["change"], atol=1e-6)
    metadata = json.loads(out.read_text())["fields"]["metadata"]
    estimate = lens.importance(model, texts, progress=False)
    assert metadata["rank_correlation"] == pytest.approx(estimate.agreement(exact))
    taken = lens.ablate_greedily(model, texts, 2, replace_with="mean", progress=False)
    assert [step["head"] for step in metadata["greedy"]["steps"]] == [
        str(each) for each in taken.order
    ]


def test_a_race_on_two_texts_is_undecided(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "race.json", place / "texts.txt"
    arguments = ["ablate", str(place / "decoder"), "--file", str(file), "--json", str(out)]
    assert main([*arguments, "--until", "top 2 at 90 %"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.index("By gradients") < said.index("The loss of the full model")
    assert "too few for the top 2 at 90 %" in said
    assert "nan" not in said
    result = lens.load(out)
    assert not result.metadata["race"]["decided"]
    assert (result["texts"].means == 2).all()
    assert main([*arguments, "--until", "most"]) == 2
    assert "top 10 at 95 %" in capsys.readouterr().err


@pytest.mark.parametrize("heads", ["L0H1,L1H2", "l0h1, main L1H2", "L1, L0H1 attention"])
def test_chosen_heads_alone_are_ablated(
    place: Path, heads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ablate", str(place / "decoder"), "--text", TEXT, "--heads", heads]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "L0H1" in said
    assert "L1H2" in said
    assert "L0H0" not in said


def test_an_encoder_is_measured_by_masked_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ablate", "house-bert", "--text", TEXT, "--heads", "L1H0"]) == 0
    assert "The loss of the full model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["decoder", "--heads", "L7H0"], "use L0H0 to L1H3"),
        (["decoder", "--heads", "5"], "write L5H1"),
        (["decoder", "--greedy", "9"], "--greedy must be in 0 to 8, got 9"),
        (["decoder", "--of", "cross"], "no cross heads"),
        (["decoder", "--text", "T"], "no text has a second token"),
        (["decoder", "--file", "nowhere.txt"], "nowhere.txt does not exist"),
        (["encoder", "--text", TEXT], "[MASK]"),
        (["bare", "--text", "a"], "has no tokenizer"),
    ],
)
def test_wrong_use_is_refused(
    place: Path, more: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, *rest = more
    assert main(["ablate", str(place / model), *rest]) == 2
    assert match in capsys.readouterr().err
