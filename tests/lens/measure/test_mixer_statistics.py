"""Patterns of the heads of mixers, and their statistics without them."""

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.lens.measure import row_sums
from manyheads.mixers.build import MixerConfig
from manyheads.mixers.head_weights import DecayWeights, DeltaWeights
from manyheads.mixers.mixer import Mixer
from manyheads.mixers.recurrent.decay_recurrence import decay_pattern
from manyheads.mixers.recurrent.delta_recurrence import delta_pattern
from manyheads.models.model_interface import ModelInputs
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Patterns, Record, Site, Tap
from tests.lens.oracle import by_definition
from tests.mixers.mixer_configs import BOTH_WAYS, CAUSAL, small_model

CLASSES = {"low": range(5)}
KINDS = {name: CAUSAL[name] for name in ("linear", "performer", "retention", "mamba2", "delta")}
KINDS["both ways"] = BOTH_WAYS["linear"]
SPARSE = {name: CAUSAL[name] for name in ("segments", "knn")}
SPARSE |= {name: BOTH_WAYS[name] for name in ("longformer", "big_bird", "lsh")}


def texts(*lengths: int) -> Ragged:
    """Few words, so that many repeat."""
    generator = torch.Generator().manual_seed(1)
    return Ragged.from_list(
        [torch.randint(0, 9, (length,), generator=generator) for length in lengths]
    )


@pytest.mark.parametrize("by_channel", [False, True])
def test_rows_are_those_of_the_explicit_pattern(by_channel: bool) -> None:
    torch.manual_seed(0)
    lengths = Lengths.of([150, 0, 70])
    q, k = torch.randn(2, 220, 3, 6)
    k, beta = torch.nn.functional.normalize(k, dim=-1), torch.rand(220, 3)
    decay = -torch.rand(220, 3, 6) / 5 if by_channel else -torch.rand(220, 3) / 5
    delta = DeltaWeights(q, k, beta, decay, lengths)
    for sequence, at in enumerate(lengths.slices()):
        if not lengths.each[sequence]:
            assert delta.of(sequence).numel() == 0
            continue
        expected = delta_pattern(q[at], k[at], beta[at], decay[at])
        torch.testing.assert_close(delta.of(sequence), expected, atol=1e-5, rtol=1e-5)
        some = delta.rows(sequence, range(60, 69), range(1, 3))
        torch.testing.assert_close(some, expected[1:, 60:69, :69], atol=1e-5, rtol=1e-5)
        if not by_channel:
            decayed = DecayWeights(q, k, decay, lengths).of(sequence)
            expected = decay_pattern(q[at], k[at], decay[at])
            torch.testing.assert_close(decayed, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [*CAUSAL.values(), *BOTH_WAYS.values()])
def test_heads_are_what_the_output_projection_receives(config: MixerConfig) -> None:
    model, batch = small_model(config), texts(20, 3)
    mixer = model.stack.layers[0].mixer
    assert isinstance(mixer, Mixer)
    taps = (Tap.HEAD_OUTPUT, Tap.OUTPUT, Tap.PATTERN)
    record = Record([Site(0, tap) for tap in taps])
    with torch.no_grad():
        model(batch, watch=record)
    assert (Site(0, Tap.PATTERN) in record) == mixer.has_pattern
    heads = getattr(config, "heads", 0)
    if heads:
        outputs, written = (record[Site(0, tap)] for tap in taps[:2])
        assert isinstance(outputs, Ragged)
        assert isinstance(written, Ragged)
        assert outputs.values.shape[1] == heads
        projected = mixer.output(outputs.values.flatten(1))
        torch.testing.assert_close(projected, written.values)


@pytest.mark.parametrize("name", [*KINDS, *SPARSE])
def test_a_pattern_times_the_values_is_the_output(name: str) -> None:
    model, batch = small_model((KINDS | SPARSE)[name]), texts(70, 3)

    class Again:
        """Returns the pattern it was shown, so that the model uses it."""

        def wants(self, site: Site) -> bool:
            return site.tap is Tap.PATTERN

        def see(self, site: Site, value: Ragged | Patterns) -> Patterns:  # noqa: ARG002
            assert isinstance(value, Patterns)
            return Patterns(value.each)

    with torch.no_grad():
        expected = model(batch).logits.values
        result = model(batch, watch=Again()).logits.values
        record = Record([Site(0, Tap.PATTERN)])
        assert torch.equal(model(batch, watch=record).logits.values, expected)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert record[Site(0, Tap.PATTERN)].of(1).shape[1:] == (3, 3)


@pytest.mark.parametrize("name", KINDS)
def test_every_statistic_is_its_definition_on_the_pattern(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sums, "ROWS", {"cpu": 50})
    model, inputs = small_model(KINDS[name]), ModelInputs(ids=texts(70, 1, 9))
    expected = by_definition(model, inputs, CLASSES, (-3,))
    result = lens.statistics(model, inputs, classes=CLASSES, offsets=(-3,), progress=False)
    assert {measure for _, measure in expected.values} == set(result.names)
    assert ("memory_length" in result) == (name != "both ways")
    for measure in result.names:
        wanted = [expected.mean(block, measure) for block in result.blocks]
        np.testing.assert_allclose(
            result.means[measure], np.concatenate(wanted), atol=1e-5, rtol=1e-5, err_msg=measure
        )
