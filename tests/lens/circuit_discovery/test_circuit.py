"""A circuit as a result: ranked, cut down to what suffices, compared, saved, and warned about."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.circuit_discovery.circuit import Circuit, circuit
from manyheads.lens.circuit_discovery.graph import Edge
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.models.build import Model, build
from tests.messages import refuses

PAIRS = 8
METRIC = LogitDifference(answer=(1,) * PAIRS, distractor=(2,) * PAIRS)


@cache
def model() -> Model:
    torch.manual_seed(0)
    built = build("gpt2", layers=2, width=16, heads=2, vocabulary=20, seed=0)
    for parameter in built.parameters():
        parameter.data.normal_(0, 0.3 if parameter.dim() > 1 else 0.1)
    return built


def texts(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Pairs that differ in their second token: 3 in clean texts, 4 in corrupted ones."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(5, 20, (PAIRS, 5), generator=generator).tolist()
    return tuple([[row[0], token, *row[2:]] for row in rows] for token in (3, 4))  # type: ignore[return-value]


@cache
def scored(level: str = "edge", method: str = "exact") -> Circuit:
    return circuit(model(), *texts(0), METRIC, method, level, progress=False)  # type: ignore[arg-type]


def test_edges_are_ranked_by_their_strength() -> None:
    strengths = [abs(score) for _, score, _ in scored().ranked()]
    assert strengths == sorted(strengths, reverse=True)
    signed = [score for _, score, _ in scored().ranked(by="signed")]
    assert signed == sorted(signed, reverse=True)
    edge, score, _ = scored().ranked(1)[0]
    assert scored()[edge] == scored()[str(edge)] == score


def test_the_minimal_circuit_is_as_faithful_as_required() -> None:
    result = scored()
    edges = result.minimal(0.8, progress=False)
    kept, _ = result.pairs.faithfulness(result.evaluate(edges, progress=False))
    assert kept >= 0.8
    assert len(edges) < len(result.rows())


def test_the_curve_ends_at_the_whole_model() -> None:
    for level in ("edge", "head"):
        curve = scored(level).faithfulness(progress=False)
        assert curve.faithfulness[-1] == pytest.approx(1, abs=1e-4)
        assert curve.complements[-1] == pytest.approx(0, abs=1e-4)
        assert curve.cmd >= 0
        assert "CPR" in str(curve)


def test_areas_are_those_of_the_benchmark() -> None:
    curve = scored().faithfulness((0.5, 1.0), progress=False)
    first, last = curve.faithfulness
    assert curve.cpr == pytest.approx((first + last) / 4)
    assert curve.cmd == pytest.approx((abs(1 - first) + abs(1 - last)) / 4)


def test_a_saved_circuit_is_evaluated_after_it_is_bound(tmp_path: Path) -> None:
    result = scored()
    result.save(tmp_path / "circuit.json")
    loaded = lens.load(tmp_path / "circuit.json")
    assert isinstance(loaded, Circuit)
    np.testing.assert_array_equal(loaded.scores, result.scores)
    with refuses(InputError, "knows no model", "bind"):
        loaded.evaluate(())
    bound = loaded.bind(model(), *texts(0), METRIC)
    edges = result.top(9)
    torch.testing.assert_close(
        bound.evaluate(edges, progress=False), result.evaluate(edges, progress=False)
    )


def test_a_circuit_is_not_bound_to_another_model() -> None:
    other = build("gpt2", layers=1, width=16, heads=2, vocabulary=20, seed=0)
    with refuses(InputError, "another model"):
        scored().bind(other, *texts(0), METRIC)


def test_a_circuit_agrees_with_itself() -> None:
    agreement = scored().compare(scored())
    assert agreement == pytest.approx(dict.fromkeys(agreement, 1.0))


def test_the_same_pairs_twice_have_the_same_scores_and_smaller_errors() -> None:
    twice = [rows * 2 for rows in texts(0)]
    metric = LogitDifference(answer=(1,) * 2 * PAIRS, distractor=(2,) * 2 * PAIRS)
    result = circuit(model(), *twice, metric, "exact", batch_tokens=15, progress=False)
    np.testing.assert_allclose(result.scores, scored().scores, atol=1e-5)
    factor = (PAIRS - 1) / (2 * PAIRS - 1)
    np.testing.assert_allclose(result.errors, scored().errors * factor**0.5, atol=1e-5)


def test_effects_that_do_not_separate_from_noise_are_announced() -> None:
    generator = torch.Generator().manual_seed(1)
    clean, corrupted = (
        torch.randint(0, 20, (PAIRS, 5), generator=generator).tolist() for _ in range(2)
    )
    noisy = circuit(model(), clean, corrupted, METRIC, "eap", progress=False)
    assert "WARNING" in str(noisy)
    assert scored().warning == ""


def test_a_lower_loss_is_better() -> None:
    clean, corrupted = texts(0)
    result = circuit(model(), clean, corrupted, method="exact", level="head", progress=False)
    assert result["embeddings"] == pytest.approx(result.corrupted - result.clean, abs=1e-5)


def test_parts_are_evaluated_by_name() -> None:
    result = scored("head", "eap")
    every = result.evaluate(result.writers, progress=False)
    torch.testing.assert_close(every, result.pairs.ends[0], atol=1e-5, rtol=1e-5)
    with refuses(InputError, "has no writer 'L7H1'"):
        result.evaluate(["L7H1"])


def test_texts_that_do_not_match_are_refused() -> None:
    with refuses(InputError, "tokens"):
        circuit(model(), [[1, 2, 3]], [[1, 2]], progress=False)


def test_an_unknown_edge_has_no_score() -> None:
    with refuses(InputError, "there is no edge"):
        scored()[Edge("L9H9", "logits")]
