"""The same names for the same options in every command."""

from collections import defaultdict
from functools import cache

import pytest

from manyheads.cli.command_table import Option, options_of, positionals_of
from manyheads.cli.main import ALL_COMMANDS

LOOKING = ("inspect", "ablate", "attribute", "why", "compare", "report")
WRITING = (
    *("report", "atlas", "card", "circuit", "encode", "classify", "extract", "index", "filter"),
    *("convert", "tokenizer", "prune", "gate", "study", "evaluate"),
)


@cache
def by_name() -> dict[str, list[tuple[str, Option]]]:
    result: dict[str, list[tuple[str, Option]]] = defaultdict(list)
    for command, arguments in ALL_COMMANDS.items():
        for option in options_of(arguments):
            result[option.names[0]].append((command, option))
    return result


@pytest.mark.parametrize("name", by_name())
def test_an_option_is_of_one_kind_everywhere(name: str) -> None:
    assert len({option.kind for _, option in by_name()[name]}) == 1


@pytest.mark.parametrize("name", ["--json", "--device", "--dtype", "--picture", "--seed", "--set"])
def test_the_value_of_an_option_has_one_name(name: str) -> None:
    message = {option.metavar for _, option in by_name()[name]}
    assert len(message) == 1


def test_texts_have_the_same_two_options_everywhere() -> None:
    for command in (*LOOKING, "generate", "encode", "classify"):
        names = {option.names[0] for option in options_of(ALL_COMMANDS[command])}
        assert {"--text", "--file", "--device"} <= names, command
    for command in (*LOOKING, "prune", "gate", "generate"):
        assert "--json" in {option.names[0] for option in options_of(ALL_COMMANDS[command])}, (
            command
        )


def test_what_is_written_goes_to_out_and_o_is_short_for_it() -> None:
    outs = by_name()["--out"]
    assert {command for command, _ in outs} == set(WRITING)
    assert all(option.names == ("--out", "-o") for _, option in outs)


def test_a_model_comes_first_by_place() -> None:
    without = {"explain", "tokenizer", "train", "completion", "get", "shape", "study"}
    without |= {"index", "search", "answer", "filter"}
    for command in ALL_COMMANDS.keys() - without:
        assert positionals_of(ALL_COMMANDS[command])[0].kind == "model", command


def test_where_to_compute_is_left_to_torch_by_default() -> None:
    for command, option in by_name()["--device"]:
        assert (option.kind, option.default) == ("text", "auto"), command
