"""The graph of a residual stream: names of writers and readers, and which edges are possible."""

import numpy as np
import pytest

from manyheads.errors import InputError
from manyheads.lens.circuit_discovery.graph import Edge, Graph
from manyheads.lens.inputs.cached_run import head_scope
from manyheads.models.build import build
from tests.messages import refuses
from tests.models.zoo import DECODERS


def graph(name: str = "llama") -> Graph:
    return Graph(head_scope(build(DECODERS[name], seed=0)))


def test_heads_that_share_keys_have_one_reader_for_them() -> None:
    assert graph().readers[:8] == (
        *(f"L0H{head} query" for head in range(4)),
        *("L0H0-1 key", "L0H2-3 key", "L0H0-1 value", "L0H2-3 value"),
    )


def test_any_of_these_heads_names_the_shared_reader() -> None:
    edges = graph().edges(graph().mask(["L0H1 → L1H3 key", ("L0H1", "L1H2 key")]))
    assert edges == (Edge("L0H1", "L1H2-3 key"),)


def test_a_reader_sees_only_what_was_written_before_it() -> None:
    own = graph()
    place = own.readers.index("L1 mlp")
    before = [own.writers[column] for column in np.flatnonzero(own.possible[place])]
    assert before == list(own.writers[: own.writers.index("L1 mlp")])


def test_parallel_feedforwards_do_not_see_the_heads_of_their_layer() -> None:
    own = graph("parallel")
    row = own.possible[own.readers.index("L0 mlp")]
    assert [own.writers[column] for column in np.flatnonzero(row)] == ["embeddings"]


def test_edges_without_a_path_to_the_logits_are_dead() -> None:
    own = graph()
    mask = own.mask(["embeddings → L0H0 query", "embeddings → L0H1 value", "L0H1 → logits"])
    live = own.edges(own.live(mask))
    assert set(live) == {Edge("embeddings", "L0H0-1 value"), Edge("L0H1", "logits")}


@pytest.mark.parametrize(
    ("edge", "reason"),
    [
        ("L9H0 → logits", "has no writer 'L9H0'"),
        ("L0H0 → L1 query", "has no reader 'L1 query'"),
        ("L1H0 → L0 mlp", "comes after"),
        ("L1H0", "is not an edge"),
    ],
)
def test_impossible_edges_are_refused(edge: str, reason: str) -> None:
    with refuses(InputError, reason):
        graph().mask([edge])
