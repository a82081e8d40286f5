import pytest

pytest.importorskip("tracr")

from manyheads.lens.circuit_discovery.known_circuits import KnownCircuit, compile_rasp
from manyheads.lens.circuit_discovery.rasp_programs import library_programs, tracr


def known(name: str) -> KnownCircuit:
    entry = next(program for program in library_programs() if program.name == name)
    return compile_rasp(
        entry.program, entry.vocabulary, entry.max_length, causal=entry.causal, rotate=False
    )


def test_histogram_counts_by_one_head_and_decodes_by_its_feedforward() -> None:
    assert [str(edge) for edge in known("hist").edges] == [
        "embeddings → L0H0 query",
        "embeddings → L0H0 key",
        "L0H0 → L0 mlp",
        "L0 mlp → logits",
    ]


def test_constants_are_wired_and_not_true() -> None:
    circuit = known("hist")
    constants = set(circuit.wired) - set(circuit.edges)
    # The mark of the beginning, which the head counts, and the constant one of the thresholds.
    assert {str(edge) for edge in constants} == {"embeddings → L0H0 value", "embeddings → L0 mlp"}


def test_index_of_a_position_is_no_content() -> None:
    circuit = known("shift_by")
    assert [str(edge) for edge in circuit.edges] == ["embeddings → L0H0 value", "L0H0 → logits"]
    assert {str(edge) for edge in circuit.wired} > {"embeddings → L0H0 query"}


def test_length_passes_along_keys_as_padding_is_not_counted() -> None:
    assert [str(edge) for edge in known("length").edges] == [
        "embeddings → L0H0 key",
        "L0H0 → L0 mlp",
        "L0 mlp → logits",
    ]


def test_reader_of_two_values_has_an_edge_from_each_writer() -> None:
    rasp = tracr("rasp.rasp")
    same = rasp.SelectorWidth(rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.EQ))
    program = rasp.SequenceMap(lambda x, count: x if count > 1 else 0, rasp.tokens, same)
    circuit = compile_rasp(program, (1, 2, 3), 4, rotate=False)
    last = [edge.writer for edge in circuit.edges if edge.reader == "L1 mlp"]
    assert last == ["embeddings", "L0 mlp"]


def test_values_that_no_output_depends_on_have_no_edge() -> None:
    rasp = tracr("rasp.rasp")
    unused = rasp.SelectorWidth(rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.EQ))
    program = rasp.SequenceMap(lambda x, _: x, rasp.tokens, rasp.Map(lambda _: 1, unused))
    circuit = compile_rasp(program, ("a", "b"), 3, rotate=False)
    assert circuit.heads == ()
    assert any(edge.writer == "L0H0" for edge in circuit.wired)
