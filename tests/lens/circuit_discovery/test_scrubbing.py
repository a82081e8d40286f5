"""Causal scrubbing: what a hypothesis keeps when the rest reads other texts."""

from functools import cache
from typing import Any

import pytest

from manyheads.errors import InputError
from manyheads.lens.circuit_discovery.scrubbing import Hypothesis, Scrub, scrub
from tests.lens.circuit_discovery.test_circuit import METRIC, PAIRS, model, texts
from tests.messages import refuses

NODES = ("embeddings", "L0H0", "L0H1", "L0 mlp", "L1H0", "L1H1", "L1 mlp", "logits")


@cache
def rows() -> list[list[int]]:
    # A clean and a corrupted text in turn: they differ in the second token.
    both = zip(*texts(0), strict=True)
    return [row for pair in both for row in pair][:PAIRS]


def scrubbed(hypothesis: Hypothesis, **changes: Any) -> Scrub:
    options: dict[str, Any] = {"random_circuits": 3, "draws": 2, "progress": False} | changes
    return scrub(model(), rows(), hypothesis, METRIC, **options)


def test_all_nodes_keep_everything_and_no_edge_keeps_nothing() -> None:
    assert scrubbed(Hypothesis(nodes=NODES)).faithfulness == pytest.approx(1, abs=1e-4)
    nothing = scrubbed(Hypothesis())
    assert nothing.faithfulness == pytest.approx(0, abs=1e-6)
    assert nothing.better == 1


def test_an_edge_that_depends_on_everything_carries_its_own_text() -> None:
    edges = ("embeddings → L0 mlp", "L0 mlp → logits")
    whole = scrubbed(Hypothesis(edges=edges))
    described = Hypothesis(edges=edges, depends={edges[0]: list(range(PAIRS))})
    assert scrubbed(described).faithfulness == pytest.approx(whole.faithfulness, abs=1e-5)
    nothing = Hypothesis(edges=edges, depends={edges[0]: [0] * PAIRS})
    assert scrubbed(nothing).faithfulness != pytest.approx(whole.faithfulness, abs=1e-3)


def test_a_circuit_is_seen_beside_random_ones() -> None:
    result = scrubbed(Hypothesis(edges=("embeddings → logits",)))
    assert len(result.random) == 3
    assert "3 random circuits of this size" in str(result)


def test_an_unknown_node_is_refused() -> None:
    with refuses(InputError, "has no node 'L8H0'"):
        scrubbed(Hypothesis(nodes=("L8H0", "logits")))


def test_values_are_needed_for_every_text() -> None:
    with refuses(InputError, "2 values for 8 texts"):
        scrubbed(Hypothesis(depends={"embeddings → logits": [1, 2]}))


def test_a_text_needs_another_of_its_length() -> None:
    with refuses(InputError, "text 1 has 2 tokens", "several texts"):
        scrub(model(), [[1, 2, 3], [1, 2], [3, 2, 1]], Hypothesis(), progress=False)
