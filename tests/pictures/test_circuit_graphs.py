"""The picture of a circuit in words: its nodes, and how many edges of how many."""

from pathlib import Path

from manyheads.pictures import draw_circuit
from tests.pictures.examples import circuit_edges


def test_the_picture_has_its_nodes_and_the_number_of_edges(tmp_path: Path) -> None:
    edges, path = circuit_edges(), tmp_path / "circuit.svg"
    draw_circuit(edges, path, max_edges=3, total=7_000, title="IOI")
    words = path.read_text("utf-8")
    assert "the strongest 3 of 7,000 edges" in words
    for writer, _, _ in edges[:3]:
        assert f">{writer}<" in words
    assert words.count("stroke-dasharray") >= 2
    draw_circuit(edges[:1], path)
    assert ">1 edge; width" in path.read_text("utf-8")
