"""Edges have the same scores, and circuits the same metric, on CUDA as on the CPU."""

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.lens.circuit_discovery.edge_scores import Method
from manyheads.models.build import build


@pytest.mark.parametrize("method", ["eap", "exact"])
def test_circuits_are_those_of_the_cpu(method: Method, device: str) -> None:
    model = build("gpt2", layers=2, width=64, heads=4, vocabulary=40, seed=0)
    pairs = [[3, 5, 9, 7], [4, 8, 6]], [[3, 11, 9, 7], [4, 12, 6]]
    results = [
        lens.circuit(model.to(where), *pairs, method=method, progress=False)
        for where in ("cpu", device)
    ]
    np.testing.assert_allclose(results[1].scores, results[0].scores, atol=1e-4)
    edges = results[0].top(20)
    model.cpu()
    expected = results[0].evaluate(edges, progress=False)
    model.to(device)
    values = results[1].evaluate(edges, progress=False)
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)
