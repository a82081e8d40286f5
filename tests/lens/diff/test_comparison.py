"""Two models side by side: what was changed is told, and what was not is not."""

import copy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.lens.causal.ablation import ablate
from manyheads.lens.diff.comparison import Comparison, compare, measure_by_text
from manyheads.lens.diff.head_matching import match_heads, weight_changes
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.inputs.texts import read_inputs
from manyheads.lens.measure.statistics import statistics
from manyheads.lens.results.addresses import Address
from manyheads.models.build import build
from manyheads.models.model_interface import ModelInputs
from manyheads.models.recipes import ModelConfig
from manyheads.parts.gates import Gate
from manyheads.parts.positions import Rotary
from manyheads.surgery import origins, prune, prune_layers
from manyheads.taps import Head
from tests.lens.diff.test_head_matching import pruned, whole
from tests.lens.measure.test_statistics import texts_for
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, VISIONS, decoder, images, small, writes

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3], [9, 9, 8, 9, 9, 8]]
TEXTS += [[5, 3, 5, 8, 9], [7, 9, 3, 2], [3, 8, 4, 6, 2, 6, 4], [3, 3, 8, 3]]


def changed() -> Any:
    """L1H1 writes nothing any more, L1H2 looks at all alike."""
    model = copy.deepcopy(whole())
    with torch.no_grad():
        attention = model.stack.layers[1].attention
        attention.output.weight[:, 8:16] = 0
        attention.projections()["query"][16:24] = 0
    return model


@pytest.fixture(scope="module")
def measured() -> Comparison:
    return compare(
        whole(), changed(), TEXTS, compare_kinds=False, replace_with="zero", progress=False
    )


def test_both_sides_are_what_statistics_measures(measured: Comparison) -> None:
    for model, side in ((whole(), measured.before), (changed(), measured.after)):
        expected = statistics(model, TEXTS, progress=False)
        for name in expected.names:
            np.testing.assert_allclose(side.means[name], expected.means[name], atol=1e-6)
        exact = ablate(model, TEXTS, progress=False)
        np.testing.assert_allclose(side.means["loss_change"], exact.means["change"])
    np.testing.assert_allclose(
        measured.change.means["entropy"],
        measured.after.means["entropy"] - measured.before.means["entropy"],
    )


def test_a_change_has_an_error_of_its_own(measured: Comparison) -> None:
    """The jackknife over texts, on queries of the changed head."""
    differences, counts = [], []
    for text in TEXTS:
        one, two = (
            statistics(model, [text], progress=False)["entropy"].of(Head(1, 2))
            for model in (whole(), changed())
        )
        differences.append(two - one)
        counts.append(len(text))
    d, n = np.array(differences), np.array(counts)
    mean = (d * n).sum() / n.sum()
    error = np.sqrt(np.square((d - mean) * n / n.sum()).sum() * len(n) / (len(n) - 1))
    message = measured.of(Head(1, 2))["entropy"]
    assert message.change == pytest.approx(mean, abs=1e-6)
    assert message.error == pytest.approx(error, abs=1e-6)
    assert message.z == pytest.approx(mean / error, rel=1e-4)


def test_heads_without_a_change_are_not_listed(measured: Comparison) -> None:
    for name in measured.names:
        below = measured.change[name].layers()[0]
        # Ablation alone looks at a head through all that lies above it.
        assert name == "loss_change" or (below[~np.isnan(below)] == 0).all()
    assert measured.of(Head(0, 0))["entropy"].z == 0
    assert {str(head) for head, _ in measured.ranked("entropy")[:1]} == {"L1H2"}
    assert {str(head) for head, _ in measured.ranked()[:2]} == {"L1H1", "L1H2"}


def test_few_texts_have_no_z_scores() -> None:
    few = compare(whole(), changed(), TEXTS[:2], compare_kinds=False, progress=False)
    assert "2 texts: too few for z-scores, which need at least 8" in str(few)
    assert "(z " not in str(few)
    assert np.isnan([row["z"] for row in few.rows()]).all()
    # What changed most is listed all the same.
    assert "L1H2 moved by" in str(few)
    assert " to " in str(few)


def test_the_dead_and_the_losses(measured: Comparison) -> None:
    assert {str(head): why for head, why in measured.died.items()} == {
        "L1H1": ("ablation", "norm"),
        "L1H2": ("entropy",),
    }
    assert measured.revived == {}
    assert measured.losses is not None
    assert measured.losses.before == pytest.approx(ablate(whole(), TEXTS, progress=False).baseline)
    assert measured.losses.after == pytest.approx(ablate(changed(), TEXTS, progress=False).baseline)
    assert measured.losses.change == pytest.approx(measured.losses.after - measured.losses.before)
    back = compare(changed(), whole(), TEXTS, compare_kinds=False, progress=False)
    assert {str(head) for head in back.revived} == {"L1H1", "L1H2"}
    assert back.died == {}


def test_weights_tell_where_it_was_changed(measured: Comparison) -> None:
    assert measured.weights["output"].of(Head(1, 1)) == pytest.approx(1)
    assert measured.weights["query"].of(Head(1, 2)) == pytest.approx(1)
    assert measured.weights["all"].of(Head(1, 0)) == 0


