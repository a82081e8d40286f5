"""Rollout and flow against small implementations of their own and networkx."""

from typing import Any

import networkx
import numpy as np
import pytest
import torch

from manyheads.errors import InputError
from manyheads.lens.attention_maps.rollout import (
    attention_flow,
    attention_rollout,
    max_flow,
    with_residual,
)
from manyheads.taps import Record, Site, Tap
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, ids, small


def patterns(model: Any, batch: Any, text: int) -> list[Any]:
    sites = [Site(index, Tap.PATTERN) for index in range(len(model.stack.layers))]
    record = Record(sites)
    with torch.no_grad():
        model(batch, watch=record)
    return [record[site].of(text).double().numpy() for site in sites]


def judged_flow(tables: Any, output: int, place: int) -> float:
    graph = networkx.DiGraph()
    for layer, table in enumerate(tables):
        for (row, column), capacity in np.ndenumerate(table):
            if capacity > 0:
                graph.add_edge((layer + 1, row), (layer, column), capacity=float(capacity))
    source, sink = (len(tables), output), (0, place)
    if source not in graph or sink not in graph:
        return 0.0
    return float(networkx.maximum_flow_value(graph, source, sink))


def residual_tables(tables: list[Any]) -> list[Any]:
    result = []
    for table in tables:
        mixed = np.mean(table, axis=0) + np.eye(table.shape[1])
        result.append(mixed / mixed.sum(axis=1, keepdims=True))
    return result


@pytest.mark.parametrize("name", ["gpt2", "gates"])
def test_rollout_is_the_product_of_all_layers(name: str) -> None:
    model, batch = small(DECODERS[name]), ids((5, 7))
    for text, result in enumerate(attention_rollout(model, batch)):
        expected = np.eye(len(result))
        for table in residual_tables(patterns(model, batch, text)):
            expected = table @ expected
        np.testing.assert_allclose(result.numpy(), expected, atol=1e-6)
        np.testing.assert_allclose(result.sum(1).numpy(), 1, atol=1e-6)


@pytest.mark.parametrize("model", [DECODERS["windows and whole"], ENCODERS["bert"]])
def test_flow_is_the_max_flow_of_networkx(model: Any) -> None:
    batch = ids((4, 5))
    for text, result in enumerate(attention_flow(small(model), batch, progress=False)):
        tables = residual_tables(patterns(small(model), batch, text))
        for output in range(len(result)):
            for place in range(len(result)):
                expected = judged_flow(tables, output, place)
                assert float(result[output, place]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_any_table_of_capacities_flows_as_in_networkx(seed: int) -> None:
    draw = np.random.default_rng(seed)
    # Many zeros and whole numbers, so that flow must be sent back to find its way.
    tables = draw.integers(0, 4, (4, 6, 6)) * (draw.random((4, 6, 6)) < 0.45).astype(float)
    for output in range(6):
        for place in range(6):
            expected = judged_flow(tables, output, place)
            assert max_flow(tables, output, place) == pytest.approx(expected, abs=1e-9)


def test_a_chain_carries_its_narrowest_link() -> None:
    tables = np.zeros((3, 2, 2))
    tables[0, 1, 0], tables[1, 0, 1], tables[2, 1, 0] = 0.5, 0.2, 0.9
    assert max_flow(tables, 1, 0) == pytest.approx(0.2)
    assert max_flow(tables, 0, 0) == 0.0


def test_half_of_each_row_is_the_residual_stream() -> None:
    table = with_residual(torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]))
    torch.testing.assert_close(table, torch.tensor([[1.0, 0.0], [0.25, 0.75]]).double())


def test_chosen_outputs_are_followed_alone() -> None:
    model, batch = small(DECODERS["gpt2"]), ids((4, 6))
    every = attention_flow(model, batch, progress=False)
    some = attention_flow(model, batch, outputs=[3, 0], progress=False)
    for one, other in zip(every, some, strict=True):
        torch.testing.assert_close(other, one[[3, 0]])
    with refuses(InputError, "a text of 4 tokens has no position 4: use 0 to 3."):
        attention_flow(model, batch, outputs=[4], progress=False)
