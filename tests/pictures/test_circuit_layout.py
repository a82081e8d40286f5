"""Where the nodes of a circuit stand: edges go upward, boxes and lines keep apart."""

from itertools import combinations

import pytest

from manyheads.pictures.circuit_layout import (
    BOX,
    LINE,
    STOPS,
    circuit_view,
    place_circuit,
    split_reader,
)
from tests.pictures.examples import circuit_edges


@pytest.mark.parametrize("count", [1, 5, 20, 60])
def test_edges_go_upward_and_boxes_never_overlap(count: int) -> None:
    edges = circuit_edges()[:count]
    layout = place_circuit(edges)
    assert [node.row for node in layout.nodes].count(-1) == 0
    for (writer, reader, _), route in zip(edges, layout.routes, strict=True):
        rows = layout[writer].row, layout[split_reader(reader)[0]].row
        assert len(route) == rows[1] - rows[0] + 1 >= 2
    for first, second in combinations(layout.nodes, 2):
        assert first.row != second.row or abs(first.x - second.x) >= BOX - 1e-9


def test_lines_pass_between_the_boxes_of_a_row() -> None:
    edges = circuit_edges()[:40]
    layout = place_circuit(edges)
    for (writer, _, _), route in zip(edges, layout.routes, strict=True):
        for row, x in enumerate(route[1:-1], layout[writer].row + 1):
            boxes = [node.x for node in layout.nodes if node.row == row]
            assert min(abs(x - box) for box in boxes) >= (BOX + LINE) / 2 - 1e-9


def test_a_layer_has_shared_keys_below_its_heads_and_the_mlp_above() -> None:
    layout = place_circuit(
        [
            ("embeddings", "L3H0-2 key", 1.0),
            ("L3H1", "L3 mlp", 1.0),
            ("embeddings", "L3H1 query", -1.0),
            ("L3 mlp", "logits", 0.5),
        ]
    )
    order = ["embeddings", "L3H0-2", "L3H1", "L3 mlp", "logits"]
    assert [layout[name].row for name in order] == [0, 1, 2, 3, 4]
    assert layout.layers == ("", "3", "3", "3", "")
    assert layout.shared == (("L3H0-2", "L3H1"),)
    assert layout["L3H1"].ports == ("query",)


def test_two_edges_between_the_same_nodes_do_not_move_them_apart() -> None:
    layout = place_circuit([("L0H0", "L1H0 key", 1.0), ("L0H0", "L1H0 value", 1.0)])
    assert layout.columns == 1.0
    assert layout["L1H0"].ports == ("key", "value")
    assert [route[-1] for route in layout.routes] == [
        layout["L1H0"].port("key"),
        -layout["L1H0"].port("key"),
    ]


def test_edges_enter_a_port_side_by_side_in_the_order_they_come() -> None:
    edges = [(f"L0H{head}", "logits", 1.0) for head in range(4)]
    layout = place_circuit(edges)
    ends = {route[0]: route[-1] for route in layout.routes}
    assert [ends[x] for x in sorted(ends)] == sorted(ends.values())
    assert len({*ends.values()}) == 4


def test_a_page_gets_the_ranked_edges_and_a_layout_for_some_numbers_of_them() -> None:
    edges = circuit_edges()
    view = circuit_view(edges, [0.1] * len(edges), total=1_000)
    assert [len(layout["routes"]) for layout in view["layouts"]] == [*STOPS]
    assert len(view["edges"]) == STOPS[-1]
    assert view["edges"][0] == [edges[0][0], *split_reader(edges[0][1]), edges[0][2], 0.1]
    assert [len(own["routes"]) for own in circuit_view(edges[:3], [0.0] * 3, 3)["layouts"]] == [3]


def test_rounding_of_the_scores_moves_nothing() -> None:
    edges = circuit_edges()[:40]
    layout = place_circuit([(*ends, score * (1 + 1e-9)) for *ends, score in edges])
    for node in place_circuit(edges).nodes:
        assert layout[node.name].x == pytest.approx(node.x, abs=1e-6)
