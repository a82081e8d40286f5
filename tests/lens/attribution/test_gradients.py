"""Gradients: integrated ones add up, and estimates are those of their formulas."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor

from manyheads import progress
from manyheads.errors import ConvergenceError, InputError, ShapeError
from manyheads.lens.attribution import gradients
from manyheads.lens.attribution.direct_logits import attribute_logits
from manyheads.lens.attribution.gradients import (
    gradient_times_attention,
    integrate_heads,
    integrate_inputs,
)
from manyheads.lens.causal.ablation import ablate, ablate_together
from manyheads.lens.causal.gradient_importance import importance, rank_correlation
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.models.build import build
from manyheads.models.recipes import gpt2
from manyheads.parts.masks import Causal
from manyheads.parts.norms import NoNorm, PreNorm
from manyheads.ragged import Ragged
from manyheads.taps import Head, Patterns, Record, Site, Sublayer, Tap
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    READS_T5,
    VISIONS,
    WRITES_T5,
    decoder,
    ids,
    images,
    layer,
    own,
    seq2seq,
    small,
)

LENGTHS = (5, 1, 12, 7)
NAMES = ("gpt2", "llama", "gates", "experts", "uneven", "both norms")


@pytest.mark.parametrize("name", ["gpt2", "llama", "gates", "uneven", "both norms"])
def test_tokens_add_up_to_the_difference_from_a_baseline(name: str) -> None:
    model, batch = small(DECODERS[name]), ids(LENGTHS)
    with torch.no_grad():
        start = model.embedding(batch, batch.lengths.positions).map(lambda x: x * 0.3)
    result = integrate_inputs(model, batch, baseline=start, progress=False)
    assert result.completeness < 1e-3
    assert result.expected.abs().max() > 1e-2
    assert result.tokens.lengths.each == LENGTHS


def test_tokens_add_up_to_the_difference_from_nothing() -> None:
    config = gpt2(width=32, heads=2, layers=2, vocabulary=50, positions=16)
    model = build(config, seed=0)
    inputs = [[1, 2, 3, 4], [5, 6, 7]]
    result = integrate_inputs(model, inputs, baseline="zero", steps=128, progress=False)
    assert result.completeness < 1e-3
    assert result.of(1).shape == (3,)


def test_a_path_has_a_flag_for_convergence() -> None:
    model = build(gpt2(width=32, heads=2, layers=2, vocabulary=50, positions=16), seed=0)
    few, many = (
        integrate_inputs(model, [[1, 2, 3, 4]], steps=steps, progress=False) for steps in (1, 128)
    )
    assert not few.converged
    assert "in 1 step, not converged: they are off by" in str(few)
    assert many.converged
    assert "not converged" not in str(many)


def test_heads_add_up_to_what_all_of_them_bring() -> None:
    model, batch = small(DECODERS["gates"]), ids(LENGTHS)
    result = integrate_heads(model, batch, progress=False)
    assert result.completeness < 1e-3
    weights = torch.tensor([length - 1.0 for length in LENGTHS])
    whole = float((result.expected * weights).sum() / weights.sum())
    without = ablate_together(model, batch, "all", progress=False)
    assert whole == pytest.approx(-without.change, abs=1e-5)
    assert float(result.heads["attribution"].means.sum()) == pytest.approx(whole, abs=1e-3)


def test_heads_of_one_layer_add_up_to_that_layer() -> None:
    model, batch = small(DECODERS["llama"]), ids(LENGTHS)
    result = integrate_heads(model, batch, layers=[1], progress=False)
    assert result.completeness < 1e-3
    without = ablate_together(model, batch, [Head(1, head) for head in range(4)], progress=False)
    mean = float(result.heads["attribution"].means.sum())
    assert mean == pytest.approx(-without.change, abs=1e-3)
    with refuses(InputError, "(7,)", "(0, 1)"):
        integrate_heads(model, batch, layers=[7])


def test_in_a_linear_layer_heads_get_their_direct_logits() -> None:
    bare = layer(own(mask=Causal()), None, norm=PreNorm(NoNorm()))
    config = decoder(bare)
    model = build(replace(config, stack=replace(config.stack, final_norm=NoNorm())), seed=0)
    batch = ids((5, 7))
    metric = LogitDifference(answer=(1, 2), distractor=(3, 4))
    result = integrate_heads(model, batch, metric, steps=4, progress=False)
    direct = attribute_logits(model, batch, (1, 2), (3, 4))
    torch.testing.assert_close(result.by_head, direct.by_head, atol=1e-5, rtol=1e-5)


def test_images_and_pairs_integrate_too() -> None:
    # The class token enters as nothing, and only the first layer gives it a length.
    vit, pair = small(VISIONS["vit"]), (ids((5, 3)), ids((4, 6), seed=1))
    result = integrate_heads(
        vit, images(), layers=[1], targets=[0, 1, 2, 3], steps=64, progress=False
    )
    assert result.completeness < 1e-3
    model = small(seq2seq([READS_T5], [WRITES_T5]))
    places: Any = (
        ("encoder", Sublayer.ATTENTION),
        ("decoder", Sublayer.ATTENTION),
        ("decoder", Sublayer.CROSS),
    )
    for stack, sublayer in places:
        result = integrate_heads(
            model, pair, stack=stack, sublayer=sublayer, steps=32, progress=False
        )
        assert result.completeness < 1e-3


def test_routers_that_jump_leave_a_reported_rest() -> None:
    model, batch = small(DECODERS["experts"]), ids((5, 4))
    few = integrate_inputs(model, batch, steps=8, progress=False)
    assert few.completeness > 1e-3
    assert few.steps == 8


def test_steps_that_are_no_path_are_refused() -> None:
    model, batch = small(DECODERS["gpt2"]), ids((5, 4))
    with refuses(InputError, "steps", "got 0", "use 1 to"):
        integrate_inputs(model, batch, steps=0)
    with refuses(InputError, "steps", "got -2", "use 1 to"):
        integrate_heads(model, batch, steps=-2)
    with refuses(InputError, "steps", "got 5000", "1 to 4096"):
        integrate_heads(model, batch, steps=5000)


def test_a_path_that_does_not_converge_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(gradients, "MAX_GRADIENTS", 24)
    with refuses(ConvergenceError, "off by", "after 24 steps", "give another baseline, or steps"):
        integrate_inputs(small(DECODERS["experts"]), ids((5, 4)))
    assert "integrating: 1 of 24 steps" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in NAMES if name != "experts"])
def test_steps_and_baseline_are_chosen_so_that_they_converge(name: str) -> None:
    path = integrate_inputs(small(DECODERS[name]), ids((5, 4)), progress=False)
    assert path.converged
    assert path.steps <= 256


def test_a_baseline_near_which_norms_magnify_everything_is_refused() -> None:
    with refuses(ConvergenceError, "off by", "give another baseline"):
        integrate_inputs(small(DECODERS["llama"]), ids((5, 4)), baseline="zero", progress=False)


def test_a_baseline_of_other_lengths_is_refused() -> None:
    model = small(DECODERS["llama"])
    start = Ragged.from_list([torch.zeros(3, 32)])
    with refuses(ShapeError, "(3,)", "(5,)", "lengths of the texts"):
        integrate_inputs(model, ids((5,)), baseline=start)


def loss_of_each(logits: Ragged, batch: Ragged) -> Tensor:
    return torch.stack(
        [
            F.cross_entropy(one[:-1], row[1:])
            for one, row in zip(logits.to_list(), batch.to_list(), strict=True)
        ]
    )


def test_gradient_times_attention_is_what_a_weight_is_worth() -> None:
    model, batch = small(DECODERS["llama"]), ids((5, 7))
    result = gradient_times_attention(model, batch, layers=[1])
    assert list(result) == [1]
    step = 1e-3

    class Scale:
        """One weight, a little larger or smaller."""

        def __init__(self, by: float) -> None:
            self.by = by

        def wants(self, site: Site) -> bool:
            return site == Site(1, Tap.PATTERN)

        def see(self, _: Site, value: Any) -> Patterns:
            first, second = (each.clone() for each in value.each)
            second[2, 5, 3] *= self.by
            return Patterns((first, second))

    wide = build(DECODERS["llama"], seed=0).double()
    with torch.no_grad():
        up, down = (
            loss_of_each(wide(batch, watch=Scale(1 + by)).logits, batch)[1] for by in (step, -step)
        )
    slope = float(up - down) / (2 * step)
    assert float(result[1].of(1)[2, 5, 3]) == pytest.approx(slope, abs=1e-5)
    assert abs(slope) > 1e-5


def test_gradient_times_attention_needs_no_learning_weights() -> None:
    model = build(DECODERS["gates"], seed=0).requires_grad_(False)
    result = gradient_times_attention(model, ids((5, 7)))
    learning = gradient_times_attention(small(DECODERS["gates"]), ids((5, 7)))
    for one, other in zip(result[0].each, learning[0].each, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_importance_is_that_of_its_formula(name: str) -> None:
    model, batch = build(DECODERS[name], seed=0), ids((5, 7, 6))
    result = importance(model, batch, batch_tokens=6, progress=False)
    sites = [
        Site(index, Tap.HEAD_OUTPUT)
        for index, each in enumerate(model.config.stack.layers)
        if each.attention is not None
    ]
    record = Record(sites)
    losses = loss_of_each(model(batch, watch=record).logits, batch)
    outputs = [record[site].values for site in sites]
    slopes = torch.autograd.grad(losses.sum(), outputs)
    weights = torch.tensor([4.0, 6.0, 5.0]) / 15
    start = 0
    for output, slope in zip(outputs, slopes, strict=True):
        along = (output * slope).sum(-1).detach()
        texts = along.split([5, 7, 6])
        size = torch.stack([each.abs().sum(0) for each in texts])
        signed = torch.stack([-each.sum(0) for each in texts])
        mine = slice(start, start + along.shape[1])
        start = mine.stop
        expected = (weights[:, None] * size).sum(0).numpy()
        np.testing.assert_allclose(result["importance"].means[mine], expected, rtol=1e-3)
        normed = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(result["normalized"].means[mine], normed, rtol=1e-3)
        predicted = (weights[:, None] * signed).sum(0).numpy()
        np.testing.assert_allclose(result["predicted"].means[mine], predicted, atol=1e-5)


def test_weights_that_do_not_learn_give_the_same_importance() -> None:
    batch = ids(LENGTHS)
    learning = importance(small(DECODERS["gpt2"]), batch, progress=False)
    frozen = importance(
        build(DECODERS["gpt2"], seed=0).requires_grad_(False), batch, progress=False
    )
    np.testing.assert_allclose(
        frozen["importance"].means, learning["importance"].means, rtol=1e-4, atol=1e-7
    )
    assert all(each.grad is None for each in small(DECODERS["gpt2"]).parameters())


def test_small_heads_are_predicted_well() -> None:
    model = build(DECODERS["llama"], seed=0)
    with torch.no_grad():
        for each in model.stack.layers:
            each.attention.output.weight.mul_(0.005)
    batch = ids((12, 9, 14))
    exact = ablate(model, batch, progress=False)
    result = importance(model, batch, progress=False)
    np.testing.assert_allclose(
        result["predicted"].means,
        exact["change"].means,
        atol=0.1 * np.abs(exact["change"].means).max(),
    )
    assert result.agreement(exact, "predicted") > 0.9
    assert -1 <= result.agreement(exact) <= 1


def test_encoders_have_importance_where_words_are_masked() -> None:
    result = importance(
        small(ENCODERS["bert"]), ids((5, 3)), targets=[{1: 2}, {0: 3}], progress=False
    )
    assert (result["importance"].means > 0).all()


def test_rank_correlation_is_spearmans() -> None:
    draw = np.random.default_rng(0)
    one, other = draw.integers(0, 6, 30).astype(float), draw.normal(size=30)
    expected = spearmanr(one, other).statistic
    assert rank_correlation(one, other) == pytest.approx(expected)
    holes = np.where(np.arange(30) % 7 == 0, np.nan, other)
    kept = ~np.isnan(holes)
    expected = spearmanr(one[kept], holes[kept]).statistic
    assert rank_correlation(one, holes) == pytest.approx(expected)
    assert np.isnan(rank_correlation(np.ones(4), np.arange(4.0)))
