"""Phases one after another: the phase of a step, and invalid runs."""

from dataclasses import replace

import pytest

from manyheads.errors import ConfigError
from manyheads.train.optim.schedules import BatchGrowth, Decay, Stable, WarmupStableDecay
from manyheads.train.run_file.data_config import Texts
from manyheads.train.run_file.phases import Phase, Phases
from tests.messages import refuses

GROWTH = BatchGrowth(first=2048, last=8192, by=2048, over=24_576)
WEB = Texts(train=("web",), max_length=1024, batch=GROWTH, micro_batch=2048)
BOOKS = Texts(train=("books",), max_length=8192, batch=8192)
SHORT = Phase(name="short", tokens=81_920, data=WEB, schedule=Stable(warmup=3))
LONG = Phase(name="long", tokens=40_000, data=BOOKS, rotary=160_000.0)
LAST = Phase(name="last", steps=4, data=BOOKS, schedule=Decay())
RUN = Phases((SHORT, LONG, LAST))


def test_every_step_lies_in_one_phase() -> None:
    assert [phase.step_count for phase in RUN.each] == [13, 5, 4]
    assert RUN.starts == [0, 13, 18]
    located = [RUN.locate(step) for step in range(RUN.step_count)]
    assert [phase.name for phase, _ in located] == ["short"] * 13 + ["long"] * 5 + ["last"] * 4
    assert [step for _, step in located] == [*range(13), *range(5), *range(4)]
    with refuses(ConfigError, "step 22", "use 0 to 21."):
        RUN.locate(22)


def test_a_phase_lasts_until_its_tokens_are_seen() -> None:
    for phase, seen in ((SHORT, GROWTH.tokens_before), (LONG, lambda step: 8192 * step)):
        assert seen(phase.step_count) >= phase.tokens > seen(phase.step_count - 1)


def test_the_rate_warms_up_once_and_falls_at_the_end() -> None:
    factors = [RUN.lr_factor(step) for step in range(RUN.step_count)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert set(factors[3:19]) == {1.0}
    assert factors[19:] == sorted(factors[19:], reverse=True)


def test_contradictions_are_refused() -> None:
    with refuses(ConfigError, "warmup=3 and decay=4", "5 steps", "use more steps"):
        replace(LONG, schedule=WarmupStableDecay(warmup=3, decay=4))
    with refuses(ConfigError, "steps=0 and tokens=0", "set one of them"):
        replace(LONG, tokens=0)
    with refuses(ConfigError, "rotary", "got 0", '"kept"'):
        replace(LONG, rotary=0.0)
    with refuses(ConfigError, "at least one phase"):
        Phases(())
    with refuses(ConfigError, "2 phases are called 'short'", "rename one"):
        Phases((SHORT, SHORT))
    with refuses(ConfigError, "'long' starts at 1", "ends at 0", "give 'long' a warmup"):
        Phases((replace(LAST, name="short"), LONG))
    Phases((LAST, replace(LONG, schedule=Stable(warmup=4))))
