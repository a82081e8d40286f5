"""Circuits evaluated exactly: equal to both runs at the ends, and to one edge at a time."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.lens.circuit_discovery.circuit import Circuit, circuit
from manyheads.lens.circuit_discovery.edge_scores import EdgeScores
from manyheads.lens.circuit_discovery.pair_runs import PairBatch
from manyheads.lens.inputs.metrics import StateMetric
from manyheads.models.build import build
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, PostNorm, ScaledPreNorm
from manyheads.ragged import Ragged
from tests.mixers.mixer_configs import CAUSAL, small_model
from tests.models.zoo import DECODERS, ENCODERS, decoder, ids, layer, own
from tests.parity.copying import scramble

LENGTHS = (5, 1, 7)
REFUSED = ("gates", "control gates")
MODELS = {name: config for name, config in (DECODERS | ENCODERS).items() if name not in REFUSED} | {
    "post": decoder(*[layer(own(mask=Causal(), bias="all"), norm=PostNorm(LayerNorm()))] * 2),
    "gated": decoder(
        *[layer(own(mask=Causal(), gates=(Gate(at="output"), Gate(at="value", per="channel"))))] * 2
    ),
    "mixers": small_model(CAUSAL["linear"], CAUSAL["s4d"]).config,
    "scaled": decoder(
        *[layer(own(mask=Causal(), bias="all"), norm=ScaledPreNorm(LayerNorm()))] * 2
    ),
}


def bent(hidden: Ragged, _: Any) -> Tensor:
    return torch.stack([text[-1].sin().sum() for text in hidden.to_list()])


@cache
def scored(name: str) -> Circuit:
    model = build(MODELS[name], seed=0)
    scramble(model)
    model.double()
    clean = ids(LENGTHS)
    corrupted = clean.with_values((clean.values + 7) % 20)
    return circuit(model, clean, corrupted, StateMetric(bent), "exact", progress=False)


@pytest.mark.parametrize("name", MODELS)
def test_all_edges_are_the_clean_run_and_none_the_corrupted(name: str) -> None:
    result = scored(name)
    clean, corrupted, _ = result.pairs.ends
    for edges, expected in ((result.top(10**6), clean), ((), corrupted)):
        values = result.evaluate(edges, progress=False)
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_all_edges_but_one_are_that_edge_patched(name: str) -> None:
    result = scored(name)
    every = result.top(10**6)
    for left_out in every[:3]:
        rest = [edge for edge in every if edge != left_out]
        value = result.evaluate(rest, progress=False).mean()
        assert result.clean - float(value) == pytest.approx(result[left_out], abs=1e-5)


def test_means_and_zeros_replace_what_is_outside() -> None:
    result = scored("gpt2")
    outside = {
        replacement: result.evaluate((), replacement, progress=False)
        for replacement in ("mean", "zero")
    }
    # No token is left to read, so that only the biases differ between the texts' metrics.
    assert all(float(values.std()) < 1e-9 for values in outside.values())
    kept = result.evaluate(result.top(10**6), "zero", progress=False)
    torch.testing.assert_close(kept, result.pairs.ends[0], atol=1e-5, rtol=1e-5)


STEEP = ("gpt2", "llama", "parallel", "both norms", "normed outputs", "post", "scaled", "gated")


@pytest.mark.parametrize("name", STEEP)
def test_gradients_are_those_of_small_exact_changes(name: str) -> None:
    small = 1e-5
    pairs = scored(name).pairs
    (batch,) = pairs.run_batches()
    with pairs.ready():
        expected = EdgeScores(batch, 8).eap()
        near = PairBatch(pairs.scope, pairs.graph, pairs.clean, pairs.corrupted, batch.metric)
        deltas = batch.deltas * small
        written = [
            batch.sublayers.written_together(step, batch.clean) for step in pairs.graph.steps
        ]
        sums = [
            total - deltas[step.writers.start : step.writers.stop].sum(0)
            for total, step in zip(written, pairs.graph.steps, strict=True)
        ]
        embedded = batch.clean[batch.embeddings].values - deltas[0]
        # The corrupted run, moved next to the clean one.
        vars(near).update(deltas=deltas, base_sums=sums, base_embeddings=embedded)
        scores = EdgeScores(near, 8).exact() / small
    torch.testing.assert_close(scores, expected, atol=2e-3 * float(expected.abs().max()), rtol=0)
