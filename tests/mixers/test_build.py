"""One table names every mixer, and all lists of them follow from it."""

from typing import get_args

from manyheads import mixers
from manyheads.checkpoints.families.native import CONFIG_JSON
from manyheads.mixers.build import MIXERS, MixerConfig, make_mixer
from tests.mixers.mixer_configs import BOTH_WAYS, CAUSAL


def test_every_list_of_mixers_is_the_table() -> None:
    assert get_args(MixerConfig) == tuple(MIXERS)
    assert set(MIXERS) <= set(CONFIG_JSON.classes)
    assert {config.__name__ for config in MIXERS} <= set(mixers.__all__)


def test_a_config_makes_its_layer() -> None:
    for config in (*CAUSAL.values(), *BOTH_WAYS.values()):
        mixer = make_mixer(config)
        assert type(mixer) is MIXERS[type(config)]
        assert mixer.config is config
