"""The worth of heads as the page receives it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.lens.causal.ablation import ablate
from manyheads.lens.causal.gradient_importance import importance
from manyheads.studio.security import Endpoint
from manyheads.studio.server import make_app
from tests.studio import models

TEXT = "The cat sat on the mat. The cat sat"
MASKED = "The cat sat on[MASK] mat."
ADDRESS = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def store() -> dict[str, Any]:
    return {"tiny": models.decoder(), "fills": models.masked(), "vectors": models.vectors()}


@pytest.fixture(scope="module")
def client(store: dict[str, Any]) -> Iterator[TestClient]:
    with TestClient(make_app([*store.items()], Endpoint(port=8765)), base_url=ADDRESS) as result:
        yield result


def lines(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    answer = client.post("/api/worth", json={"model": "tiny", "text": TEXT, **fields})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize(("name", "text", "position"), [("tiny", TEXT, 6), ("fills", MASKED, 5)])
def test_an_estimate_comes_first_then_every_head_exactly(
    client: TestClient, store: dict[str, Any], name: str, text: str, position: int
) -> None:
    estimate, *exact, end = lines(client, model=name, text=text, position=position)
    model = store[name]
    ids = model.tokenizer.encode(text).ids
    body = {"model": name, "text": text, "position": position}
    token = client.post("/api/predictions", json=body).json()["top"][0]["id"]

    def log_probability(logits: Any, _: Any) -> Any:
        return logits.values[position : position + 1].float().log_softmax(-1)[:, token]

    inputs = [ids if name == "fills" else ids[: position + 1]]
    heads = estimate["heads"]
    predicted = importance(model, inputs, log_probability, progress=False)["predicted"].means
    assert estimate["by"] == "gradient"
    assert estimate["worth"] == pytest.approx((-predicted).tolist(), rel=1e-3, abs=1e-6)
    result = ablate(model, inputs, metric=log_probability, progress=False)
    assert heads == [str(address) for address in result.addresses]
    worth = {
        head: value
        for line in exact
        for head, value in zip(line["heads"], line["worth"], strict=True)
    }
    assert [worth[head] for head in heads] == pytest.approx(
        (-result["change"].means).tolist(), rel=1e-3, abs=1e-6
    )
    assert [line["measured"] for line in exact] == [4 * count for count in range(1, len(exact) + 1)]
    assert exact[-1]["measured"] == exact[-1]["total"] == len(heads)
    assert end == {"done": True}


def test_a_model_that_predicts_no_tokens_is_refused(client: TestClient) -> None:
    answer = client.post("/api/worth", json={"model": "vectors", "text": TEXT})
    assert answer.status_code == 422
    assert "language model" in answer.json()["error"]
