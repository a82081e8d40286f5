"""Heads that were made to do nothing are dead for just the reasons that they were given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.causal.ablation import ablate
from manyheads.lens.measure.statistics import statistics
from manyheads.lens.redundant.dead_heads import DeadHeads, dead_by_statistics, dead_heads
from manyheads.models.build import build
from manyheads.parts.masks import Causal
from manyheads.parts.positions import Rotary
from manyheads.taps import Head, Sublayer
from tests.messages import refuses
from tests.models.zoo import ENCODERS, decoder, layer, own, seq2seq, small, writes

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3]]


def planted() -> Any:
    """L0H1 writes nothing, L1H2 looks at all alike."""
    model = build(decoder(*[writes(position=Rotary())] * 2), seed=0)
    with torch.no_grad():
        model.stack.layers[0].attention.output.weight[:, 8:16] = 0
        model.stack.layers[1].attention.projections()["query"][16:24] = 0
    return model


@pytest.fixture(scope="module")
def measured() -> DeadHeads:
    return dead_heads(planted(), TEXTS, progress=False)


def test_each_dead_head_has_its_planted_reason(measured: DeadHeads) -> None:
    names = {str(head): why for head, why in measured.reasons.items()}
    assert names == {"L0H1": ("ablation", "norm"), "L1H2": ("entropy",)}
    assert measured.why(Head(0, 1)) == ("ablation", "norm")
    assert measured.why(Head(0, 0)) == ()
    assert [str(head) for head in measured.heads] == ["L0H1", "L1H2"]


def test_the_values_are_those_of_statistics_and_ablation(measured: DeadHeads) -> None:
    model = planted()
    seen = statistics(model, TEXTS, progress=False)
    np.testing.assert_allclose(
        measured.means["normalized_entropy"], seen.means["normalized_entropy"]
    )
    np.testing.assert_allclose(measured.means["output_share"], seen.means["output_share"])
    exact = ablate(model, TEXTS, progress=False)
    np.testing.assert_allclose(measured.means["loss_change"], exact.means["change"])


def test_thresholds_decide() -> None:
    every = dead_heads(
        planted(), iter(TEXTS), loss_below=1e9, entropy_above=1e-9, norm_below=1e9, progress=False
    )
    assert all(why == ("ablation", "entropy", "norm") for why in every.reasons.values())
    assert len(every.heads) == 8
    strict = dead_heads(planted(), TEXTS, loss_below=0.0, norm_below=0.0, progress=False)
    assert set(strict.reasons.values()) == {("entropy",)}


def test_it_reads_well_and_can_be_saved(measured: DeadHeads, tmp_path: Path) -> None:
    assert "2 of 8 heads are dead" in str(measured)
    assert "L0H1: without it the loss changes by +0 (below 0.001), it writes 0 of" in str(measured)
    assert "L1H2: its entropy is 1.0000 of the maximum (above 0.99)" in str(measured)
    assert {row["dead"] for row in measured.rows()} == {"", "ablation, norm", "entropy"}
    measured.save(tmp_path / "dead.json")
    assert lens.load(tmp_path / "dead.json").reasons == measured.reasons


def test_an_encoder_without_targets_goes_without_ablation() -> None:
    model = small(ENCODERS["modernbert"])
    assert "loss_change" not in dead_heads(model, TEXTS, progress=False)
    targets = [{0: 3}, {1: 7}, {2: 2}]
    assert "loss_change" in dead_heads(model, TEXTS, targets=targets, progress=False)


def test_cross_attention_has_its_own_dead() -> None:
    cross = own(keys_from="memory")
    model: Any = build(seq2seq([layer()], [layer(own(mask=Causal()), cross=cross)]), seed=0)
    with torch.no_grad():
        model.decoder.layers[0].cross.output.weight[:, :8] = 0
    pairs = [([1, 2, 3], [4, 5, 6]), ([7, 8], [9, 1])]
    measured = dead_heads(model, pairs, sublayer=Sublayer.CROSS, progress=False)
    assert {str(head) for head, why in measured.reasons.items() if "norm" in why} == {
        "decoder L0H0 cross"
    }


def test_statistics_alone_tell_of_entropy_and_norm() -> None:
    seen = statistics(planted(), TEXTS, progress=False)
    measured = {str(head): why for head, why in dead_by_statistics(seen).reasons.items()}
    assert measured == {"L0H1": ("norm",), "L1H2": ("entropy",)}


def test_thresholds_that_are_none_are_refused() -> None:
    model = planted()
    with refuses(InputError, "norm_below", "got -1.0", "0 or more"):
        dead_heads(model, TEXTS, norm_below=-1.0)
    with refuses(
        InputError,
        "entropy_above",
        "got 2.0",
        "at most 1",
    ):
        dead_heads(model, TEXTS, entropy_above=2.0)
