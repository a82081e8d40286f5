"""The loop that studies share: rates, spikes, divergence, and that it learns."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from studies.small_models import count_parameters, language_model, matched_model
from studies.training import (
    Recipe,
    Trainer,
    TrainingLog,
    bits_per_byte,
    logits_of,
    loss_by_position,
    losses_of,
    smooth,
)


def decoder() -> nn.Module:
    return language_model(width=16, layers=1, heads=2)


def test_the_rate_rises_and_falls_to_its_share() -> None:
    recipe = Recipe(steps=100, lr=2.0, warm_up=10, final=0.1)
    rates = [recipe.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) <= 2.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.2)
    constant = Recipe(steps=100, lr=2.0, warm_up=10, final=1.0)
    assert {constant.rate(step) for step in range(9, 100)} == {2.0}


@pytest.mark.parametrize(
    ("losses", "spikes"),
    [
        ([3.0] * 200, 0),
        ([3.0] * 100 + [3.4] + [3.0] * 99, 0),
        ([3.0] * 100 + [5.0] + [3.0] * 99, 1),
        # One rise that lasts is one spike.
        ([3.0] * 100 + [5.0] * 5 + [3.0] * 95, 1),
        ([3.0] * 100 + [5.0] + [3.0] * 49 + [5.0] + [3.0] * 49, 2),
        ([3.0] * 100 + [math.nan] * 100, 1),
        ([3.0] * 20, 0),
    ],
)
def test_spikes_are_counted_once(losses: list[float], spikes: int) -> None:
    assert TrainingLog(losses=losses).spikes() == spikes


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([5.5] + [3.0] * 30, False),
        ([5.5] + [6.0] * 30, True),
        ([5.5] + [3.0] * 29 + [math.nan], True),
        ([5.5] + [3.0] * 29 + [math.inf], True),
    ],
)
def test_divergence_is_an_infinite_loss_or_one_above_the_start(
    losses: list[float], diverged: bool
) -> None:
    assert TrainingLog(losses=losses).diverged is diverged


def test_a_model_learns_and_is_seen_where_it_is_watched() -> None:
    generator = torch.Generator().manual_seed(0)
    passage = torch.randint(256, (1, 17), generator=generator).expand(4, 17)
    recipe = Recipe(steps=30, lr=1e-2, warm_up=5)
    seen = {step: lambda model: model.training for step in (0, 30)}
    model = decoder()
    log = Trainer(model, recipe).run([passage] * 40, watch=seen)
    assert len(log.losses) == len(log.gradient_norms) == 30
    assert log.losses[-1] < log.losses[0] - 1
    assert log.watched == {0: False, 30: False}
    assert log.seconds_per_step > 0
    assert not log.diverged
    assert not model.training


def test_a_loss_of_ones_own_reads_whole_batches() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    model = nn.Linear(2, 1)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    batches = [(x, x.sum(1, keepdim=True))] * 50
    log = Trainer(model, Recipe(steps=50, lr=0.1, warm_up=1, weight_decay=0.0), loss).run(batches)
    assert log.losses[-1] < log.losses[0] / 4


def test_losses_are_those_of_the_model_itself() -> None:
    model = decoder().eval()
    passages = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(passages[:, :-1]).logits.flatten(0, 1)
    torch.testing.assert_close(logits_of(model, passages[:, :-1]).detach(), logits)
    expected = nn.functional.cross_entropy(logits, passages[:, 1:].flatten())
    torch.testing.assert_close(losses_of(model, passages).mean().detach(), expected)
    assert bits_per_byte(model, passages, batch=2) == pytest.approx(float(expected) / math.log(2))
    by_position = loss_by_position(model, passages, batch=2)
    assert len(by_position) == 8
    assert sum(by_position) / 8 == pytest.approx(float(expected), rel=1e-5)


def test_a_curve_is_thinned_by_means() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0, 9.0], window=2) == [2.0, 6.0, 9.0]


def test_training_ends_when_nothing_is_left_to_learn() -> None:
    """Of a loss that is small from the start, after the first hundred steps."""
    model = nn.Linear(1, 1)
    recipe = Recipe(steps=250, lr=1e-3, learned=0.1)
    log = Trainer(model, recipe, lambda model, batch: model(batch[0]).square().mean() * 0).run(
        [torch.zeros(1, 1)] * 250
    )
    assert len(log.losses) == 100
    assert math.isnan(log.seconds_per_step)


def test_a_matched_model_has_as_many_weights() -> None:
    weights = count_parameters(language_model(width=32, layers=2, heads=4))
    shape: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "attention": {"kv_heads": 1}}
    assert count_parameters(language_model(**shape)) < 0.9 * weights
    assert count_parameters(matched_model(weights, **shape)) == pytest.approx(weights, rel=0.01)
