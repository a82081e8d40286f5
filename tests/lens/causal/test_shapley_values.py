"""Shapley values: exact where all orders are tried or heads add up, and what is reported."""

from itertools import combinations, permutations
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.errors import ConfigError, InputError
from manyheads.lens.causal import shapley_values
from manyheads.lens.causal.ablation import AblationSteps, ablate, ablate_together
from manyheads.lens.causal.shapley_values import shapley
from manyheads.lens.inputs.metrics import LogitDifference, StateMetric
from manyheads.models.build import build
from manyheads.ragged import Ragged
from tests.bridge.zoo import tiny
from tests.lens.planted import Look, offset_look, text_model
from tests.messages import refuses
from tests.models.zoo import DECODERS, SEQ2SEQS, ids, small

TEXTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=3)


def exact(model: Any, **options: Any) -> list[float]:
    """By the definition: a weighted sum over all sets of the other heads."""
    heads = ["L0H0", "L0H1", "L1H0", "L1H1"]
    worth = {
        frozenset(present): ablate_together(
            model, TEXTS, [head for head in heads if head not in present], **options
        ).value
        for count in range(5)
        for present in combinations(heads, count)
    }
    values = []
    for head in heads:
        rest = [other for other in heads if other != head]
        values.append(
            sum(
                factorial(count)
                * factorial(3 - count)
                / factorial(4)
                * (worth[frozenset((*present, head))] - worth[frozenset(present)])
                for count in range(4)
                for present in combinations(rest, count)
            )
        )
    return values