def test_it_reads_well_and_can_be_saved(measured: Comparison, tmp_path: Path) -> None:
    message = str(measured)
    assert "8 heads compared by" in message
    assert "(z " in message
    assert "L1H1 died (ablation, norm)" in message
    assert "loss " in message
    assert measured.table().row_count == 8
    assert len(measured.frame()) == 8 * len(measured.names)
    for ending in ("json", "safetensors"):
        measured.save(tmp_path / f"found.{ending}")
        again = lens.load(tmp_path / f"found.{ending}")
        assert str(again) == message
        assert again.losses == measured.losses
        assert again.died == measured.died
        assert again.addresses_after == measured.addresses_after


def test_a_pruned_model_is_compared_by_the_heads_it_has() -> None:
    measured = compare(whole(), pruned((0, 2, 3)), TEXTS, compare_kinds=False, progress=False)
    assert [str(head) for head in measured.removed] == ["L1H1"]
    # Heads of one layer do not hear each other: what is left does what it did.
    np.testing.assert_allclose(
        measured.change["entropy"].means[[0, 1, 2, 3, 4, 6, 7]], 0, atol=1e-5
    )
    assert np.isnan(measured.of(Head(1, 1))["entropy"].after)
    assert "removed: L1H1" in str(measured)
    assert measured.addresses_after[Address(Head(1, 2))] == Address(Head(1, 1))


def test_what_surgery_took_is_gone() -> None:
    without = prune(whole(), ["L0H1", "L1H0", "L1H3"])
    for known in (origins(without), None):
        match = match_heads(whole(), without, known)
        assert [str(head) for head in match.removed] == ["L0H1", "L1H0", "L1H3"]
        assert np.nanmax(weight_changes(whole(), without, match).means["all"]) == 0
    shorter = prune_layers(whole(), [0])
    measured = compare(
        whole(), shorter, TEXTS, origins=origins(shorter), compare_kinds=False, progress=False
    )
    assert measured.addresses_after[Address(Head(1, 2))] == Address(Head(0, 2))
    assert [str(head) for head in measured.removed] == [f"L0H{head}" for head in range(4)]


def test_gated_and_not() -> None:
    gated = build(decoder(*[writes(position=Rotary(), gates=(Gate(at="output"),))] * 2), seed=0)
    measured = compare(whole(), gated, TEXTS, compare_kinds=False, progress=False)
    assert np.isnan(measured.of(Head(0, 0))["gate_output"].before)
    assert not np.isnan(measured.of(Head(0, 0))["gate_output"].after)
    assert np.isfinite(measured.shift()).all()


def test_a_new_kind_of_a_head_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("manyheads.lens.diff.comparison")
    monkeypatch.setattr(module, "kinds", partial(kinds, sequences=6))
    model = copy.deepcopy(whole())
    with torch.no_grad():
        # It sees nothing in what it reads: it looks at all alike.
        model.stack.layers[0].attention.projections()["query"][:8] = 0
    measured = compare(whole(), model, TEXTS, progress=False)
    assert "broad" in measured.kind_changes[Address(Head(0, 0))][1]
    assert "broad" not in measured.kind_changes[Address(Head(0, 0))][0]
    assert Address(Head(0, 1)) not in measured.kind_changes
    assert "L0H0 was" in str(measured)
    assert next(iter(measured.table().columns[-1].cells)).startswith("was ")


def test_every_kind_of_model_is_compared() -> None:
    one_text = compare(whole(), changed(), [TEXTS[0]], compare_kinds=False, progress=False)
    assert one_text.of(Head(1, 2))["entropy"].error > 0
    encoder = small(ENCODERS["modernbert"])
    assert compare(encoder, encoder, TEXTS, compare_kinds=False, progress=False).losses is None
    vision = small(VISIONS["vit"])
    assert compare(vision, vision, images(), compare_kinds=False, progress=False).losses is None
    seq2seq = small(SEQ2SEQS["t5"])
    pairs = [([1, 2, 3], [4, 5, 6]), ([7, 8], [9, 1])]
    measured = compare(seq2seq, seq2seq, pairs, compare_kinds=False, progress=False)
    assert measured.losses is not None
    assert measured.losses.change == 0
    assert "no head moved" in str(measured)
    assert {str(head) for head, _ in measured.ranked("entropy")} >= {"decoder L0H0 cross"}


@pytest.mark.parametrize("config", [DECODERS["gates"], SEQ2SEQS["t5"], VISIONS["vit"]])
def test_means_and_errors_are_those_of_statistics(config: ModelConfig) -> None:
    model = small(config)
    inputs = texts_for(model)
    measured = measure_by_text(model, inputs, batch_tokens=9, progress=False)
    expected = statistics(model, inputs, progress=False)
    assert measured.names == expected.names
    for name in measured.names:
        np.testing.assert_allclose(measured.measured(name)[0], expected.means[name], atol=1e-5)
        np.testing.assert_allclose(measured.measured(name)[1], expected.errors[name], atol=1e-4)


def test_residuals_add_up_to_the_variance() -> None:
    model = small(DECODERS["llama"])
    inputs: ModelInputs = read_inputs(
        model, iter([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8], [1, 1, 2, 3, 5]])
    )
    measured = measure_by_text(model, inputs, batch_tokens=1, progress=False)
    for name in ("entropy", "previous_token", "duplicate_token"):
        residuals = measured.residuals(name)
        np.testing.assert_allclose(residuals.sum(0), 0, atol=1e-9)
        texts = (residuals != 0).any(1).sum()
        variance = np.square(residuals).sum(0) * texts / (texts - 1)
        np.testing.assert_allclose(np.sqrt(variance), measured.measured(name)[1], atol=1e-9)
