"""Checks of arguments, before any work."""

from pathlib import Path

import pytest

from manyheads.cli.arguments import (
    check_exclusive,
    check_json,
    check_jsonl,
    check_out_folder,
    check_temperature,
    write_json,
    write_jsonl,
)
from manyheads.errors import InputError


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