@pytest.mark.parametrize("replace_with", ["zero", "mean"])
def test_all_orders_give_the_definition(
    model: Any, replace_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = [list(order) for order in permutations(range(4))]
    monkeypatch.setattr(shapley_values, "sample_orders", lambda *_, **__: orders)
    result = shapley(
        model, TEXTS, replace_with=replace_with, permutations=24, antithetic=False, progress=False
    )
    expected = exact(model, replace_with=replace_with, progress=False)
    np.testing.assert_allclose(result["shapley"].means, expected, atol=1e-5)


def test_heads_that_add_up_have_the_same_value_in_every_order() -> None:
    generator = torch.Generator().manual_seed(0)
    writes = [torch.randn(48, 48, generator=generator) for _ in range(3)]
    looks = [Look(places=offset_look(-at).places, writes=writes[at]) for at in range(3)]
    model = text_model(looks)
    direction = torch.randn(model.config.stack.width, generator=generator)

    def along(states: Ragged, _: Any) -> torch.Tensor:
        return torch.stack([rows[-1] @ direction for rows in states.to_list()])

    metric = StateMetric(along)
    result = shapley(model, TEXTS, metric=metric, permutations=6, progress=False)
    alone = ablate(model, TEXTS, metric=metric, progress=False)["change"].means
    np.testing.assert_allclose(result["shapley"].means, -alone, rtol=1e-4, atol=1e-5)
    assert result["shapley"].errors.max() < 1e-5
    best = result.ranked()[0][0]
    assert best == alone_order(result, alone)[0]


def alone_order(result: Any, change: Any) -> list[Any]:
    return [result.addresses[index] for index in np.argsort(change)]


@pytest.mark.parametrize("name", ["llama", "gates", "uneven"])
def test_values_sum_to_the_full_minus_the_ablated_metric(name: str) -> None:
    model = small(DECODERS[name])
    result = shapley(model, ids((4, 6)), permutations=2, batch_tokens=5, progress=False)
    together = ablate_together(model, ids((4, 6)), "all", progress=False)
    assert result.full == pytest.approx(together.baseline, rel=1e-5)
    assert result.ablated == pytest.approx(together.value, rel=1e-5)
    assert result["shapley"].means.sum() == pytest.approx(result.full - result.ablated, abs=1e-5)


def test_pairs_of_reversed_orders_lower_the_error(model: Any) -> None:
    paired = shapley(model, TEXTS, permutations=40, progress=False)
    single = shapley(model, TEXTS, permutations=40, antithetic=False, progress=False)
    assert paired["shapley"].errors.sum() < single["shapley"].errors.sum()
    expected = exact(model, progress=False)
    for result in (paired, single):
        column = result["shapley"]
        assert (np.abs(column.means - expected) < 5 * column.errors + 1e-6).all()


def test_truncation_keeps_the_sum_and_saves_runs(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    original = AblationSteps.run

    def run(self: Any, removed: Any, start: int) -> Any:
        runs.append(start)
        return original(self, removed, start)

    monkeypatch.setattr(AblationSteps, "run", run)
    shapley(model, TEXTS, permutations=2, progress=False)
    whole = len(runs)
    runs.clear()
    result = shapley(model, TEXTS, permutations=2, truncate=100.0, progress=False)
    assert len(runs) < whole
    assert result["shapley"].means.sum() == pytest.approx(result.full - result.ablated, abs=1e-6)
    assert np.ptp(result["shapley"].means) < 1e-9


def test_other_heads_stay_present(model: Any) -> None:
    result = shapley(model, TEXTS, "L1", permutations=4, progress=False)
    values = result["shapley"].means
    assert np.isnan(values[:2]).all()
    together = ablate_together(model, TEXTS, "L1", progress=False)
    assert values[2:].sum() == pytest.approx(-together.change, abs=1e-5)
    assert len(result.ranked()) == 2


def test_the_most_useful_head_comes_first(model: Any) -> None:
    losses = [value for _, value in shapley(model, TEXTS, permutations=2).ranked()]
    assert losses == sorted(losses)
    metric = LogitDifference(answer=(1, 2, 3), distractor=(4, 5, 6))
    result = shapley(model, TEXTS, metric=metric, permutations=2)
    differences = [value for _, value in result.ranked()]
    assert differences == sorted(differences, reverse=True)
    assert result.ranking().row_count == 4


def test_wrapped_models_and_pairs_are_measured() -> None:
    wrapped = tiny("gpt2")
    result = shapley(wrapped, TEXTS, permutations=2, progress=False)
    together = ablate_together(wrapped, TEXTS, "all", progress=False)
    assert result["shapley"].means.sum() == pytest.approx(-together.change, abs=1e-4)
    pairs = small(SEQ2SEQS["t5"])
    source = ids((4, 3))
    both = shapley(pairs, (source, ids((3, 5), seed=1)), stack="encoder", permutations=2)
    assert not np.isnan(both["shapley"].means).any()


def test_ctrl_c_keeps_the_finished_permutations(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, batches = shapley_values._Games._play_batch, []

    def play(self: Any, texts: range, orders: Any) -> Any:
        batches.append(texts)
        if len(batches) > 3:
            raise KeyboardInterrupt
        return original(self, texts, orders)

    monkeypatch.setattr(shapley_values._Games, "_play_batch", play)
    result = shapley(model, TEXTS, permutations=6, batch_tokens=1, progress=False)
    assert not result.complete
    assert result.permutations == 2
    assert "interrupted" in str(result)


def test_it_can_be_saved_and_loaded(model: Any, tmp_path: Path) -> None:
    result = shapley(model, TEXTS, permutations=4, progress=False)
    result.save(tmp_path / "values.json")
    loaded = lens.load(tmp_path / "values.json")
    assert str(loaded) == str(result)
    assert loaded.ranked() == result.ranked()


def test_refusals(model: Any) -> None:
    with refuses(InputError, "permutations=3", "4"):
        shapley(model, TEXTS, permutations=3)
    with refuses(ConfigError, "permutations", "0"):
        shapley(model, TEXTS, permutations=0)
    with refuses(InputError, "truncate", "-1"):
        shapley(model, TEXTS, truncate=-1.0)
