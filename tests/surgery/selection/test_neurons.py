"""Neurons go by what they are worth: each measure against its definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.causal.evaluate import Evaluation
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models.build import build
from manyheads.models.readout import NoReadout
from manyheads.parts.feedforward import MLP
from manyheads.surgery.addresses import find_stack, neuron_site
from manyheads.surgery.pruning import prune_neurons
from manyheads.surgery.selection import neurons
from manyheads.surgery.selection.l0_selection import DEFAULT_L0, L0Config
from manyheads.surgery.selection.neurons import NeuronUnit, select_neurons
from tests.models import zoo

TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7, 5, 6], [9, 8, 7]]
SHORT = L0Config(steps=4)


def loss(model: Any, texts: Any = TEXTS) -> float:
    return lens.ablate_together(model, texts, [], progress=False).baseline


def unit_of(model: Any, texts: Any = TEXTS, stack: Any = None) -> NeuronUnit:
    evaluation = Evaluation.of(model, texts, "loss", None, progress=False)
    return NeuronUnit(evaluation=evaluation, stack=find_stack(model, stack), l0=DEFAULT_L0, seed=0)


def relu(hidden: int = 16) -> Any:
    """Two layers whose neurons are alike and never fire more often than others'."""
    fed = MLP(width=zoo.WIDTH, hidden=hidden, activation="relu")
    return build(zoo.decoder(*[zoo.layer(zoo.writes().attention.inner, fed)] * 2), seed=0)


@pytest.mark.parametrize("by", ["ablation", "gradient", "l0", "random"])
def test_the_curve_is_what_pruned_models_lose(by: Any) -> None:
    model = build(zoo.DECODERS["llama"], seed=0)
    with torch.no_grad():
        model.stack.layers[1].feedforward.contract.weight[:, 5] = 0.0
    chosen = select_neurons(model, TEXTS, by, fraction=0.5, points=2, l0=SHORT, progress=False)
    assert chosen.met
    assert len(chosen.curve) == 2
    pruned = prune_neurons(model, chosen.neurons)
    assert chosen.curve[-1].value == pytest.approx(loss(pruned), abs=1e-5)
    assert chosen.baseline == pytest.approx(loss(model), abs=1e-5)
    if by == "gradient":
        assert next(each.unit for each in chosen.candidates if not each.harmful) == (1, 5)


def test_the_gradient_is_that_of_the_loss() -> None:
    model = build(zoo.DECODERS["llama"], seed=0)
    result = unit_of(model, [TEXTS[0]]).gradient_scores(())
    sites = [neuron_site(model.stack, layer) for layer in range(2)]
    seen = ActivationEditor({}, sites)
    logits = model.run_inputs(read_inputs(model, [TEXTS[0]]), seen).logits.values
    value = F.cross_entropy(logits[:-1], torch.tensor(TEXTS[0][1:]))
    gradients = torch.autograd.grad(value, [seen[site].values for site in sites])
    for layer, (site, gradient) in enumerate(zip(sites, gradients, strict=True)):
        along = (seen[site].values * gradient).detach()
        for neuron in range(40):
            each = result[layer, neuron]
            assert each.importance == pytest.approx(float(along[:, neuron].abs().sum()), abs=1e-5)
            assert each.predicted == pytest.approx(-float(along[:, neuron].sum()), abs=1e-5)


