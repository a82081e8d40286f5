from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.lens.circuit_discovery.edge_oracle import edge_effects, edges_of

pytest.importorskip("tracr")

from manyheads.errors import InputError
from manyheads.lens.circuit_discovery.circuit import circuit
from manyheads.lens.circuit_discovery.graph import Edge
from manyheads.lens.circuit_discovery.known_circuits import (
    KnownCircuit,
    ProgramPairs,
    compile_rasp,
)
from manyheads.lens.circuit_discovery.rasp_programs import library_programs, tracr
from manyheads.ragged import Ragged

NAMES = [
    "frac_prevs causal",
    "shift_by",
    "detect_pattern",
    "pair_balance",
    "count_less_freq",
    "nary_sequencemap",
]


def known(name: str, **options: int) -> KnownCircuit:
    entry = next(program for program in library_programs() if program.name == name)
    return compile_rasp(
        entry.program, entry.vocabulary, entry.max_length, causal=entry.causal, **options
    )


@dataclass(frozen=True)
class Case:
    circuit: KnownCircuit
    pairs: ProgramPairs


@pytest.fixture(scope="module", params=["hist", "frac_prevs causal", "sort_unique"])
def case(request: pytest.FixtureRequest) -> Case:
    compiled = known(request.param, idle_heads=0, noise_heads=1, seed=3)
    return Case(compiled, compiled.pairs(12, seed=1))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_program(name: str) -> None:
    compiled = known(name)
    inputs = compiled.draw(25)
    assert len(inputs) == 25
    assert compiled.wrong(inputs) == 0


def test_own_program_is_computed_and_its_heads_are_known() -> None:
    rasp = tracr("rasp.rasp")
    before = rasp.Aggregate(
        rasp.Select(rasp.indices, rasp.indices, lambda key, query: key == query - 1), rasp.tokens
    )
    program = rasp.SequenceMap(lambda x, y: x == y, rasp.tokens, before)
    compiled = compile_rasp(program, ("a", "b", "c"), 5, seed=2)
    assert compiled.run([("a", "a", "b", "b", "a")]) == [[None, True, False, True, False]]
    assert compiled.wrong(compiled.draw(30)) == 0
    assert len(compiled.heads) == 1


def test_means_and_negative_numbers_are_computed_where_tracr_would_round_them() -> None:
    rasp, lib = tracr("rasp.rasp"), tracr("compiler.lib")
    fractions = rasp.numerical(lib.make_frac_prevs(rasp.tokens == "a"))
    most = rasp.categorical(rasp.Map(lambda fraction: fraction > 0.5, fractions))
    compiled = compile_rasp(most, ("a", "b"), 5)
    assert compiled.wrong(compiled.draw(40)) == 0
    negative = compile_rasp(rasp.numerical(rasp.Map(lambda x: -x, rasp.tokens)), (1, 2), 3)
    assert negative.wrong(negative.draw(10)) == 0


def test_many_tokens_are_counted_exactly() -> None:
    compiled = compile_rasp(tracr("compiler.lib").make_hist(), ("a", "b"), 12)
    assert compiled.wrong([("a",) * 11 + ("b",), ("a",) * 12, ("a", "b") * 6]) == 0


def test_pairs_have_the_same_lengths_and_differ_by_one_in_the_metric(case: Case) -> None:
    pairs, measured = case.pairs, []
    assert [len(ids) for ids in pairs.clean] == [len(ids) for ids in pairs.corrupted]
    for ids in (pairs.clean, pairs.corrupted):
        logits = case.circuit.model(Ragged.from_list([torch.tensor(row) for row in ids])).logits
        measured.append(pairs.metric.function(logits, range(len(ids))))
    torch.testing.assert_close(measured[0] - measured[1], torch.ones(12), atol=1e-3, rtol=0)


def test_metric_of_a_text_is_the_same_in_any_batch(case: Case) -> None:
    pairs, last = case.pairs, range(8, 12)

    def measure(texts: range) -> torch.Tensor:
        batch = Ragged.from_list([torch.tensor(pairs.clean[text]) for text in texts])
        return pairs.metric.function(case.circuit.model(batch).logits, texts)

    torch.testing.assert_close(measure(range(12))[8:], measure(last), atol=1e-3, rtol=0)


def test_exact_effects_separate_true_edges_from_all_others(case: Case) -> None:
    model, pairs = case.circuit.model, case.pairs
    edges = list(edges_of(model))
    effects = edge_effects(model, pairs.clean, pairs.corrupted, pairs.metric.function, edges).abs()
    true = np.isin([str(edge) for edge in edges], [str(edge) for edge in case.circuit.edges])
    assert true.sum() == len(case.circuit.edges)
    assert effects[true].mean(1).min() > 0.01
    assert effects[~true].max() < 1e-3


def test_exact_scores_of_the_lens_are_those_of_plain_patching(case: Case) -> None:
    model, pairs = case.circuit.model, case.pairs
    edges = list(edges_of(model))
    effects = edge_effects(model, pairs.clean, pairs.corrupted, pairs.metric.function, edges)
    result = circuit(model, pairs.clean, pairs.corrupted, pairs.metric, "exact", progress=False)
    assert len(edges) == np.isfinite(result.scores).sum()
    scores = torch.tensor([result[edge] for edge in edges])
    torch.testing.assert_close(scores, effects.mean(1), atol=1e-4, rtol=0)


def test_heads_are_those_on_true_edges(case: Case) -> None:
    ends = {edge.writer for edge in case.circuit.edges} - {"embeddings"}
    assert {end for end in ends if "mlp" not in end} == set(case.circuit.heads)
    assert Edge(case.circuit.heads[0], "logits").writer in ends


def test_programs_ignore_padding() -> None:
    compiled = known("length")
    ids = [compiled.encode(("a", "b"), padding=3)]
    logits = compiled.model(Ragged.from_list([torch.tensor(row) for row in ids])).logits
    assert compiled.decode(logits.values[1:3]) == [2, 2]


def test_same_seed_gives_the_same_model_and_pairs() -> None:
    first, second = known("shift_by", seed=5), known("shift_by", seed=5)
    assert torch.equal(first.model.readout.weight, second.model.readout.weight)
    assert first.edges == second.edges
    assert first.pairs(8).clean == second.pairs(8).clean


def test_unknown_values_and_long_inputs_are_refused() -> None:
    compiled = known("hist")
    with pytest.raises(InputError, match="'z' is not in the vocabulary"):
        compiled.run([("a", "z")])
    with pytest.raises(InputError, match="max_length=6"):
        compiled.run([("a",) * 7])


def test_program_that_ignores_its_tokens_has_no_pairs() -> None:
    rasp = tracr("rasp.rasp")
    program = rasp.Map(lambda index: index + 1, rasp.indices)
    compiled = compile_rasp(program, ("a", "b"), 3)
    assert compiled.edges == ()
    with pytest.raises(InputError, match="different outputs"):
        compiled.pairs(4)
