"""Neurons go by what they are worth: each measure against its definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.given import read, run
from manyheads.lens.trunk import Edits
from manyheads.models.build import build
from manyheads.models.readout import NoReadout
from manyheads.parts.feedforward import MLP
from manyheads.surgery import doubles, ranking
from manyheads.surgery.closing import CLOSING, Closing
from manyheads.surgery.keeping import find_stack
from manyheads.surgery.measuring import Exam
from manyheads.surgery.neurons import Neurons, choose_neurons
from manyheads.surgery.passage import neuron_site
from manyheads.surgery.prune import prune_neurons
from tests.models import zoo

TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7, 5, 6], [9, 8, 7]]
SHORT = Closing(steps=4)


def loss(model: Any, texts: Any = TEXTS) -> float:
    return lens.ablate_together(model, texts, [], shown=False).baseline


def parts_of(model: Any, texts: Any = TEXTS, stack: Any = None) -> Neurons:
    exam = Exam.of(model, texts, "loss", None, shown=False)
    return Neurons(exam=exam, stack=find_stack(model, stack), closing=CLOSING, seed=0)


def relu(hidden: int = 16) -> Any:
    """Two layers whose neurons are alike and never fire more often than others'."""
    fed = MLP(width=zoo.WIDTH, hidden=hidden, activation="relu")
    return build(zoo.decoder(*[zoo.layer(zoo.writes().attention.inner, fed)] * 2), seed=0)


@pytest.mark.parametrize("by", ["ablation", "gradient", "l0", "random"])
def test_the_curve_is_what_pruned_models_lose(by: Any) -> None:
    model = build(zoo.DECODERS["llama"], seed=0)
    with torch.no_grad():
        model.stack.layers[1].feedforward.contract.weight[:, 5] = 0.0
    chosen = choose_neurons(model, TEXTS, by, share=0.5, points=2, closing=SHORT, shown=False)
    assert chosen.met
    assert len(chosen.curve) == 2
    pruned = prune_neurons(model, chosen.neurons)
    assert chosen.curve[-1].value == pytest.approx(loss(pruned), abs=1e-5)
    assert chosen.baseline == pytest.approx(loss(model), abs=1e-5)
    if by == "gradient":
        assert next(each.part for each in chosen.going if not each.harmful) == (1, 5)


def test_the_gradient_is_that_of_the_loss() -> None:
    model = build(zoo.DECODERS["llama"], seed=0)
    found = parts_of(model, [TEXTS[0]]).guess(())
    sites = [neuron_site(model.stack, layer) for layer in range(2)]
    seen = Edits({}, sites)
    logits = run(model, read(model, [TEXTS[0]]), seen).logits.values
    value = F.cross_entropy(logits[:-1], torch.tensor(TEXTS[0][1:]))
    gradients = torch.autograd.grad(value, [seen[site].values for site in sites])
    for layer, (site, gradient) in enumerate(zip(sites, gradients, strict=True)):
        along = (seen[site].values * gradient).detach()
        for neuron in range(40):
            each = found[layer, neuron]
            assert each.size == pytest.approx(float(along[:, neuron].abs().sum()), abs=1e-5)
            assert each.predicted == pytest.approx(-float(along[:, neuron].sum()), abs=1e-5)


