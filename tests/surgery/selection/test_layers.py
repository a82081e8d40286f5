"""Whole layers go by what they are worth: each measure against its definition."""

import weakref
from typing import Any

import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.causal.evaluate import Evaluation
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.lens.inputs.metrics import bind_metric
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models.build import build
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import NoReadout
from manyheads.surgery.addresses import layer_ends
from manyheads.surgery.pruning import prune_layers
from manyheads.surgery.selection.l0_selection import DEFAULT_L0, L0Config, LayerGates
from manyheads.surgery.selection.layers import LayerUnit, select_layers
from manyheads.taps import Site, Tap
from manyheads.train.objectives.objective import WatcherChain
from tests.models import zoo

TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7, 5, 6], [9, 8, 7]]
PAIRS = [([1, 2, 3], [0, 4, 5]), ([6, 7], [0, 8, 9, 3])]
SHORT = L0Config(steps=4)


def loss(model: Any, texts: Any = TEXTS) -> float:
    return lens.ablate_together(model, texts, [], progress=False).baseline


def three() -> Any:
    return build(zoo.DECODERS["windows and whole"], seed=0)


def unit_of(model: Any, texts: Any = TEXTS, **more: Any) -> LayerUnit:
    evaluation = Evaluation.of(model, texts, "loss", more.get("targets"), progress=False)
    return LayerUnit(evaluation=evaluation, stack=more.get("stack"), l0=DEFAULT_L0, seed=0)


@pytest.mark.parametrize("by", ["ablation", "gradient", "redundancy", "l0", "random"])
def test_the_curve_is_what_pruned_models_lose(by: Any) -> None:
    model = three()
    chosen = select_layers(model, TEXTS, by, fraction=0.7, l0=SHORT, progress=False)
    assert len(chosen.layers) == 2
    assert chosen.met
    assert len(chosen.curve) == 2
    for count, point in enumerate(chosen.curve, 1):
        pruned = prune_layers(model, chosen.order[:count])
        assert point.value == pytest.approx(loss(pruned), abs=1e-5)


def test_the_least_harm_goes_first_and_harmful_layers_are_named() -> None:
    model = three()
    chosen = select_layers(model, TEXTS, fraction=0.7, progress=False)
    alone = [loss(prune_layers(model, [layer])) - loss(model) for layer in range(3)]
    message = {each.unit: each for each in chosen.candidates}
    for layer, each in message.items():
        assert each.score == pytest.approx(alone[layer], abs=1e-5)
    assert chosen.candidates == tuple(sorted(chosen.candidates, key=lambda each: each.sort_key))
    greedy = select_layers(model, TEXTS, fraction=0.7, iterative=True, progress=False)
    assert greedy.order[0] == chosen.order[0]
    assert greedy.curve[-1].value <= chosen.curve[-1].value + 1e-6
    assert greedy.candidates[1].reason.startswith("then ")


def test_a_layer_that_does_harm_is_named_by_ablation_and_gradient() -> None:
    model = three()
    # What is right is learnt to be wrong by the second layer alone.
    second = model.stack.layers[1].feedforward.contract
    parts = unit_of(model)
    with torch.enable_grad():
        value = sum(
            bind_metric(model, parts.evaluation.inputs, range(3), "loss")(
                observe(model, parts.evaluation.inputs)
            )[0]
        )
        gradient = torch.autograd.grad(value, second.weight)[0]
    with torch.no_grad():
        second.weight += 3 * gradient / gradient.norm()
    assert loss(prune_layers(model, [1])) < loss(model) - 0.1
    for by in ("ablation", "gradient"):
        chosen = select_layers(model, TEXTS, by, progress=False)  # type: ignore[arg-type]
        assert chosen.order[0] == 1
        assert chosen.harmful_names[0] == "layer 1"
        assert chosen.rows()[0]["harmful"] == 1
        assert chosen.count >= 1


def observe(model: Any, inputs: Any) -> Any:
    last = Site(-1, Tap.FINAL)
    record = ActivationEditor({}, [last])
    model.run_inputs(inputs, record)
    return record[last]


@pytest.mark.parametrize(
    ("config", "texts", "stack"),
    [
        (zoo.DECODERS["gpt2"], TEXTS, None),
        (zoo.DECODERS["uneven"], TEXTS, None),
        (zoo.ENCODERS["bert"], TEXTS, None),
        (zoo.SEQ2SEQS["t5"], PAIRS, "encoder"),
    ],
)
def test_the_gradient_is_that_of_an_explicit_gate(config: Any, texts: Any, stack: Any) -> None:
    model = build(config, seed=0)
    targets = [{0: 3}, {1: 2, 4: 1}, {2: 4}] if "Encoder" in type(model).__name__ else None
    parts = unit_of(model, texts, stack=stack, targets=targets)
    result = parts.gradient_scores(())
    gates = Opened(model.stacks()[stack or "main"]).eval()
    inputs = read_inputs(model, texts)
    last = Site(-1, Tap.FINAL, stack="main" if stack is None else "decoder")
    seen = ActivationEditor({}, [last])
    model.run_inputs(inputs, WatcherChain([gates, seen]))
    judged = bind_metric(model, inputs, range(len(texts)), "loss", targets)
    values = judged(seen[last])[0]
    total = (values * judged.weights).sum() / judged.weights.sum()
    gradients = torch.autograd.grad(total, list(gates.z.values()))
    for layer, gradient in zip(gates.z, gradients, strict=True):
        assert result[layer].predicted == pytest.approx(-float(gradient), abs=1e-5)
        assert result[layer].importance >= abs(result[layer].predicted) - 1e-9


