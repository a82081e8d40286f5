"""What needs whole texts cannot be shared by processes, and is named with its layer."""

from dataclasses import replace
from typing import Any

import pytest

from manyheads.errors import ConfigError
from manyheads.mixers.linear_attention import LinearAttention
from manyheads.models.build import get_config
from manyheads.models.context_parallel import check_context_parallel
from manyheads.models.layer import Branch
from manyheads.models.stack import StackConfig
from manyheads.parts.halting import Halting
from manyheads.parts.positions import Disentangled, Shaw, T5Buckets


def stack(**attention: Any) -> StackConfig:
    """Two layers, of which the second has another attention."""
    config = get_config("gpt2", layers=2, width=16, heads=2, vocabulary=20, dropout=0.0)
    first, second = config.stack.layers
    assert second.attention is not None
    inner = replace(second.attention.inner, **attention)
    changed = replace(second, attention=replace(second.attention, inner=inner))
    return replace(config.stack, layers=(first, changed))


def check(config: StackConfig, *, trains: bool) -> None:
    check_context_parallel(config.layers, config.halting, trains=trains)


def test_ordinary_layers_can_be_shared() -> None:
    check(stack(), trains=True)


@pytest.mark.parametrize("position", [T5Buckets(), Shaw(), Disentangled()])
def test_learned_distances_are_refused(position: Any) -> None:
    with pytest.raises(ConfigError, match=f"layer 1 .*{type(position).__name__}"):
        check(stack(position=position), trains=False)


@pytest.mark.parametrize("change", [{"dropout": 0.1}, {"drop_heads": 0.1}])
def test_what_is_drawn_for_whole_texts_is_refused_in_training_alone(change: Any) -> None:
    check(stack(**change), trains=False)
    with pytest.raises(ConfigError, match="layer 1 drops"):
        check(stack(**change), trains=True)


def test_a_mixer_and_halting_are_refused() -> None:
    config = stack()
    mixer = Branch(LinearAttention(width=16, heads=2))
    layer = replace(config.layers[0], attention=None, mixer=mixer)
    with pytest.raises(ConfigError, match="layer 0 mixes tokens by LinearAttention"):
        check(replace(config, layers=(layer, config.layers[1])), trains=False)
    with pytest.raises(ConfigError, match="stop on their own"):
        check(replace(config, halting=Halting()), trains=False)
