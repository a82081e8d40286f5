"""Phases one after another: where a step lies, and which runs cannot be."""

from dataclasses import replace

import pytest

from manyheads.errors import ConfigError
from manyheads.train.optim.schedules import BatchGrowth, Decay, Stable, WarmupStableDecay
from manyheads.train.run_file.phases import Phase, Phases, StepCount, TokenCount
from tests.messages import refuses

SHORT = Phase(
    name="short",
    length=1024,
    batch=BatchGrowth(first=2048, last=8192, by=2048, over=24_576),
    duration=TokenCount(81_920),
    data="web",
    schedule=Stable(warmup=3),
)
LONG = Phase(name="long", length=8192, batch=8192, duration=TokenCount(40_000), rotary=160_000.0)
LAST = Phase(
    name="last", length=8192, batch=8192, duration=StepCount(4), data="books", schedule=Decay()
)
RUN = Phases((SHORT, LONG, LAST))


def test_every_step_lies_in_one_phase() -> None:
    assert [phase.steps for phase in RUN.each] == [13, 5, 4]
    places = [RUN.at(step) for step in range(RUN.steps)]
    assert [place.phase.name for place in places] == ["short"] * 13 + ["long"] * 5 + ["last"] * 4
    assert [place.step for place in places] == [*range(13), *range(5), *range(4)]
    assert [step for step, place in enumerate(places) if place.last] == [12, 17, 21]
    with refuses(ConfigError, "there is no step 22: use 0 to 21."):
        RUN.at(22)


def test_tokens_are_counted_over_phases() -> None:
    seen = 0
    for step in range(RUN.steps):
        assert RUN.tokens_before(step) == seen
        seen += RUN.at(step).tokens
    assert RUN.tokens == seen


def test_the_rate_warms_up_once_and_falls_at_the_end() -> None:
    shares = [RUN.at(step).rate_factor for step in range(RUN.steps)]
    assert shares[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert set(shares[3:19]) == {1.0}
    assert shares[19:] == sorted(shares[19:], reverse=True)


def test_a_phase_without_data_goes_on_with_those_before() -> None:
    assert [RUN.data(index) for index in range(3)] == ["web", "web", "books"]


def test_contradictions_are_refused() -> None:
    with refuses(
        ConfigError,
        "phase 'long' has texts of 8192 tokens and a batch of 4096: "
        "use a batch of 8192 tokens or more.",
    ):
        replace(LONG, batch=4096)
    with refuses(
        ConfigError,
        "phase 'long': warmup=3 and decay=4 do not fit in 5 steps: "
        "use more steps, or a shorter warmup and decay.",
    ):
        replace(LONG, schedule=WarmupStableDecay(warmup=3, decay=4))
    with refuses(
        ConfigError,
        "phase 'long' has length=8192 and duration=StepCount(count=0): use 1 or more of each.",
    ):
        replace(LONG, duration=StepCount(0))
    with refuses(ConfigError, "phase 'long' has rotary=0: use a base above 1, or \"kept\"."):
        replace(LONG, rotary=0.0)
    with refuses(ConfigError, "a run needs at least one phase: add a phase."):
        Phases(())
    with refuses(ConfigError, "2 phases are called 'short': rename one of them."):
        Phases((SHORT, SHORT))
    with refuses(ConfigError, "the first phase 'long' has no data: set its data."):
        Phases((LONG,))
    with refuses(
        ConfigError,
        "phase 'long' starts at 1 of the peak learning rate, and 'short' ends at 0: "
        "give 'long' a warmup, or decay later.",
    ):
        Phases((LAST, LONG))
    Phases((LAST, replace(LONG, schedule=Stable(warmup=4))))
