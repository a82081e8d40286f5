"""One config holds the options of `generate`, their defaults and their checks."""

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
import torch

from manyheads import (
    BeamSearch,
    DynamicCache,
    GenerationConfig,
    Greedy,
    Sample,
    StaticCache,
    generate,
    stream,
)
from manyheads.cli.commands.generate import Generate
from manyheads.decoding.generation_config import GenerationOptions
from manyheads.errors import ConfigError
from tests.decoding.peers import pair


def test_keyword_arguments_are_the_fields_of_the_config() -> None:
    assert get_type_hints(GenerationOptions) == get_type_hints(GenerationConfig)


@pytest.mark.parametrize("function", [generate, stream])
def test_help_lists_every_option_with_its_default(function: Any) -> None:
    listed = inspect.signature(function).parameters
    for option in fields(GenerationConfig):
        assert listed[option.name].default == option.default
        assert listed[option.name].annotation == option.type


def test_the_command_line_has_the_same_defaults() -> None:
    command, config = Generate(), GenerationConfig()
    assert command._config() == config
    shared = {each.name for each in fields(Generate)} & {each.name for each in fields(config)}
    assert shared == {"guard", "max_new_tokens", "repetition_penalty", "seed", "logprobs"}
    for name in shared:
        assert getattr(command, name) == getattr(config, name)


def test_options_override_those_of_a_config() -> None:
    ours = pair("gpt2")[1]
    config = GenerationConfig(max_new_tokens=9, eos_token_ids=(), logprobs=True)
    [generation] = generate(ours, [[5, 6]], config, max_new_tokens=4)
    assert len(generation.ids) == len(generation.logprobs or ()) == 4
    assert [generation] == generate(
        ours, [[5, 6]], max_new_tokens=4, eos_token_ids=(), logprobs=True
    )


def test_a_single_value_stands_for_a_sequence_and_configs_can_be_hashed() -> None:
    config = GenerationConfig(stop_strings="END", eos_token_ids=7, suppress_tokens=[3, 4, 3])
    assert (config.stop_strings, config.eos_token_ids) == (("END",), (7,))
    assert config.suppress_tokens == (3, 4)
    same = GenerationConfig(
        stop_strings=["END"], eos_token_ids=[7], suppress_tokens=torch.tensor([3, 4]).tolist()
    )
    assert {config: 1}[same] == 1


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("new_tokens", "did you mean max_new_tokens"),
        ("eos_token_id", "did you mean eos_token_ids"),
        ("temperature", r"pass sampling=Sample\(temperature=...\)"),
        ("num_beams", r"pass sampling=BeamSearch\(num_beams=...\)"),
        ("zzz", "use max_new_tokens, sampling, "),
    ],
)
def test_a_wrong_option_names_the_nearest(name: str, remedy: str) -> None:
    options: Any = {name: 4}
    with pytest.raises(ConfigError, match=f"'{name}': {remedy}"):
        generate(pair("gpt2")[1], [[5, 6]], **options)
    with pytest.raises(ConfigError, match=f"'{name}': {remedy}"):
        stream(pair("gpt2")[1], [5, 6], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, got True"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0.0"),
        ({"stop_strings": ["a", ""]}, "empty string.*: give at least one character"),
        ({"suppress_tokens": [-1]}, "suppress_tokens must be at least 0, got -1"),
        ({"decoder_start_token_id": -2}, "decoder_start_token_id must be at least 0, got -2"),
        (
            {"sampling": BeamSearch(), "stop_strings": "end"},
            r"BeamSearch: use eos_token_ids, or sampling=Greedy\(\)",
        ),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerationConfig(**options)


def test_configs_compare_by_value() -> None:
    assert GenerationConfig() == GenerationConfig(sampling=Greedy())
    assert GenerationConfig(sampling=Sample()) != GenerationConfig(cache=StaticCache(size=4))


@pytest.mark.shapes_unchecked
def test_values_of_a_wrong_type_are_refused() -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (GenerationConfig, {"max_new_tokens": 2.5}, "max_new_tokens .* integer, got 2.5"),
        (GenerationConfig, {"sampling": "greedy"}, "sampling must be Greedy .* got 'greedy'"),
        (GenerationConfig, {"repetition_penalty": None}, "repetition_penalty .* number, got None"),
        (GenerationConfig, {"stop_strings": 5}, "stop_strings .* got 5"),
        (GenerationConfig, {"eos_token_ids": "end"}, "eos_token_ids .* got 'end'"),
        (GenerationConfig, {"eos_token_ids": [1.5]}, "eos_token_ids .* got 1.5"),
        (GenerationConfig, {"cache": "static"}, "cache must be DynamicCache .* got 'static'"),
        (Sample, {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        (Sample, {"top_k": 2.5}, "top_k must be an integer or None, got 2.5"),
        (BeamSearch, {"num_beams": 2.5}, "num_beams must be an integer, got 2.5"),
        (BeamSearch, {"early_stopping": "always"}, "early_stopping .* got 'always'"),
        (StaticCache, {"size": 2.5}, "size must be an integer, got 2.5"),
        (DynamicCache, {"initial_size": 2.5}, "initial_size must be an integer, got 2.5"),
    ]
    for made, options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            made(**options)
    with pytest.raises(ConfigError, match="config must be GenerationConfig or None, got 4"):
        generate(pair("gpt2")[1], [[5, 6]], 4)  # type: ignore[call-overload]
