"""Heads taken away one after another give what each set of them gives when measured alone."""

import random
from typing import Any

import pytest
import torch

from manyheads.lens.causal.ablation import HeadAblation
from manyheads.models.build import build
from manyheads.taps import Sublayer

TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 3], [11, 12, 13]]
PAIRS = [([5, 6, 7], [1, 2, 3, 4]), ([9, 8, 7, 6], [5, 5, 6])]


def translator() -> Any:
    shape: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "hidden": 32, "vocabulary": 50}
    return build("transformer-base", **shape, seed=0)


def gpt2() -> Any:
    return build("gpt2", layers=3, width=32, heads=4, vocabulary=50, seed=0)


@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
@pytest.mark.parametrize("room", [5, 1024])
def test_a_walk_is_as_the_sets_alone(how: Any, room: int) -> None:
    ablation = HeadAblation.of(gpt2(), TEXTS, replace_with=how, batch_tokens=room, progress=False)
    order = random.Random(0).sample(ablation.scope.heads, 12)
    result = ablation.measure_in_order(order)
    alone = ablation.measure([tuple(order[: count + 1]) for count in range(12)])
    assert result.sets == alone.sets
    torch.testing.assert_close(result.values, alone.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.baseline, alone.baseline, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.weights, alone.weights)


@pytest.mark.parametrize(
    ("stack", "sublayer"),
    [
        ("encoder", Sublayer.ATTENTION),
        ("decoder", Sublayer.ATTENTION),
        ("decoder", Sublayer.CROSS),
    ],
)
def test_a_walk_through_either_stack(stack: Any, sublayer: Sublayer) -> None:
    ablation = HeadAblation.of(translator(), PAIRS, stack=stack, sublayer=sublayer, progress=False)
    order = random.Random(1).sample(ablation.scope.heads, len(ablation.scope.heads))
    result = ablation.measure_in_order(order)
    alone = ablation.measure([tuple(order[: count + 1]) for count in range(len(order))])
    torch.testing.assert_close(result.values, alone.values, atol=1e-5, rtol=0)


def test_nothing_taken_is_the_whole_model() -> None:
    ablation = HeadAblation.of(gpt2(), TEXTS, progress=False)
    result = ablation.measure_in_order([])
    assert result.values.shape == (4, 0)
    torch.testing.assert_close(result.baseline, ablation.measure([]).baseline)


def test_stopped_early_it_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyheads.lens.inputs.cached_run import CachedRun

    continue_from, runs = CachedRun.continue_from, iter(range(99))

    def interrupted(self: CachedRun, *inputs: Any) -> Any:
        if next(runs) == 5:
            raise KeyboardInterrupt
        return continue_from(self, *inputs)

    monkeypatch.setattr(CachedRun, "continue_from", interrupted)
    ablation = HeadAblation.of(gpt2(), TEXTS, batch_tokens=6, progress=False)
    result = ablation.measure_in_order(ablation.scope.heads[:4])
    assert not result.complete
    assert int((~result.values.isnan()).sum()) == 5
