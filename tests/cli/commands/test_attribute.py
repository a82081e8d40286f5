"""manyheads attribute as a person at a terminal meets it."""

from pathlib import Path

import pytest

from manyheads import lens, load
from manyheads.cli.main import main
from tests.cli.heads import write_models

TEXT = "The cat sat on the"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("attribute"))


def test_parts_sum_to_the_logit(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "why.json"
    arguments = ["attribute", str(place / "decoder"), "--text", TEXT, "--json", str(out)]
    assert main([*arguments, "--target", "mat", "--against", "log"]) == 0
    said = capsys.readouterr().out
    for words in ("' mat'", "' log'", "feedforward 1", "embedding", "Logit lens", "layer 1"):
        assert words in said
    result = lens.load(out)
    assert sum(each.value for each in result.contributions) == pytest.approx(result.value, abs=1e-4)
    model = load(place / "decoder")
    ids = [model.tokenizer.encode(word).ids for word in (" mat", " log")]
    direct = lens.attribute_logits(model, [TEXT], *ids)
    assert result.of("L1H2") == pytest.approx(float(direct.by_head[0, 6]), abs=1e-5)
    assert result.value == pytest.approx(float(direct.logits[0]), abs=1e-5)


@pytest.mark.parametrize("method", ["integrated", "heads", "rollout"])
def test_other_methods_add_up(place: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "why.json"
    arguments = ["attribute", str(place / "small"), "--text", "The cat sat", "--method", method]
    assert main([*arguments, "--json", str(out)]) == 0
    result = lens.load(out)
    assert sum(each.value for each in result.contributions) == pytest.approx(result.value, abs=5e-3)
    assert len(result.contributions) == (4 if method == "heads" else len(result.tokens))


def test_rollout_takes_an_encoder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", str(place / "encoder"), "--text", TEXT, "--method", "rollout"]) == 0
    assert "attention rollout" in capsys.readouterr().out


def test_a_long_text_shows_its_last_tokens_and_how_to_see_all(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = "The cat sat on the mat. " * 12 + "The log", tmp_path / "why.json"
    arguments = ["attribute", str(place / "encoder"), "--text", text, "--method", "rollout"]
    assert main([*arguments, "--json", str(out)]) == 0
    said, result = capsys.readouterr().out, lens.load(out)
    assert len(result.contributions) == len(result.tokens) > 50
    rows = [line.split()[0] for line in said.splitlines() if line.strip()[:1].isdigit()]
    last = len(result.contributions) - 1
    assert len(rows) == 40
    assert rows[-10:] == [str(at) for at in range(last - 9, last + 1)]
    assert str(max(range(last), key=lambda at: result.contributions[at].value)) in rows
    assert f"and {last + 1 - 40} more: --all prints them" in said
    assert "max_rows=None" not in said
    assert main([*arguments, "--all"]) == 0
    said = capsys.readouterr().out
    rows = [line.split()[0] for line in said.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [str(at) for at in range(last + 1)]
    assert "more" not in said


def test_the_number_of_steps_is_followed_and_a_lack_of_convergence_reported(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "why.json"
    arguments = ["attribute", str(place / "small"), "--text", TEXT, "--method", "integrated"]
    assert main([*arguments, "--steps", "2", "--json", str(out)]) == 0
    assert lens.load(out).path_steps == 2
    assert "Not converged: 2 steps leave" in capsys.readouterr().out
    assert main([*arguments, "--steps", "96"]) == 0
    assert "Not converged" not in capsys.readouterr().out


def test_the_likeliest_word_is_traced_by_default(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attribute", str(place / "decoder")]) == 0
    said = capsys.readouterr().out
    assert "The market of Harlow" in said.replace("\n  ", "")
    last = said.strip().splitlines()[-1].split()
    assert last[-1] == "1"


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["encoder", "--text", TEXT], "predicts no next word"),
        (["decoder", "--text", TEXT, "--target", "hippopotamus"], "tokens of this model"),
        (["decoder", "--text", TEXT, "--target", ""], "empty"),
        (["decoder", "--text", TEXT, "--against", ""], "empty"),
        (["decoder", "--method", "heads", "--steps", "0"], "--steps"),
        (["decoder", "--method", "heads", "--steps=-1"], "--steps"),
        (["decoder", "--steps", "8"], "--steps 8"),
        (["decoder", "--text", ""], "--text '' is empty"),
        (["decoder", "--file", "nowhere.txt"], "nowhere.txt does not exist"),
        (["decoder", "--method", "rollout", "--target", "mat"], "leave out the words"),
        (["bare", "--text", TEXT], "has no tokenizer"),
    ],
)
def test_wrong_use_is_refused(
    place: Path, more: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, *rest = more
    assert main(["attribute", str(place / model), *rest]) == 2
    assert match in capsys.readouterr().err
