"""Checks of arguments, before any work."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from manyheads.cli.arguments import (
    check_exclusive,
    check_json,
    check_jsonl,
    check_out_folder,
    check_temperature,
    page_for_json,
    save_result,
    write_json,
    write_jsonl,
)
from manyheads.cli.command_table import COMMANDS, options_of
from manyheads.errors import InputError
from manyheads.lens.results.files import Result


@dataclass(frozen=True)
class Five(Result):
    """A result with one number."""

    value: int = 5


def test_json_is_printed_instead_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    check_json(Path("-"))
    with page_for_json(Path("-")):
        print("a page")
        write_json(Path("-"), {"a": float("nan")})
        save_result(Path("-"), Five())
    printed, result = capsys.readouterr().out.splitlines()
    assert json.loads(printed) == {"a": None}
    assert json.loads(result)["fields"] == {"value": 5}
    with page_for_json(None):
        print("a page")
    assert capsys.readouterr().out == "a page\n"


def test_every_command_with_json_can_print_it() -> None:
    for name, command in COMMANDS.items():
        for option in options_of(command):
            if option.field == "json":
                assert (option.group, option.kind) == ("", "file"), name


def test_only_one_of_exclusive_options_is_taken() -> None:
    check_exclusive("--text and --file", None, Path("a"), ())
    with pytest.raises(InputError, match="--text and --file exclude each other"):
        check_exclusive("--text and --file", "", Path("a"))


@pytest.mark.parametrize(
    ("check", "name", "reason"),
    [
        (check_json, "a.txt", "does not end in .json"),
        (check_jsonl, "a.json", "must end in .jsonl"),
        (check_out_folder, "file", "is a file"),
    ],
)
def test_a_wrong_path_is_refused(check: object, name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert callable(check)
    check(None)
    with pytest.raises(InputError, match=reason):
        check(tmp_path / name)


def test_a_model_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="would overwrite the model itself"):
        check_out_folder(tmp_path, str(tmp_path))


def test_a_temperature_is_above_zero() -> None:
    check_temperature(None)
    with pytest.raises(InputError, match="--temperature must be above 0, got 0"):
        check_temperature(0.0)


def test_values_are_written_as_json(tmp_path: Path) -> None:
    write_json(None, {})
    write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert (tmp_path / "a.json").read_text() == '{\n "loss": null\n}'
    write_jsonl(tmp_path / "a.jsonl", [{"text": "один"}, {"text": "b"}])
    assert (tmp_path / "a.jsonl").read_text("utf-8") == '{"text": "один"}\n{"text": "b"}\n'