class Opened(LayerGates):
    """Gates that are open and plain numbers."""

    def __init__(self, stack: Any) -> None:
        super().__init__(stack)
        self.z = {site.layer: torch.ones(1, requires_grad=True) for site, _, _ in self.sites}

    def values(self, site: Site) -> torch.Tensor:
        return self.z[site.layer]


def test_redundancy_is_how_alike_in_and_out_are() -> None:
    model = three()
    sites = [layer_ends(model.stack, layer) for layer in range(3)]
    record = ActivationEditor({}, [site for both in sites if both is not None for site in both])
    model.run_inputs(read_inputs(model, TEXTS), record)
    alike = {
        layer: float(
            torch.cosine_similarity(*(record[site].values.detach() for site in both), dim=-1).mean()
        )
        for layer, both in enumerate(sites)
        if both is not None
    }
    result = unit_of(model).redundant(())
    assert [each.unit for each in result] == sorted(alike, key=lambda layer: -alike[layer])
    for each in result:
        assert each.score == pytest.approx(-alike[each.unit], abs=1e-5)
    assert select_layers(model, TEXTS, "redundancy", progress=False).order == tuple(
        each.unit for each in result[:2]
    )


@pytest.mark.parametrize("by", ["gradient", "redundancy"])
def test_iterating_measures_the_shorter_model(by: Any) -> None:
    model = build(zoo.decoder(*[zoo.writes()] * 4), seed=3)
    chosen = select_layers(model, TEXTS, by, fraction=0.75, iterative=True, progress=False)
    left = list(range(4))
    for gone in chosen.order:
        shorter = prune_layers(model, [layer for layer in range(4) if layer not in left])
        first = select_layers(shorter, TEXTS, by, progress=False).order[0]
        assert gone == left[first]
        left.remove(gone)
    assert len(left) == 1


def test_a_layer_without_sublayers_goes_first_by_every_measure() -> None:
    config = zoo.decoder(zoo.writes(), LayerConfig(attention=None, feedforward=None), zoo.writes())
    model = build(config, seed=0)
    for by in ("gradient", "redundancy", "l0"):
        chosen = select_layers(model, TEXTS, by, l0=SHORT, progress=False)  # type: ignore[arg-type]
        unharmful = [each.unit for each in chosen.candidates if not each.harmful]
        assert unharmful[0] == 1


def test_encoders_vectors_and_pairs() -> None:
    config = zoo.encoder(*[zoo.layer()] * 3, position=zoo.LEARNED, readout=NoReadout())
    vectors = build(config, seed=0)
    alike = select_layers(vectors, TEXTS, "redundancy", metric=lens.Similarity(), progress=False)
    assert len(alike.order) == 2
    with pytest.raises(
        InputError, match=r"compared with itself.*use by=.ablation. or by=.redundancy."
    ):
        select_layers(vectors, TEXTS, "gradient", metric=lens.Similarity(), progress=False)
    model = build(zoo.SEQ2SEQS["2017"], seed=0)
    for by in ("gradient", "redundancy", "l0"):
        chosen = select_layers(
            model,
            PAIRS,
            by,  # type: ignore[arg-type]
            stack="encoder",
            fraction=0.5,
            l0=SHORT,
            progress=False,
        )
        pruned = prune_layers(model, chosen.layers, stack="encoder")
        assert chosen.curve[-1].value == pytest.approx(loss(pruned, PAIRS), abs=1e-5)


def test_budgets_and_bad_wishes() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0)
    unmet = select_layers(model, TEXTS, budget=-50.0, progress=False)
    assert not unmet.met
    assert "not as requested" in str(unmet)
    assert "at most -50 in loss" in unmet.shortfall
    assert select_layers(model, TEXTS, budget=1e9, progress=False).layers
    for by in ("random", "l0"):
        with pytest.raises(InputError, match="leave iterative"):
            select_layers(model, TEXTS, by, iterative=True, progress=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no stack 'encoder'"):
        select_layers(model, TEXTS, stack="encoder", progress=False)


def test_no_two_models_without_layers_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []

    def watched(*inputs: Any, **more: Any) -> Any:
        assert not any(each() is not None for each in alive)
        alive.append(weakref.ref(made := prune_layers(*inputs, **more)))
        return made

    monkeypatch.setattr("manyheads.surgery.selection.layers.prune_layers", watched)
    select_layers(three(), TEXTS, fraction=0.7, progress=False)
    assert len(alive) == 5
