"""Scores of edges: equal to plain hooks on transformers, to autograd, and to each other."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from manyheads.lens.circuit_discovery.circuit import Circuit, circuit
from manyheads.lens.circuit_discovery.edge_scores import Method
from manyheads.lens.inputs.metrics import LogitDifference
from tests.lens.circuit_discovery import hooked

METRIC = LogitDifference(answer=(hooked.ANSWER,), distractor=(hooked.DISTRACTOR,))


@cache
def scored(method: Method, steps: int = 5) -> Circuit:
    ends = [hooked.CLEAN], [hooked.CORRUPTED]
    return circuit(hooked.gpt2(), *ends, METRIC, method, steps=steps, progress=False)


@cache
def differences() -> dict[str, Any]:
    (_, clean), (_, corrupted) = (hooked.run(ids) for ids in (hooked.CLEAN, hooked.CORRUPTED))
    return {name: clean[name] - corrupted[name] for name in clean}


def possible(result: Circuit) -> list[tuple[int, int]]:
    return [(row, column) for row, column in np.argwhere(~np.isnan(result.scores))]


def test_exact_scores_are_those_of_plain_hooks() -> None:
    result, clean = scored("exact"), hooked.run(hooked.CLEAN)[0]
    for row, column in possible(result):
        shift = {result.readers[row]: -differences()[result.writers[column]]}
        changed = hooked.run(hooked.CLEAN, shift)[0]
        assert result.scores[row, column] == pytest.approx(float(clean - changed), abs=1e-4)


def gradients_at(embeds: Any = None) -> dict[str, Any]:
    """The gradient of the metric at what each reader reads, by autograd."""
    zeros = torch.zeros(len(hooked.CLEAN), hooked.WIDTH)
    shifts = {reader: zeros.clone().requires_grad_() for reader in scored("eap").readers}
    value = hooked.run(hooked.CLEAN, shifts, embeds)[0]
    return dict(zip(shifts, torch.autograd.grad(value, list(shifts.values())), strict=True))


def products(gradients: dict[str, Any]) -> Any:
    result = scored("eap")
    table = np.full(result.scores.shape, np.nan)
    for row, column in possible(result):
        difference = differences()[result.writers[column]]
        table[row, column] = float((gradients[result.readers[row]] * difference).sum())
    return table


def test_edge_attribution_is_the_textbook_formula() -> None:
    np.testing.assert_allclose(scored("eap").scores, products(gradients_at()), atol=1e-5)


def test_integrated_gradients_converge_to_the_line_integral() -> None:
    clean = hooked.run(hooked.CLEAN)[1]["embeddings"]
    points, weights = np.polynomial.legendre.leggauss(16)
    total = 0.0
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        embeds = (clean - (1 - point) * differences()["embeddings"])[None]
        total = total + weight * products(gradients_at(embeds))
    errors = [np.nanmax(np.abs(scored("eap-ig", steps).scores - total)) for steps in (3, 30)]
    assert errors[1] < 5e-3
    assert errors[1] < errors[0] / 5


def test_values_feedforwards_and_logits_need_no_second_softmax() -> None:
    corrected, plain = scored("atp*"), scored("eap")
    rows = [not name.endswith(("query", "key")) for name in plain.readers]
    np.testing.assert_allclose(corrected.scores[rows], plain.scores[rows], atol=1e-6)


def test_a_second_softmax_brings_queries_and_keys_closer_to_the_exact_scores() -> None:
    rows = [name.endswith(("query", "key")) for name in scored("eap").readers]
    exact = scored("exact").scores[rows]
    errors = [np.nanmean(np.abs(scored(method).scores[rows] - exact)) for method in ("eap", "atp*")]
    assert errors[1] < errors[0]


def test_the_cost_is_counted_in_runs() -> None:
    costs = {
        method: (scored(method).metadata["forwards"], scored(method).metadata["backwards"])
        for method in ("eap", "eap-ig", "exact")
    }
    assert costs == {"eap": (3, 1), "eap-ig": (7, 5), "exact": (2 + 46, 0)}


@pytest.mark.parametrize("method", ["eap", "eap-ig", "eap-ig-activations", "atp*"])
def test_writers_as_a_whole_have_the_sum_of_their_edges(method: Method) -> None:
    ends = [hooked.CLEAN], [hooked.CORRUPTED]
    by_head = circuit(hooked.gpt2(), *ends, METRIC, method, "head", progress=False)
    if method == "atp*":
        # What is corrected is inside the heads that read.
        method = "eap"
    sums = np.nansum(scored(method).scores, axis=0)
    np.testing.assert_allclose(by_head.scores[0], sums, atol=1e-4)


def test_corrupting_all_embeddings_is_the_corrupted_run() -> None:
    ends = [hooked.CLEAN], [hooked.CORRUPTED]
    result = circuit(hooked.gpt2(), *ends, METRIC, "exact", "head", progress=False)
    assert result["embeddings"] == pytest.approx(result.clean - result.corrupted, abs=1e-5)
