"""The parts of the study of savings: schedules, growing batches, padding, and resumed trainers."""

import math
from itertools import islice

import pytest
import torch

from manyheads.train import BatchGrowth
from studies.savings.filled_batches import ByteBatch, packed
from studies.savings.schedules import ConstantThenDecay, growing, reached
from studies.savings.study import growth_saving, resumed, saved, tiling_saving
from studies.small_models import language_model
from studies.study import Arm, Result, Verdict
from studies.training import Recipe, Trainer


def test_the_rate_stays_and_then_decays() -> None:
    recipe = ConstantThenDecay(steps=20, lr=1.0, warm_up=4, decay=4)
    rates = [recipe.rate(step) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(rates[4:17]) == {1.0}
    assert rates[17] == 0.5
    assert rates[20] == 0.0


def test_growing_batches_use_the_bytes_of_their_growth() -> None:
    growth = BatchGrowth(first=8, last=16, by=4, over=40)
    batches = iter([torch.zeros(4, 5)] * 10)
    grown = list(islice(growing(batches, growth, 4), 6))
    assert [len(batch) for _, batch in grown] == [2, 2, 3, 3, 4, 4]
    assert [used for used, _ in grown] == [growth.tokens_before(step + 1) for step in range(6)]


@pytest.mark.parametrize(("target", "cost"), [(2.5, 5.0), (3.5, 0.0), (1.0, 20.0), (0.5, None)])
def test_a_curve_is_read_backwards(target: float, cost: float | None) -> None:
    assert reached([0, 10, 20], [3.0, 2.0, 1.0], target) == cost


def test_padding_changes_no_loss() -> None:
    model = language_model(width=16, layers=1, heads=2)
    texts = [b"a short line", b"a line that is much longer", b"three"]
    padded, unpadded = ByteBatch.of(texts, "cpu", 30), ByteBatch.of(texts, "cpu")
    assert padded.counted == unpadded.counted == len(unpadded.targets)
    assert len(padded.targets) == 90
    with torch.no_grad():
        torch.testing.assert_close(padded.loss(model), unpadded.loss(model))


def test_packed_batches_have_every_line_once() -> None:
    lines = [bytes(range(size)) for size in (9, 5, 4, 6, 3)]
    batches = packed(lines, 12)
    assert sorted(line for batch in batches for line in batch) == sorted(lines)
    assert all(sum(len(line) - 1 for line in batch) <= 12 for batch in batches)


class ThreeMoreSteps(Recipe):
    """The rates of a warm-up that three steps have begun."""

    def rate(self, step: int) -> float:
        return self.lr * (step + 4) / self.warm_up


def test_a_resumed_trainer_goes_on_as_if_never_stopped() -> None:
    batches = [torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))] * 6
    whole, first = (
        Trainer(language_model(width=8, layers=1, heads=1), Recipe(steps=steps, lr=0.01, final=1.0))
        for steps in (6, 3)
    )
    losses, early = whole.run(batches).losses, first.run(batches).losses
    second = resumed(first, ThreeMoreSteps(steps=3, lr=0.01))
    assert [*early, *second.run(batches).losses] == pytest.approx(losses, rel=1e-6)
    assert all(group["lr"] is second.rate for group in second.optimizer.param_groups)


def test_a_saving_is_a_share_of_the_bytes_of_the_plain_run() -> None:
    result, cost = Result("savings", "full", {}, ""), [0, 10, 20, 30, 40]
    for arm, losses in {
        "plain": [5.0, 4.0, 3.0, 2.0, 1.0],
        "tiled": [4.0, 3.0, 1.0, 1.0, 1.0],
        "growing batch": [5.0, 4.0, 3.0, 2.0, 1.2],
    }.items():
        result.add(Arm(arm), {"cost": cost, "losses": losses, "small cost": 5.0}, 0.0)
    assert saved(result, "tiled", 1.0) == [0.5]
    assert saved(result, "tiled", 0.5) == [0.5]
    assert saved(result, "growing batch", 0.5) == [0.0]
    assert saved(result, "growing batch", 1.0) == [-math.inf]
    assert saved(result, "cosine", 1.0) == []
    assert growth_saving(result)[0] is Verdict.NOT_HERE
    assert "more bytes than the whole run" in growth_saving(result)[1]
    assert tiling_saving(result)[0] is Verdict.HOLDS
