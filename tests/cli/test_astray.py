"""Words that no option takes: what the command line says to do with them."""

import pytest

from manyheads.cli.main import main


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["inspect", "house-gpt", "The old"], "'The old' stands alone: use --text 'The old'."),
        (["encode", "house-bert", "The", "old"], "'The old' stands alone: use --text 'The old'."),
        (["train", "run.toml", "run.steps=3"], "'run.steps=3' stands alone: use --set run.steps=3"),
        (["inspct"], "'inspct' is no command: did you mean inspect?"),
    ],
)
def test_words_astray_are_told_where_to_go(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert f"error: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [["inspect", "--txt", "a"], ["inspect", "--tokens", "x"], ["xyzzy"], ["convert", *"abc"]],
)
def test_where_the_parser_said_all_nothing_is_added(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(given)
    assert "error:" not in capsys.readouterr().err
