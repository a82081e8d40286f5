"""Configs survive JSON, and a file can make nothing but configs."""

import json
from typing import Any

import pytest

from manyheads.checkpoints.configs import TYPES, from_json, to_json
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import named, sizes
from manyheads.models.recipes import ModelConfig
from manyheads.parts.masks import Causal, GlobalTokens, Window
from manyheads.parts.positions import Rotary
from manyheads.parts.positions.rotary import YaRN
from tests.messages import refuses
from tests.models.zoo import MODELS


@pytest.mark.parametrize("config", [*MODELS.values(), *map(named, sizes())])
def test_a_config_comes_back_equal(config: ModelConfig) -> None:
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    "part",
    [
        (Window(3, 4) | GlobalTokens((0, -1))) & Causal(),
        Rotary(theta=5.5, share=0.5, scaling=YaRN(factor=4.0, trained=128)),
    ],
)
def test_a_part_comes_back_equal(part: object) -> None:
    assert from_json(json.loads(json.dumps(to_json(part)))) == part


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"config\.mask is of type 'Wndow'.*Window"):
        from_json({"type": "AttentionConfig", "width": 8, "heads": 2, "mask": {"type": "Wndow"}})


def test_an_unknown_field_is_refused_with_the_nearest_one() -> None:
    with refuses(InputError, "config has 'befor', which Window lacks: use 'before'."):
        from_json({"type": "Window", "befor": 3})


def test_a_missing_field_is_refused() -> None:
    with pytest.raises(InputError, match="config is no Window"):
        from_json({"type": "Window"})


def test_contradictory_values_are_refused_as_in_python() -> None:
    with pytest.raises(ConfigError, match="heads=12 cannot share kv_heads=5 evenly"):
        from_json({"type": "AttentionConfig", "width": 24, "heads": 12, "kv_heads": 5})


def test_types_are_listed_under_their_own_names() -> None:
    assert all(name == kind.__name__ for name, kind in TYPES.items())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"type": "Gate", "at": "output", "activation": "relu"},
            "config.activation is 'relu': use one of 'sigmoid', 'silu'.",
        ),
        ({"type": "Rotary", "theta": "a"}, "config.theta is 'a': give no word here."),
    ],
)
def test_a_word_that_is_not_known_is_refused(value: Any, message: str) -> None:
    with refuses(InputError, message):
        from_json(value)