@pytest.mark.parametrize("by", ["ablation", "gradient"])
def test_neurons_that_do_harm_by_three_errors_go_first(
    by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = relu(24)
    parts = parts_of(model)
    effects = parts.exam.measure([parts.without([part]) for part in parts.every])
    alone = {part: effects.of(place)[1:] for place, part in enumerate(parts.every)}
    harmful = {part for part, (change, error) in alone.items() if change < -3 * error}
    assert harmful
    chosen = choose_neurons(model, TEXTS, by, share=0.1, shown=False)
    guess = parts.guess(())
    if by == "gradient":
        said = {part for part, each in guess.items() if each.predicted < -3 * each.error}
        harmful &= said
        assert harmful <= said
    assert set(chosen.harmful) == harmful
    assert chosen.order[: len(harmful)] == tuple(sorted(harmful, key=lambda part: alone[part][0]))
    assert chosen.harmful_names[0] == "L{}N{}".format(*chosen.order[0])
    rest = [each.score for each in chosen.going[len(harmful) :]]
    assert rest == sorted(rest)
    if by == "gradient":
        monkeypatch.setattr(ranking, "MOST_SUSPECTS", 1)
        assert len(choose_neurons(model, TEXTS, by, share=0.1, shown=False).harmful) <= 1


def full_cosines(model: Any, layer: int) -> torch.Tensor:
    site = neuron_site(model.stack, layer)
    seen = Edits({}, [site])
    run(model, read(model, TEXTS), seen)
    return F.normalize(seen[site].values.detach(), dim=0).T @ F.normalize(
        seen[site].values.detach(), dim=0
    )


def test_cosines_are_those_of_all_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = relu()
    for room in (doubles.ROOM, 1):
        monkeypatch.setattr(doubles, "ROOM", room)
        monkeypatch.setattr("manyheads.surgery.measuring.ROOM_ON_CPU", 6)
        parts = parts_of(model)
        assert len(parts.exam.shares) == 3
        found = list(doubles.alike_neurons(parts.exam, model.stack, parts.widths, {}))
        assert [each.layer for each in found] == [0, 1]
        for each in found:
            cosines = full_cosines(model, each.layer)
            torch.testing.assert_close(each.cosines, cosines)
            assert torch.equal(each.silent, cosines.diagonal() == 0)
            pairs = {(one, other) for _, one, other in each.pairs(0.5)}
            expected = (cosines.triu(1) >= 0.5).nonzero().tolist()
            assert pairs == set(map(tuple, expected))


def test_of_two_doubles_the_less_important_goes_and_idle_neurons_before() -> None:
    model = relu()
    fed = model.stack.layers[0].feedforward
    with torch.no_grad():
        for double, of in ((13, 3), (14, 3), (10, 8)):
            fed.expand.weight[double] = 2 * fed.expand.weight[of]
            fed.expand.bias[double] = 2 * fed.expand.bias[of]
        fed.expand.weight[12], fed.expand.bias[12] = 0.0, -1.0
    parts = parts_of(model)
    found = parts.redundant(())
    idle = [each.part for each in found if each.why == "never fires"]
    assert (0, 12) in idle
    assert [each.part for each in found[: len(idle)]] == idle
    worth = parts.guess(())
    gone = {each.part for each in found[len(idle) :]}
    eight = min(((0, 8), (0, 10)), key=lambda part: worth[part].size)
    assert len(gone & {(0, 8), (0, 10)}) == 1
    assert eight in gone
    assert 1 <= len(gone & {(0, 3), (0, 13), (0, 14)}) <= 2
    alike = [-each.score for each in found[len(idle) :]]
    assert alike == sorted(alike, reverse=True)
    assert alike[0] == pytest.approx(1.0, abs=1e-5)
    assert alike[-1] >= 0.9
    assert "double of L" in found[len(idle)].why


def test_more_than_is_redundant_cannot_be_had() -> None:
    model = relu(40)
    found = len(parts_of(model).redundant(()))
    chosen = choose_neurons(model, TEXTS, "redundancy", share=0.9, shown=False)
    assert not chosen.met
    assert len(chosen.order) == chosen.count == found
    assert chosen.shortfall.startswith("90% of the neurons cannot be had: ")
    assert chosen.shortfall.endswith(f"; {found} do what another does")
    few = choose_neurons(model, TEXTS, "redundancy", share=0.01, shown=False)
    assert few.met
    assert few.curve[-1].value == pytest.approx(loss(prune_neurons(model, few.neurons)), abs=1e-5)


@pytest.mark.parametrize("by", ["gradient", "ablation", "redundancy"])
def test_iterating_measures_what_is_left(by: Any) -> None:
    width = 40 if by == "redundancy" else 16
    model = relu(width)
    options: Any = {"share": 8 / (2 * width), "points": 2, "shown": False}
    chosen = choose_neurons(model, TEXTS, by, iterative=True, **options)
    once = choose_neurons(model, TEXTS, by, **options)
    assert chosen.order[:4] == once.order[:4]
    assert len(set(chosen.order)) == len(chosen.order) == 8
    gone = {layer: [] for layer in range(2)} | by_layer(chosen.order[:4])
    left = [[neuron for neuron in range(width) if neuron not in gone[layer]] for layer in range(2)]
    smaller = prune_neurons(model, gone)
    again = choose_neurons(smaller, TEXTS, by, share=0.2, points=1, shown=False)
    assert chosen.order[4:] == tuple((layer, left[layer][n]) for layer, n in again.order[:4])
    assert chosen.curve[-1].value == pytest.approx(
        loss(prune_neurons(model, chosen.neurons)), abs=1e-5
    )


def by_layer(neurons: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer, neuron in neurons:
        found.setdefault(layer, []).append(neuron)
    return found


def test_a_layer_keeps_a_neuron() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    chosen = choose_neurons(model, TEXTS, "random", share=1.0, points=1, shown=False)
    assert len(chosen.order) == chosen.total - 2
    assert chosen.met
    prune_neurons(model, chosen.neurons)
    anew = choose_neurons(
        model, TEXTS, "gradient", share=1.0, points=3, iterative=True, shown=False
    )
    assert len(anew.order) == anew.total - 2
    prune_neurons(model, anew.neurons)


def test_bad_wishes() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    with pytest.raises(InputError, match="use 0 to 1"):
        choose_neurons(model, TEXTS, share=2.0, shown=False)
    with pytest.raises(InputError, match="points=0 make no curve: use 1 or more"):
        choose_neurons(model, TEXTS, points=0, shown=False)
    with pytest.raises(InputError, match="budget is no number"):
        choose_neurons(model, TEXTS, budget=float("nan"), shown=False)
    for by in ("random", "l0"):
        with pytest.raises(InputError, match="does not change with each neuron: leave iterative"):
            choose_neurons(model, TEXTS, by, iterative=True, shown=False)  # type: ignore[arg-type]
    plain = zoo.decoder(*[zoo.layer(zoo.own(), None)] * 2)
    for without in (zoo.DECODERS["experts"], plain):
        for by in ("gradient", "redundancy", "l0"):
            with pytest.raises(InputError, match="no feed-forward has neurons"):
                choose_neurons(build(without, seed=0), TEXTS, by, shown=False)  # type: ignore[arg-type]


def test_layers_with_experts_keep_their_neurons() -> None:
    mixed = zoo.decoder(zoo.writes(), zoo.layer(zoo.writes().attention.inner, zoo.EXPERTS))
    model = build(mixed, seed=0)
    for by in ("gradient", "redundancy", "l0"):
        chosen = choose_neurons(
            model,
            TEXTS,
            by,  # type: ignore[arg-type]
            closing=SHORT,
            points=1,
            shown=False,
        )
        assert {layer for layer, _ in chosen.order} <= {0}
    experts = build(zoo.decoder(zoo.layer(zoo.writes().attention.inner, zoo.EXPERTS)), seed=0)
    with pytest.raises(InputError, match="mixtures of experts"):
        choose_neurons(experts, TEXTS, shown=False)


def test_vectors_of_a_model_without_readout() -> None:
    config = zoo.encoder(*[zoo.layer()] * 2, position=zoo.LEARNED, readout=NoReadout())
    model = build(config, seed=0)
    with torch.no_grad():
        fed = model.stack.layers[0].feedforward
        fed.expand.weight[4], fed.expand.bias[4] = fed.expand.weight[2], fed.expand.bias[2]
    options: Any = {"metric": lens.Similarity(), "shown": False}
    chosen = choose_neurons(model, TEXTS, "redundancy", share=0.01, **options)
    assert (0, 4) in chosen.order
    with pytest.raises(InputError, match="most like itself"):
        choose_neurons(model, TEXTS, "gradient", **options)


def test_what_was_chosen_is_told_in_a_line() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    chosen = choose_neurons(model, TEXTS, "random", share=0.5, points=2, shown=False)
    change = chosen.curve[-1].change
    assert str(chosen) == (
        f"by random: {chosen.count} of {chosen.total} neurons may go, "
        f"loss {chosen.baseline:.4f} {change:+.4f}"
    )
    one = replace(chosen, curve=(replace(chosen.curve[0], taken=1),))
    assert one.rows()[0]["what"] == "L{}N{}".format(*chosen.order[0])
    assert one.rows()[0]["why"] == "by chance"


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
    assert rows[0]["parts"] == taken[0]