@pytest.mark.parametrize("by", ["ablation", "gradient"])
def test_neurons_that_do_harm_by_three_errors_go_first(
    by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = relu(24)
    parts = unit_of(model)
    effects = parts.evaluation.measure([parts.without([part]) for part in parts.units])
    alone = {part: effects.of(place)[1:] for place, part in enumerate(parts.units)}
    harmful = {part for part, (change, error) in alone.items() if change < -3 * error}
    assert harmful
    chosen = select_neurons(model, TEXTS, by, fraction=0.1, progress=False)
    guess = parts.gradient_scores(())
    if by == "gradient":
        said = {part for part, each in guess.items() if each.predicted < -3 * each.error}
        harmful &= said
        assert harmful <= said
    assert set(chosen.harmful) == harmful
    assert chosen.order[: len(harmful)] == tuple(sorted(harmful, key=lambda part: alone[part][0]))
    assert chosen.harmful_names[0] == "L{}N{}".format(*chosen.order[0])
    rest = [each.score for each in chosen.candidates[len(harmful) :]]
    assert rest == sorted(rest)
    if by == "gradient":
        monkeypatch.setattr(NeuronUnit, "max_suspects", 1)
        assert len(select_neurons(model, TEXTS, by, fraction=0.1, progress=False).harmful) <= 1


def full_cosines(model: Any, layer: int) -> torch.Tensor:
    site = neuron_site(model.stack, layer)
    seen = ActivationEditor({}, [site])
    model.run_inputs(read_inputs(model, TEXTS), seen)
    return F.normalize(seen[site].values.detach(), dim=0).T @ F.normalize(
        seen[site].values.detach(), dim=0
    )


def test_cosines_are_those_of_all_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = relu()
    for room in (neurons.MAX_PRODUCTS, 1):
        monkeypatch.setattr(neurons, "MAX_PRODUCTS", room)
        monkeypatch.setattr("manyheads.lens.causal.evaluate.CPU_BATCH_TOKENS", 6)
        parts = unit_of(model)
        assert len(parts.evaluation.batches) == 3
        result = list(neurons.neuron_similarity(parts.evaluation, model.stack, parts.widths, {}))
        assert [each.layer for each in result] == [0, 1]
        for each in result:
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
    parts = unit_of(model)
    result = parts.redundant(())
    idle = [each.unit for each in result if each.reason == "never fires"]
    assert (0, 12) in idle
    assert [each.unit for each in result[: len(idle)]] == idle
    worth = parts.gradient_scores(())
    gone = {each.unit for each in result[len(idle) :]}
    eight = min(((0, 8), (0, 10)), key=lambda part: worth[part].importance)
    assert len(gone & {(0, 8), (0, 10)}) == 1
    assert eight in gone
    assert 1 <= len(gone & {(0, 3), (0, 13), (0, 14)}) <= 2
    alike = [-each.score for each in result[len(idle) :]]
    assert alike == sorted(alike, reverse=True)
    assert alike[0] == pytest.approx(1.0, abs=1e-5)
    assert alike[-1] >= 0.9
    assert "duplicate of L" in result[len(idle)].reason


def test_more_than_is_redundant_cannot_be_had() -> None:
    model = relu(40)
    result = len(unit_of(model).redundant(()))
    chosen = select_neurons(model, TEXTS, "redundancy", fraction=0.9, progress=False)
    assert not chosen.met
    assert len(chosen.order) == chosen.count == result
    assert chosen.shortfall.startswith("90% of the neurons cannot be reached: ")
    assert chosen.shortfall.endswith(f"; only {result} are redundant")
    few = select_neurons(model, TEXTS, "redundancy", fraction=0.01, progress=False)
    assert few.met
    assert few.curve[-1].value == pytest.approx(loss(prune_neurons(model, few.neurons)), abs=1e-5)


@pytest.mark.parametrize("by", ["gradient", "ablation", "redundancy"])
def test_iterating_measures_what_is_left(by: Any) -> None:
    width = 40 if by == "redundancy" else 16
    model = relu(width)
    options: Any = {"fraction": 8 / (2 * width), "points": 2, "progress": False}
    chosen = select_neurons(model, TEXTS, by, iterative=True, **options)
    once = select_neurons(model, TEXTS, by, **options)
    assert chosen.order[:4] == once.order[:4]
    assert len(set(chosen.order)) == len(chosen.order) == 8
    gone: dict[int, list[int]] = {layer: [] for layer in range(2)} | by_layer(chosen.order[:4])
    left = [[neuron for neuron in range(width) if neuron not in gone[layer]] for layer in range(2)]
    smaller = prune_neurons(model, gone)
    again = select_neurons(smaller, TEXTS, by, fraction=0.2, points=1, progress=False)
    assert chosen.order[4:] == tuple((layer, left[layer][n]) for layer, n in again.order[:4])
    assert chosen.curve[-1].value == pytest.approx(
        loss(prune_neurons(model, chosen.neurons)), abs=1e-5
    )


def by_layer(neurons: Any) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for layer, neuron in neurons:
        result.setdefault(layer, []).append(neuron)
    return result


def test_a_layer_keeps_a_neuron() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    chosen = select_neurons(model, TEXTS, "random", fraction=1.0, points=1, progress=False)
    assert len(chosen.order) == chosen.count == chosen.total - 2
    assert not chosen.met
    prune_neurons(model, chosen.neurons)
    anew = select_neurons(
        model, TEXTS, "gradient", fraction=1.0, points=3, iterative=True, progress=False
    )
    assert len(anew.order) == anew.total - 2
    prune_neurons(model, anew.neurons)


def test_bad_wishes() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    with pytest.raises(InputError, match="use 0 to 1"):
        select_neurons(model, TEXTS, fraction=2.0, progress=False)
    with pytest.raises(InputError, match="points must be at least 1, got 0: use 1 or more"):
        select_neurons(model, TEXTS, points=0, progress=False)
    with pytest.raises(InputError, match="budget must be a number or None, got nan"):
        select_neurons(model, TEXTS, budget=float("nan"), progress=False)
    for by in ("random", "l0"):
        with pytest.raises(InputError, match="leave iterative"):
            select_neurons(model, TEXTS, by, iterative=True, progress=False)  # type: ignore[arg-type]
    plain = zoo.decoder(*[zoo.layer(zoo.own(), None)] * 2)
    for without in (zoo.DECODERS["experts"], plain):
        for by in ("gradient", "redundancy", "l0"):
            with pytest.raises(InputError, match=r"no dense feed-forward.*prune heads or layers"):
                select_neurons(build(without, seed=0), TEXTS, by, progress=False)  # type: ignore[arg-type]


def test_layers_with_experts_keep_their_neurons() -> None:
    mixed = zoo.decoder(zoo.writes(), zoo.layer(zoo.writes().attention.inner, zoo.EXPERTS))
    model = build(mixed, seed=0)
    for by in ("gradient", "redundancy", "l0"):
        chosen = select_neurons(
            model,
            TEXTS,
            by,  # type: ignore[arg-type]
            l0=SHORT,
            points=1,
            progress=False,
        )
        assert {layer for layer, _ in chosen.order} <= {0}
    experts = build(zoo.decoder(zoo.layer(zoo.writes().attention.inner, zoo.EXPERTS)), seed=0)
    with pytest.raises(InputError, match="neurons of experts"):
        select_neurons(experts, TEXTS, progress=False)


def test_vectors_of_a_model_without_readout() -> None:
    config = zoo.encoder(*[zoo.layer()] * 2, position=zoo.LEARNED, readout=NoReadout())
    model = build(config, seed=0)
    with torch.no_grad():
        fed = model.stack.layers[0].feedforward
        fed.expand.weight[4], fed.expand.bias[4] = fed.expand.weight[2], fed.expand.bias[2]
    options: Any = {"metric": lens.Similarity(), "progress": False}
    chosen = select_neurons(model, TEXTS, "redundancy", fraction=0.01, **options)
    assert (0, 4) in chosen.order
    with pytest.raises(InputError, match="compared with itself"):
        select_neurons(model, TEXTS, "gradient", **options)


def test_a_selection_is_printed_in_one_line() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    chosen = select_neurons(model, TEXTS, "random", fraction=0.5, points=2, progress=False)
    change = chosen.curve[-1].change
    assert str(chosen) == (
        f"by random: {chosen.count} of {chosen.total} neurons can be removed, "
        f"loss {chosen.baseline:.4f} {change:+.4f}"
    )
    one = replace(chosen, curve=(replace(chosen.curve[0], removed=1),))
    assert one.rows()[0]["name"] == "L{}N{}".format(*chosen.order[0])
    assert one.rows()[0]["reason"] == "random"


def test_a_budget_is_followed_closer_than_the_points_of_the_curve() -> None:
    model = build("gpt2", layers=2, width=32, heads=4, vocabulary=50, seed=0)
    texts = [list(range(1, 20)), list(range(20, 45))]
    free = select_neurons(model, texts, points=2, progress=False)
    budget = max(free.curve[0].change, 1e-4) / 2
    chosen = select_neurons(model, texts, points=2, budget=budget, progress=False)
    assert len(chosen.curve) > len(free.curve)
    taken = [point.removed for point in chosen.curve]
    assert taken == sorted(taken)
    [last] = [point for point in chosen.curve if point.removed == chosen.count]
    assert last.change <= budget
    beyond = [point for point in chosen.curve if point.removed > chosen.count]
    assert beyond[0].removed - chosen.count <= 2
    assert beyond[0].change > budget
    rows = chosen.rows()
    assert [row["removed"] for row in rows] == taken
    assert [row["selected"] for row in rows] == [count <= chosen.count for count in taken]
    assert rows[0]["name"] == f"{taken[0]} neurons"
    assert rows[0]["units"] == taken[0]
