"""Which heads go first, what each costs, and when to stop."""

from typing import Any

import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.models.decoder import Decoder
from manyheads.models.readout import NoReadout
from manyheads.parts.gates import Gate
from manyheads.parts.positions import Rotary
from manyheads.surgery.finetune.loop import RecoveryConfig, recover
from manyheads.surgery.finetune.trainable import freeze_except
from manyheads.surgery.pruning import prune
from manyheads.surgery.selection.heads import select_heads
from manyheads.surgery.selection.l0_selection import L0Config
from manyheads.taps import Head, Sublayer
from manyheads.train.optim.optimizers import AdamW
from tests.models import zoo

TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 3], [11, 12, 13]]
SHORT = L0Config(steps=8, weight=0.1)


def tiny(**changes: Any) -> Decoder:
    config = zoo.decoder(*[zoo.writes(position=Rotary(), **changes)] * 2)
    return build(config, seed=0)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny()


def loss(model: Any, texts: Any = TEXTS) -> float:
    return lens.ablate_together(model, texts, [], progress=False).baseline


@pytest.mark.parametrize("by", ["ablation", "gradient", "random", "l0"])
def test_the_curve_is_what_pruned_models_lose(model: Decoder, by: Any) -> None:
    chosen = select_heads(model, TEXTS, by, fraction=0.5, l0=SHORT, progress=False)
    assert chosen.met
    assert len(chosen.heads) == 4
    for count, step in ((2, chosen.curve[1]), (4, chosen.curve[3])):
        heads = chosen.order[:count]
        assert step.value == pytest.approx(loss(prune(model, heads)), abs=1e-5)
        assert step.change == pytest.approx(step.value - chosen.baseline, abs=1e-5)
        assert step.error > 0


def test_heads_stand_in_for_their_mean(model: Decoder) -> None:
    chosen = select_heads(model, TEXTS, "random", fraction=0.4, replace_with="mean", progress=False)
    pruned = prune(model, chosen.heads, "mean", TEXTS)
    assert chosen.curve[-1].value == pytest.approx(loss(pruned), abs=1e-5)


def test_the_least_harm_goes_first_and_harmful_heads_before_all(model: Decoder) -> None:
    chosen = select_heads(model, TEXTS, fraction=1.0, progress=False)
    alone = lens.ablate(model, TEXTS, progress=False)
    changes = dict(alone["change"].ranked())
    harmful = [head for head, _ in alone.harmful()]
    assert set(chosen.harmful) == set(harmful)
    assert list(chosen.order[: len(harmful)]) == sorted(harmful, key=lambda head: changes[head])
    rest = [changes[head] for head in chosen.order[len(harmful) :]]
    assert rest == sorted(rest)


def test_a_head_without_output_costs_nothing(model: Decoder) -> None:
    silent = prune(model, [])
    attention = silent.stack.layers[1].attention
    with torch.no_grad():
        attention.output.weight[:, 16:24] = 0.0
    for by in ("ablation", "gradient"):
        chosen = select_heads(silent, TEXTS, by, fraction=1.0, progress=False)  # type: ignore[arg-type]
        unharmful = [each.unit.head for each in chosen.candidates if not each.harmful]
        if by == "gradient":
            assert unharmful[0] == Head(1, 2)
        place = [address.head for address in chosen.order].index(Head(1, 2))
        before = chosen.curve[place - 1].value if place else chosen.baseline
        assert chosen.curve[place].value == pytest.approx(before, abs=1e-6)


def test_of_two_doubles_one_goes() -> None:
    model = tiny()
    attention = model.stack.layers[0].attention
    with torch.no_grad():
        rows = attention.project.weight.view(3, 4, 8, 32)
        rows[:, 3] = rows[:, 1]
        columns = attention.output.weight.view(32, 4, 8)
        columns[:, 3] = columns[:, 1]
    chosen = select_heads(model, TEXTS, "redundancy", fraction=0.125, progress=False)
    assert chosen.met
    assert {chosen.heads[0].head} < {Head(0, 1), Head(0, 3)}
    assert "duplicate of" in chosen.candidates[0].reason
    more = select_heads(model, TEXTS, "redundancy", fraction=0.9, progress=False)
    assert not more.met
    assert "cannot be reached" in more.shortfall
    assert more.shortfall.endswith(f"; only {len(more.order)} are redundant")


