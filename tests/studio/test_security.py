"""Only the studio's own page gets an answer, whatever else is sent."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.studio.requests import LIMITS
from manyheads.studio.security import Endpoint
from manyheads.studio.server import bind_endpoint, make_app
from tests.studio import models

ADDRESS = "http://127.0.0.1:8765"
REQUEST = {"model": "tiny", "text": "The cat"}


@pytest.fixture(scope="module")
def model() -> Any:
    return models.decoder(layers=1)


@pytest.fixture(scope="module")
def client(model: Any) -> Iterator[TestClient]:
    with TestClient(make_app([("tiny", model)], Endpoint(port=8765)), base_url=ADDRESS) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(model: Any) -> Iterator[TestClient]:
    """One that is bound elsewhere."""
    endpoint = Endpoint(host="0.0.0.0", port=8765, token="secret")
    with TestClient(make_app([("tiny", model)], endpoint), base_url=ADDRESS) as client:
        yield client


def test_its_own_page_is_answered(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]
    assert client.post("/api/tokens", json=REQUEST, headers={"origin": ADDRESS}).status_code == 200


def test_every_answer_forbids_what_is_not_ours(client: TestClient) -> None:
    for answer in (client.get("/"), client.get("/main.js"), client.get("/nothing")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://elsewhere.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1.elsewhere.example:8765"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "elsewhere.example:8765"},
        {"host": "127.0.0.1:80"},
        {"host": "127.0.0.1"},
        {"host": "me@127.0.0.1:8765"},
        {"host": ""},
    ],
)
def test_a_page_from_another_origin_gets_nothing(
    client: TestClient, headers: dict[str, str]
) -> None:
    answers = [client.post("/api/tokens", json=REQUEST, headers=headers)]
    answers += [client.get(path, headers=headers) for path in ("/api/models", "/main.js")]
    for answer in answers:
        assert answer.status_code == 403
        assert set(answer.json()) == {"error"}
        assert "access-control-allow-origin" not in answer.headers
    preflight = client.options("/api/tokens", headers={**headers, "origin": "http://other.example"})
    assert preflight.status_code == 403


def test_a_link_may_lead_here(client: TestClient) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}
    assert client.get("/", headers=headers).status_code == 200
    assert client.get("/api/models", headers=headers).status_code == 403
    assert client.get("/", headers={**headers, "sec-fetch-dest": "iframe"}).status_code == 403


def test_elsewhere_than_on_loopback_a_token_is_asked_for(guarded: TestClient) -> None:
    for path in ("/", "/main.js", "/api/models", "/?token=wrong", "/?token="):
        assert guarded.get(path).status_code == 403
    opened = guarded.get("/?token=secret")
    assert opened.status_code == 200
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    # The cookie that came with the page speaks for what the page asks.
    assert guarded.get("/api/models").status_code == 200
    guarded.cookies.clear()
    assert guarded.get("/api/models").status_code == 403
    assert guarded.get("/api/models", headers={"cookie": "manyheads-8765=wrong"}).status_code == 403


def test_an_endpoint_outside_loopback_has_a_token() -> None:
    here, server_socket = bind_endpoint("127.0.0.1", 0)
    server_socket.close()
    assert here.token is None
    there, server_socket = bind_endpoint("0.0.0.0", 0)
    server_socket.close()
    assert there.token is not None
    assert len(there.token) >= 32
    assert f"?token={there.token}" in there.url


def test_a_page_that_points_its_own_name_here_is_not_known() -> None:
    endpoint = Endpoint(host="0.0.0.0", port=80, token="secret")
    assert endpoint.accepts_host("192.168.1.5")
    assert not endpoint.accepts_host("rebound.example")


def test_large_bodies_are_refused_by_their_length_and_by_their_size(client: TestClient) -> None:
    kind = {"content-type": "application/json"}
    body = b'{"model": "' + b"a" * LIMITS.body_bytes + b'"}'
    assert client.post("/api/tokens", content=body, headers=kind).status_code == 413

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 2**16):
            yield body[start : start + 2**16]

    assert client.post("/api/tokens", content=pieces(), headers=kind).status_code == 413


def test_only_json_is_read(client: TestClient) -> None:
    body = json.dumps(REQUEST)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = client.post("/api/tokens", content=body, headers={"content-type": kind})
        assert answer.status_code == 415


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/%2e%2e/server.py",
        "/page/main.js",
        "/server.py",
        "//etc/passwd",
        "/..%5c",
        "/main.js/",
    ],
)
def test_no_path_reaches_another_file(client: TestClient, path: str) -> None:
    answer = client.get(path, follow_redirects=False)
    assert answer.status_code == 404
    assert answer.json() == {"error": "There is nothing at this address."}


NAMES = (
    "tokens",
    "statistics",
    "attention_from",
    "attention_to",
    "attention_rows",
    "attention_map",
    "predictions",
    "patching",
    "generate",
    "kinds",
)


def _value(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON, of the kinds that break readers."""
    kinds: list[Any] = [
        lambda: None,
        lambda: chance.random() < 0.5,
        lambda: chance.choice([-1, 0, 1, 2**31, 2**63, 10**40, -(10**300)]),
        lambda: chance.choice([0.5, -0.0, 1e308, 1e-320]),
        lambda: chance.choice(
            ["", "tiny", "L0H0", "L" + "9" * 40 + "H0", "\x00", "\ud800", "../etc"]
        ),
        lambda: "x" * chance.choice([1, 1000, 5000]),
    ]
    if depth < 3:
        kinds.append(lambda: [_value(chance, depth + 1) for _ in range(chance.randrange(4))])
        kinds.append(lambda: {str(_value(chance, 3)): _value(chance, depth + 1) for _ in range(2)})
    return chance.choice(kinds)()


def _malformed(chance: random.Random) -> bytes:
    """A body that no question can mean: broken JSON, wrong types, unknown fields."""
    sound: dict[str, Any] = {"model": "tiny", "text": "The cat", "heads": ["L0H0"], "position": 0}
    way = chance.randrange(4)
    if way == 0:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(60)))
    if way == 1:
        whole = json.dumps(sound).encode()
        return whole[: chance.randrange(len(whole))]
    if way == 2:
        return chance.choice([b"[" * 5000, b"NaN", b'{"model": NaN}', b'"text"', b"[]", b"1e999"])
    wrong = chance.choice(
        ["model", "text", "edits", "heads", "position", "image", "max_new_tokens", "rows"]
    )
    sound[wrong] = _value(chance)
    # One field that nobody knows makes the rest wrong too, however it turned out.
    sound["unheard_of"] = _value(chance)
    return json.dumps(sound).encode()


def test_a_thousand_malformed_requests_leave_the_server_well(client: TestClient) -> None:
    chance = random.Random(7)
    seen = set()
    for _ in range(1000):
        name, body = chance.choice(NAMES), _malformed(chance)
        headers = {"content-type": "application/json"}
        answer = client.post(f"/api/{name}", content=body, headers=headers)
        assert 400 <= answer.status_code < 500, (name, body[:200], answer.text)
        assert answer.json()["error"].endswith("."), answer.text
        seen.add(answer.status_code)
    assert {400, 422} <= seen
    assert client.post("/api/tokens", json=REQUEST).status_code == 200


def test_odd_methods_are_refused(client: TestClient) -> None:
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "BREW"):
        answer = client.request(method, "/api/tokens")
        assert answer.status_code == 405
        assert answer.json()["error"].endswith(".")
