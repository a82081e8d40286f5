"""Races of heads: the stated confidence on synthetic effects, and the values of plain ablation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.causal.racing import (
    Moments,
    Race,
    TopHeads,
    as_target,
    look_sizes,
    student_quantile,
    verdict,
)
from manyheads.models.build import Model, build
from tests.messages import refuses

HEADS, TOP = 40, 5
# Five heads that matter, one that nearly does, and many that do next to nothing.
EFFECTS = np.concatenate((np.linspace(1.0, 0.6, TOP), [0.45], np.linspace(0.2, -0.05, HEADS - 6)))
DRAWS = 60

Noise = Callable[[np.random.Generator, tuple[int, int]], Float[np.ndarray, "b h"]]
NOISES: dict[str, Noise] = {
    "normal": lambda draw, size: draw.normal(size=size),
    "rare large harm": lambda draw, size: draw.exponential(size=size) - 1,
    "rare large gain": lambda draw, size: 1 - draw.exponential(size=size),
    "heavy tails": lambda draw, size: draw.standard_t(3, size=size) / 3**0.5,
}


def run(noise: Noise, texts: int, seed: int, spread: float = 0.2) -> tuple[Race, float]:
    """A race on synthetic texts of different weights, and the share of values that it used."""
    draw = np.random.default_rng(seed)
    values = EFFECTS + spread * noise(draw, (texts, HEADS))
    weights = draw.integers(20, 200, texts).astype(float)
    race, used = Race(HEADS, texts, TopHeads(TOP, 0.95)), 0
    for before, size in zip([0, *race.looks], race.looks, strict=False):
        if not race.active:
            break
        used += len(race.active) * (size - before)
        race.look(values[:size, race.active], weights[:size])
    return race, used / values.size


@pytest.mark.parametrize("noise", NOISES)
def test_a_race_holds_its_confidence(noise: str) -> None:
    wrong = decided = 0
    used, covered = [], []
    for seed in range(DRAWS):
        race, share = run(NOISES[noise], 150, seed)
        wrong += bool(race.surely_in[TOP:].any() or race.surely_out[:TOP].any())
        decided += race.decided
        used.append(share)
        covered.append(((race.low <= EFFECTS) & (race.high >= EFFECTS)).mean())
    assert wrong <= 0.05 * DRAWS
    assert decided >= 0.5 * DRAWS
    assert np.mean(used) < 0.5
    assert np.mean(covered) > 0.92


@pytest.mark.parametrize("noise", NOISES)
def test_equal_heads_stay_undecided(noise: str) -> None:
    """All effects are the same, so that any decision is wrong."""
    wrong = 0
    for seed in range(DRAWS):
        draw = np.random.default_rng(seed)
        values, race = NOISES[noise](draw, (60, 12)), Race(12, 60, TopHeads(3, 0.9))
        for size in race.looks:
            race.look(values[:size, race.active], np.ones(size))
        wrong += len(race.active) < 12
    assert wrong <= 0.1 * DRAWS


def test_few_texts_decide_nothing_and_say_how_many_would() -> None:
    race, share = run(NOISES["normal"], 6, 0)
    assert not race.decided
    assert share == 1
    needed = race.texts_needed
    assert needed is not None
    assert 6 < needed < 6000
    names = [f"L0H{head}" for head in range(HEADS)]
    text = verdict(race.summary(names) | {"measured": 1.0}, 6)
    assert "6 texts are too few for the top 5 at 95 %" in text
    assert f"about {needed:,}" in text
    alone = Race(HEADS, 1, TopHeads(TOP))
    alone.look(EFFECTS[None], np.ones(1))
    assert len(alone.active) == HEADS
    assert np.isnan(alone.intervals(1.0)["low"]).all()


def test_the_number_of_texts_that_are_needed_is_about_right() -> None:
    needed = [run(NOISES["normal"], 40, seed)[0].texts_needed or 0 for seed in range(20)]
    enough = int(2 * np.median(needed))
    assert np.mean([run(NOISES["normal"], enough, seed)[0].decided for seed in range(20)]) > 0.7


@pytest.mark.parametrize(
    ("tail", "freedom", "expected"),
    [
        (0.025, 2, 4.30265),
        (0.025, 30, 2.04227),
        (1e-3, 5, 5.89343),
        (1e-3, 1999, 3.09431),
        (1e-7, 2, 2236.06764),
        (1e-7, 30, 6.7014),
        (1e-7, 1999, 5.21762),
    ],
)
def test_quantiles_are_those_of_students_t(tail: float, freedom: int, expected: float) -> None:
    assert student_quantile(tail, freedom) == pytest.approx(expected, rel=1e-5)


def test_pairs_on_the_same_texts_are_compared_as_their_differences() -> None:
    draw = np.random.default_rng(0)
    values, weights = draw.exponential(size=(30, 4)), draw.uniform(1, 3, 30)
    leads = Moments.of(values, weights).leads(0.01)
    for one in range(4):
        for two in range(4):
            difference = values[:, [one]] - values[:, [two]]
            low, _ = Moments.of(difference, weights).intervals(0.01)
            assert leads[one, two] == pytest.approx(low[0], abs=1e-9)


def test_looks_end_with_all_texts() -> None:
    assert look_sizes(8) == [8]
    assert look_sizes(100)[-1] == 100
    assert len(look_sizes(10_000)) < 25


def test_a_goal_is_read_and_refused() -> None:
    assert as_target("Top 3 at 99.5%") == TopHeads(3, 0.995)
    assert str(as_target("top 3")) == "top 3 at 95 %"
    for text, part in (("the best", "top 10 at 95 %"), ("top 0", "0"), ("top 3 at 100 %", "100 %")):
        with refuses(InputError, part):
            as_target(text)
    with refuses(InputError, "4 heads", "top 3"):
        Race(4, 9, TopHeads(4))


@pytest.fixture(scope="module")
def model() -> Model:
    """Two heads write so much that they lead every race."""
    model = build("gpt2", layers=2, width=32, heads=4, vocabulary=60, seed=0).eval()
    with torch.no_grad():
        for layer, head in ((0, 1), (1, 2)):
            output = model.stacks()["main"].layers[layer].attention.output.weight
            output[:, 8 * head : 8 * head + 8] *= 400
    return model


def texts(count: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(1, 60, draw.integers(8, 14)).tolist() for _ in range(count)]


def test_a_race_finds_the_heads_of_plain_ablation_with_less_work(model: Model) -> None:
    inputs = texts(60)
    # A larger similarity is better: the smallest change is that of most harm.
    options: dict[str, Any] = {"metric": lens.Similarity(), "progress": False}
    plain = lens.ablate(model, inputs, **options)
    raced = lens.ablate(model, inputs, until="top 2 at 95 %", **options)
    best = [address for address, _ in plain["change"].ranked(smallest=True)[:2]]
    assert set(raced.top) == set(best)
    assert raced.complete
    assert raced.metadata["race"]["measured"] < 0.7
    assert str(raced.top[0]) in str(raced)
    measured = raced["texts"].means
    assert measured.max() <= 60
    assert (raced["tokens"].means >= 8 * measured).all()
    inside = (raced["low"].means <= raced["change"].means) & (
        raced["change"].means <= raced["high"].means
    )
    assert inside.all()
    again = lens.ablate(model, inputs, until=TopHeads(2), **options)
    assert np.array_equal(again["change"].means, raced["change"].means)


def test_heads_that_stay_to_the_end_have_the_values_of_plain_ablation(model: Model) -> None:
    inputs = texts(9)
    plain = lens.ablate(model, inputs, progress=False)
    raced = lens.ablate(model, inputs, until="top 3", progress=False)
    stayed = raced["texts"].means == 9
    assert stayed.any()
    for name in ("metric", "change"):
        assert raced[name].means[stayed] == pytest.approx(plain[name].means[stayed], abs=1e-6)
