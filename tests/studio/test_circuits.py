"""Circuits in the studio: the numbers behind the card are those of the lens."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.lens.circuit_discovery.circuit import circuit
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.pictures.circuit_layout import STOPS
from manyheads.studio.circuits import RANDOM_CIRCUITS, CircuitHandlers
from manyheads.studio.models import ModelStore
from manyheads.studio.requests import LIMITS, DisconnectedError, RequestBody
from manyheads.studio.run_cache import never_cancelled
from manyheads.studio.security import Endpoint
from manyheads.studio.server import make_app
from tests.studio import models
from tests.studio.test_handlers import ADDRESS, OTHER, TEXT, ask, refused

PAIR = {"text": TEXT, "source": OTHER}


@pytest.fixture(scope="module")
def decoder() -> Any:
    return models.decoder()


@pytest.fixture(scope="module")
def client(decoder: Any) -> Iterator[TestClient]:
    store = [("tiny", decoder), ("fills", models.masked()), ("points", models.vectors())]
    with TestClient(make_app(store, Endpoint(port=8765)), base_url=ADDRESS) as client:
        yield client


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    answer = client.post("/api/circuit", json={"model": "tiny", **PAIR, **fields})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture(scope="module")
def lines(client: TestClient) -> list[dict[str, Any]]:
    return stream(client)


@pytest.fixture(scope="module")
def measured(decoder: Any, lines: list[dict[str, Any]]) -> Any:
    """The same circuit, by the lens."""
    answer, foil = (lines[-1][name]["id"] for name in ("answer", "foil"))
    metric = LogitDifference(answer=(answer,), distractor=(foil,))
    return circuit(decoder, [TEXT], [OTHER], metric, progress=False)


def test_edges_are_those_of_the_lens(lines: list[dict[str, Any]], measured: Any) -> None:
    result = lines[-1]
    assert result["method"] == "eap-ig"
    assert result["warning"] == measured.warning
    assert (result["clean"], result["corrupted"]) == pytest.approx(
        (measured.clean, measured.corrupted), rel=1e-4
    )
    edges = result["view"]["edges"]
    ranked = measured.ranked(STOPS[-1])
    assert [f"{node} {port}".strip() for _, node, port, _, _ in edges] == [
        edge.reader for edge, _, _ in ranked
    ]
    assert [edge[3] for edge in edges] == pytest.approx([score for _, score, _ in ranked], rel=1e-3)
    # One pair has no standard error.
    assert {edge[4] for edge in edges} == {None}


def test_progress_grows_until_the_circuit_comes(lines: list[dict[str, Any]]) -> None:
    *progress, result = lines
    fractions = [line["fraction"] for line in progress]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    assert result["done"] is True


def test_a_circuit_is_evaluated_exactly_beside_random_ones(
    client: TestClient, measured: Any
) -> None:
    top = measured.top(20)
    edges = [[edge.writer, edge.reader] for edge in top]
    result = ask(client, "circuit_evaluation", **PAIR, edges=edges)
    values = measured.evaluate(top, progress=False)
    assert result["edges"] == 20
    assert result["value"] == pytest.approx(float(values[0]), rel=1e-3)
    assert result["faithfulness"] == pytest.approx(measured.pairs.faithfulness(values)[0], rel=1e-3)
    assert len(result["random"]) == RANDOM_CIRCUITS
    every = [[edge.writer, edge.reader] for edge in measured.top(measured.scores.size)]
    assert ask(client, "circuit_evaluation", **PAIR, edges=every)["faithfulness"] == pytest.approx(
        1
    )
    assert "no reader" in refused(
        client, "circuit_evaluation", source=OTHER, edges=[["embeddings", "L9 mlp"]]
    )
    assert "as in" in refused(client, "circuit_evaluation", source=OTHER, edges=["L0H1"])
    many = [["embeddings", "logits"]] * (LIMITS.circuit_edges + 1)
    assert "at most" in refused(client, "circuit_evaluation", source=OTHER, edges=many)


def test_words_are_the_first_predictions_of_both_texts(client: TestClient) -> None:
    words = ask(client, "circuit_words", **PAIR)
    tops = [ask(client, "predictions", text=text, top_k=2)["top"] for text in (TEXT, OTHER)]
    assert words["answer"]["id"] == tops[0][0]["id"]
    assert words["foil"]["id"] in [top["id"] for top in (tops[1][0], tops[0][1])]
    assert words["foil"]["id"] != words["answer"]["id"]
    assert [word["id"] for word in words["answers"][:2]] == [top["id"] for top in tops[0]]
    assert words["foils"][0]["id"] == tops[1][0]["id"]
    swapped = {"answer": words["foil"]["id"], "foil": words["answer"]["id"]}
    assert ask(client, "circuit_words", **PAIR, **swapped)["answer"] == words["foil"]


def test_texts_that_cannot_be_compared_have_a_reason(client: TestClient) -> None:
    shorter = ask(client, "circuit_words", text=TEXT, source="The cat")["reason"]
    assert "do not align" in shorter
    assert stream(client, source="The cat") == [{"error": shorter}]
    assert "same" in ask(client, "circuit_words", text=TEXT, source=TEXT)["reason"]
    alike = ask(client, "circuit_words", **PAIR, answer=5, foil=5)["reason"]
    assert "compared with itself" in alike
    assert "language model" in ask(client, "circuit_words", **PAIR, model="points")["reason"]
    long = [word + " cat" * LIMITS.patching_tokens for word in ("The", "A")]
    reason = ask(client, "circuit_words", text=long[0], source=long[1])["reason"]
    assert "use at most" in reason or "do not align" in reason


def test_a_masked_model_has_a_circuit(client: TestClient) -> None:
    texts = {"text": "The cat sat on[MASK] mat.", "source": "The dog sat on[MASK] mat."}
    result = stream(client, model="fills", **texts, position=4, method="eap")[-1]
    assert result["done"], result
    assert result["view"]["edges"]


def test_a_suggestion_replaces_one_token(client: TestClient, decoder: Any) -> None:
    suggestion = ask(client, "circuit_suggestion", text=TEXT)["text"]
    ids = [decoder.tokenizer.encode(text).ids for text in (TEXT, suggestion)]
    assert len(ids[0]) == len(ids[1])
    assert sum(one != two for one, two in zip(*ids, strict=True)) == 1
    assert ids[0][-1] == ids[1][-1]


def test_a_closed_page_stops_the_search(decoder: Any) -> None:
    handlers = CircuitHandlers(ModelStore([("tiny", decoder)]))
    body = RequestBody({"model": "tiny", **PAIR})
    fractions: list[float] = []
    with pytest.raises(DisconnectedError):
        handlers.circuit(body, fractions.append, lambda: len(fractions) > 1)
    assert len(fractions) == 2
    handlers.circuit_words(body, never_cancelled)
