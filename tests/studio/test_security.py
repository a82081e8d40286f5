"""Only the studio's own page gets an answer, whatever else is sent."""

import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.errors import InputError
from manyheads.studio import security
from manyheads.studio.requests import LIMITS
from manyheads.studio.security import Endpoint, is_loopback
from manyheads.studio.server import bind_endpoint, make_app
from tests.studio import models
from tests.studio.live_server import LiveServer, live_server

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


def test_a_token_is_required_outside_loopback(guarded: TestClient) -> None:
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
    assert all(f"?token={there.token}" in url for url in (*there.urls, there.local_url))


@pytest.mark.parametrize(("host", "remedy"), [("192.0.2.7", "--host 127.0.0.1"), ("", "--port 0")])
def test_an_endpoint_that_cannot_listen_names_what_is_wrong(host: str, remedy: str) -> None:
    port = 0 if host else 70_000
    with pytest.raises(InputError, match=remedy):
        bind_endpoint(host, port)


def test_addresses_that_others_can_reach_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_own_addresses", lambda _: ("10.0.0.7",))
    monkeypatch.setattr(socket, "gethostname", lambda: "machine")
    endpoint = Endpoint(host="0.0.0.0", port=80, token="secret")
    assert endpoint.urls == ("http://10.0.0.7:80/?token=secret", "http://machine:80/?token=secret")
    assert all(endpoint.accepts_host(url.split("/")[2]) for url in endpoint.urls)
    # The browser of this machine needs no name at all.
    assert endpoint.local_url == "http://127.0.0.1:80/?token=secret"
    assert Endpoint(port=80).urls == ("http://127.0.0.1:80/",)


def test_own_addresses_are_not_of_this_machine_alone() -> None:
    for host in ("0.0.0.0", "::"):
        assert not any(map(is_loopback, security._own_addresses(host)))


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
    "token_count",
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


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server([("tiny", models.decoder(layers=1))]) as result:
        yield result


def _connect(live: LiveServer) -> socket.socket:
    return socket.create_connection((live.endpoint.host, live.endpoint.port), timeout=10)


def _read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("drips", [True, False])
def test_a_slow_body_is_refused(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, drips: bool
) -> None:
    monkeypatch.setattr(security, "LIMITS", replace(LIMITS, body_seconds=0.4))
    begun = time.monotonic()
    with _connect(live) as connection:
        port = live.endpoint.port
        connection.sendall(
            f"POST /api/tokens HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 900\r\n"
            "Content-Type: application/json\r\n\r\n{".encode()
        )
        # Each byte comes in time, and all of them would take a minute.
        while drips and time.monotonic() < begun + 0.6:
            with suppress(OSError):
                connection.sendall(b" ")
            time.sleep(0.05)
        answer = _read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"took too long" in answer
    assert time.monotonic() - begun < 5


def test_others_are_served_while_a_body_is_slow(live: LiveServer) -> None:
    with _connect(live) as slow, _connect(live) as other:
        host = f"Host: 127.0.0.1:{live.endpoint.port}\r\n"
        slow.sendall(
            f"POST /api/tokens HTTP/1.1\r\n{host}Content-Length: 900\r\n"
            "Content-Type: application/json\r\n\r\n{".encode()
        )
        other.sendall(f"GET /api/models HTTP/1.1\r\n{host}Connection: close\r\n\r\n".encode())
        assert _read_all(other).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("origin", ["http://evil.example", None])
@pytest.mark.parametrize("path", ["/", "/api/models", "/api/generate", "/socket"])
def test_a_websocket_is_never_opened(
    live: LiveServer, path: str, origin: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    sent = "" if origin is None else f"Origin: {origin}\r\n"
    with _connect(live) as connection:
        connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{live.endpoint.port}\r\n{sent}"
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        status = int(connection.recv(2**16).split()[1])
    assert status == 403 if origin else status in (200, 404, 405)
    assert capfd.readouterr() == ("", "")