def test_a_head_that_only_the_gradient_calls_harmful_does_not_go_first(model: Decoder) -> None:
    result = lens.importance(model, TEXTS, progress=False)
    predicted = result["predicted"]
    said = predicted.means < -predicted.errors
    suspects = {head for head, harm in zip(result.addresses, said, strict=True) if harm}
    alone = {head for head, _ in lens.ablate(model, TEXTS, progress=False).harmful()}
    chosen = select_heads(model, TEXTS, "gradient", fraction=0.0, progress=False)
    assert set(chosen.harmful) == suspects & alone
    first = len(chosen.harmful)
    assert set(chosen.order[:first]) == set(chosen.harmful)
    sizes = [each.score for each in chosen.candidates[first:]]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("by", ["ablation", "gradient"])
def test_iterating_measures_anew(model: Decoder, by: Any) -> None:
    chosen = select_heads(model, TEXTS, by, fraction=0.5, iterative=True, progress=False)
    assert len(chosen.heads) == 4
    assert chosen.curve[-1].value == pytest.approx(loss(prune(model, chosen.heads)), abs=1e-5)
    if by == "ablation":
        greedy = lens.ablate_greedily(model, TEXTS, 4, progress=False)
        assert tuple(each.head for each in chosen.heads) == greedy.order


@pytest.mark.parametrize(
    ("by", "iterative", "bias", "keep"),
    [
        ("random", False, "all", "zero"),
        ("ablation", True, "none", "mean"),
        ("gradient", True, "all", "zero"),
    ],
)
def test_a_layer_that_needs_a_head_keeps_one(
    by: Any, iterative: bool, bias: Any, keep: Any
) -> None:
    gated = tiny(bias=bias, gates=(Gate(at="final"),))
    options: Any = {"iterative": iterative, "replace_with": keep, "progress": False}
    chosen = select_heads(gated, TEXTS, by, budget=1e9, **options)
    assert len(chosen.heads) == chosen.total - 2
    prune(gated, chosen.heads, keep, TEXTS)
    assert not select_heads(gated, TEXTS, by, fraction=1.0, **options).met


def test_a_budget_takes_all_that_fit_it(model: Decoder) -> None:
    whole = select_heads(model, TEXTS, fraction=1.0, progress=False)
    budget = sorted(step.change for step in whole.curve)[4]
    chosen = select_heads(model, TEXTS, budget=budget, progress=False)
    assert chosen.met
    assert chosen.change <= budget
    later = whole.curve[chosen.count :]
    assert all(step.change > budget for step in later)
    spent = select_heads(model, TEXTS, budget=budget, iterative=True, progress=False)
    assert spent.change <= budget


def test_a_budget_that_cannot_be_met_tells_the_best(model: Decoder) -> None:
    chosen = select_heads(model, TEXTS, budget=-100.0, progress=False)
    assert not chosen.met
    assert chosen.heads == ()
    assert "at best" in chosen.shortfall
    both = select_heads(model, TEXTS, fraction=1.0, budget=-100.0, progress=False)
    assert not both.met
    assert both.count == 0


def test_without_a_wish_only_free_heads_go(model: Decoder) -> None:
    chosen = select_heads(model, TEXTS, progress=False)
    assert chosen.change <= 0
    assert chosen.met


def test_rows_say_what_goes_and_why(model: Decoder) -> None:
    rows = select_heads(model, TEXTS, fraction=0.25, progress=False).rows()
    assert [row["selected"] for row in rows] == [True, True]
    assert rows[0]["fraction"] == pytest.approx(1 / 8)
    assert "±" in rows[0]["reason"]


