"""Neurons and layers go by what they are worth."""

import weakref
from typing import Any

import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.surgery.layers import choose_layers
from manyheads.surgery.neurons import choose_neurons
from manyheads.surgery.prune import prune_layers, prune_neurons
from tests.models import zoo

TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7, 5, 6], [9, 8, 7]]


def loss(model: Any) -> float:
    return lens.ablate_together(model, TEXTS, [], shown=False).baseline


@pytest.mark.parametrize("by", ["ablation", "gradient", "random"])
def test_the_curve_of_neurons_is_what_pruned_models_lose(by: Any) -> None:
    model = build(zoo.DECODERS["llama"], seed=0)
    with torch.no_grad():
        model.stack.layers[1].feedforward.contract.weight[:, 5] = 0.0
    chosen = choose_neurons(model, TEXTS, by, share=0.5, points=2, shown=False)
    assert chosen.met
    assert len(chosen.curve) == 2
    pruned = prune_neurons(model, chosen.neurons)
    assert chosen.curve[-1].value == pytest.approx(loss(pruned), abs=1e-5)
    assert chosen.baseline == pytest.approx(loss(model), abs=1e-5)
    if by == "gradient":
        assert chosen.order[0] == (1, 5)


def test_a_layer_keeps_a_neuron() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    chosen = choose_neurons(model, TEXTS, "random", share=1.0, points=1, shown=False)
    assert len(chosen.order) == chosen.total - 2
    prune_neurons(model, chosen.neurons)


def test_the_curve_of_layers_is_what_pruned_models_lose() -> None:
    model = build(zoo.DECODERS["windows and whole"], seed=0)
    chosen = choose_layers(model, TEXTS, share=0.7, shown=False)
    assert len(chosen.layers) == 2
    assert chosen.curve[-1].value == pytest.approx(
        loss(prune_layers(model, chosen.layers)), abs=1e-5
    )
    alone = [loss(prune_layers(model, [layer])) for layer in range(3)]
    assert alone[chosen.order[0]] == pytest.approx(min(alone))
    greedy = choose_layers(model, TEXTS, share=0.7, iterative=True, shown=False)
    assert greedy.order[0] == chosen.order[0]
    assert greedy.curve[-1].value <= chosen.curve[-1].value + 1e-6


def test_budgets_and_bad_wishes() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    assert not choose_layers(model, TEXTS, budget=-50.0, shown=False).met
    assert choose_layers(model, TEXTS, budget=1e9, shown=False).layers
    with pytest.raises(InputError, match="use 0 to 1"):
        choose_neurons(model, TEXTS, share=2.0, shown=False)
    with pytest.raises(InputError, match="leave iterative out"):
        choose_layers(model, TEXTS, "random", iterative=True, shown=False)
    experts = build(zoo.DECODERS["experts"], seed=0)
    with pytest.raises(InputError, match="no feed-forward has neurons"):
        choose_neurons(experts, TEXTS, shown=False)


def test_no_two_models_without_layers_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []

    def watched(*given: Any, **more: Any) -> Any:
        assert not any(each() is not None for each in alive)
        alive.append(weakref.ref(made := prune_layers(*given, **more)))
        return made

    monkeypatch.setattr("manyheads.surgery.layers.prune_layers", watched)
    model = build(zoo.DECODERS["windows and whole"], seed=0)
    choose_layers(model, TEXTS, share=0.7, shown=False)
    assert len(alive) == 5


def test_what_was_chosen_is_told_in_a_line() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    chosen = choose_neurons(model, TEXTS, "random", share=0.5, points=2, shown=False)
    change = chosen.curve[-1].change
    assert str(chosen) == (
        f"by random: {chosen.count} of {chosen.total} neurons may go, "
        f"loss {chosen.baseline:.4f} {change:+.4f}"
    )
    unmet = choose_layers(model, TEXTS, budget=-50.0, shown=False)
    assert str(unmet).endswith("+0.0000, which is not as asked")


def test_a_budget_is_followed_closer_than_the_points_of_the_curve() -> None:
    model = build("gpt2", layers=2, width=32, heads=4, vocabulary=50, seed=0)
    texts = [list(range(1, 20)), list(range(20, 45))]
    free = choose_neurons(model, texts, points=2, shown=False)
    budget = max(free.curve[0].change, 1e-4) / 2
    chosen = choose_neurons(model, texts, points=2, budget=budget, shown=False)
    assert len(chosen.curve) > len(free.curve)
    taken = [point.taken for point in chosen.curve]
    assert taken == sorted(taken)
    [last] = [point for point in chosen.curve if point.taken == chosen.count]
    assert last.change <= budget
    beyond = [point for point in chosen.curve if point.taken > chosen.count]
    assert beyond[0].taken - chosen.count <= 2
    assert beyond[0].change > budget
    rows = chosen.rows()
    assert [row["taken"] for row in rows] == taken
    assert [row["goes"] for row in rows] == [count <= chosen.count for count in taken]
    assert rows[0]["what"] == f"{taken[0]} neurons"
