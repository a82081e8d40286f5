"""manyheads why as a person at a terminal meets it."""

from pathlib import Path

import pytest

from manyheads import lens, load
from manyheads.cli.main import main
from tests.cli.heads import write_models

TEXT = "The cat sat on the"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("why"))


def test_a_link_is_explained_and_saved(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "why.json"
    words = ["why", str(place / "decoder"), "L1H2", "--text", TEXT]
    assert main([*words, "--query", "4", "--key", "2", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    for part in ("L1H2, query 4", "against the mean", "Pairs", "to the key", "--all prints them"):
        assert part in said
    result = lens.load(out)
    expected = lens.why(load(place / "decoder"), [TEXT], "L1H2", 4, 2, against="mean")
    assert result.score == pytest.approx(expected.score, abs=1e-5)
    assert main([*words, "--against", "none", "--all"]) == 0
    said = capsys.readouterr().out
    assert "--all prints them" not in said
    assert "against" not in said


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["L1H2", "--query", "first"], ("--query first", 'count from 0, or use "last"')),
        (["L9H9"], ("there is no head L9H9",)),
        (["L1H2", "--query", "0", "--key", "2"], ("does not see key 2",)),
    ],
)
def test_what_names_no_link_is_refused(
    place: Path, more: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(place / "decoder"), *more, "--text", TEXT]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts)