def test_vectors_are_compared_where_nothing_is_answered() -> None:
    config = zoo.encoder(*[zoo.layer()] * 2, position=zoo.LEARNED, readout=NoReadout())
    model = build(config, seed=0)
    chosen = select_heads(model, TEXTS, fraction=0.5, metric=lens.Similarity(), progress=False)
    assert chosen.baseline == pytest.approx(1.0, abs=1e-6)
    pruned = prune(model, chosen.heads)
    result = []
    for text in TEXTS:
        one, other = (each(torch.tensor([text])).hidden[0].mean(0) for each in (model, pruned))
        result.append(torch.cosine_similarity(one, other, dim=0))
    assert chosen.curve[-1].value == pytest.approx(
        float(torch.stack(result).detach().mean()), abs=1e-5
    )
    with pytest.raises(InputError, match="compared with itself"):
        select_heads(model, TEXTS, "gradient", metric=lens.Similarity(), progress=False)


def test_cross_heads_and_masked_words_and_classes() -> None:
    model = build(zoo.SEQ2SEQS["t5"], seed=0)
    pairs = [([1, 2, 3], [0, 4, 5]), ([6, 7], [0, 8, 9, 3])]
    chosen = select_heads(model, pairs, fraction=0.5, sublayer=Sublayer.CROSS, progress=False)
    assert {each.sublayer for each in chosen.heads} == {Sublayer.CROSS}
    assert chosen.curve[-1].value == pytest.approx(
        loss(prune(model, chosen.heads), pairs), abs=1e-5
    )
    masked = build(zoo.ENCODERS["modernbert"], seed=0)
    targets = [{0: 3}, {1: 2}, {2: 4, 0: 1}, {0: 1}]
    options: Any = {"fraction": 0.3, "l0": SHORT, "progress": False}
    assert select_heads(masked, TEXTS, "l0", targets=targets, **options).met
    images = build(zoo.VISIONS["vit"], seed=0)
    assert select_heads(images, zoo.images(), "l0", targets=[0, 1, 2, 3], **options).met


def test_gates_close_where_closing_is_cheap(model: Decoder) -> None:
    silent = prune(model, [])
    attention = silent.stack.layers[0].attention
    with torch.no_grad():
        attention.output.weight[:, :8] = 0.0
    strong = L0Config(steps=30, weight=0.05, lr=0.3)
    state = torch.get_rng_state()
    before = {name: each.clone() for name, each in silent.state_dict().items()}
    chosen = select_heads(silent, TEXTS, "l0", fraction=0.5, l0=strong, progress=False)
    assert Head(0, 0) in [each.head for each in chosen.heads]
    assert torch.equal(torch.get_rng_state(), state)
    after = silent.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_mending_lowers_the_loss_and_leaves_the_model_alone(model: Decoder) -> None:
    pruned = prune(model, ["L0H0", "L1H1", "L1H2"])
    before = {name: each.clone() for name, each in pruned.state_dict().items()}
    config = RecoveryConfig(optimizer=AdamW(lr=3e-3))
    mended = recover(pruned, TEXTS, steps=20, config=config, progress=False)
    assert loss(mended) < loss(pruned) - 0.1
    assert mended.config == pruned.config
    assert all(torch.equal(before[name], each) for name, each in pruned.state_dict().items())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fraction": 1.5}, "use 0 to 1"),
        ({"by": "random", "iterative": True}, "leave iterative out"),
    ],
)
def test_invalid_options_are_refused(model: Decoder, options: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        select_heads(model, TEXTS, progress=False, **options)


def test_only_what_may_learn_is_mended(model: Decoder) -> None:
    held = prune(model, [])
    freeze_except(held, ["L0H1"])
    mended = recover(held, TEXTS, steps=2, progress=False)
    before, after = held.state_dict(), mended.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    attention = "stack.layers.0.attention"
    assert moved <= {
        *(f"{attention}.{part}" for part in ("project.weight", "project.bias", "output.weight"))
    }
    size = model.config.stack.layers[0].attention.inner.size
    columns = (after[f"{attention}.output.weight"] != before[f"{attention}.output.weight"]).any(0)
    assert columns.nonzero().flatten().tolist() == list(range(size, 2 * size))
    for parameter in held.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InputError, match=r"surgery\.unfreeze_all\(model\)"):
        recover(held, TEXTS, steps=2, progress=False)


def test_no_steps_mend_nothing(model: Decoder) -> None:
    with pytest.raises(InputError, match="use 1 or more"):
        recover(model, TEXTS, steps=0, progress=False)
