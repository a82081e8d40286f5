"""Slow clients lose their connections, and never keep others out."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from manyheads.studio import connections
from manyheads.studio.requests import LIMITS
from tests.studio import models
from tests.studio.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server([("tiny", models.decoder(layers=1))]) as result:
        yield result


def connect(live: LiveServer) -> socket.socket:
    return socket.create_connection((live.endpoint.host, live.endpoint.port), timeout=10)


def received(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def request(live: LiveServer, then: str = "close") -> bytes:
    host = f"Host: 127.0.0.1:{live.endpoint.port}\r\n"
    return f"GET /api/models HTTP/1.1\r\n{host}Connection: {then}\r\n\r\n".encode()


@pytest.mark.parametrize("drips", [True, False])
def test_half_a_header_is_given_up(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, drips: bool
) -> None:
    monkeypatch.setattr(connections, "LIMITS", replace(LIMITS, header_seconds=0.3))
    begun = time.monotonic()
    with connect(live) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
        while drips and time.monotonic() < begun + 0.5:
            with suppress(OSError):
                connection.sendall(b"x")
            time.sleep(0.05)
        assert received(connection).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - begun < 5


def test_a_second_request_has_the_same_time(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LIMITS", replace(LIMITS, header_seconds=0.3))
    with connect(live) as connection:
        connection.sendall(request(live, "keep-alive"))
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert b"HTTP/1.1 408" in received(connection)


def test_hundreds_of_slow_clients_keep_nobody_out(live: LiveServer) -> None:
    with ExitStack() as stack:
        for _ in range(220):
            slow = stack.enter_context(connect(live))
            slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
        begun = time.monotonic()
        with connect(live) as connection:
            connection.sendall(request(live))
            assert received(connection).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - begun < 5


def test_a_request_that_is_answered_is_not_the_one_that_is_closed(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LIMITS", replace(LIMITS, connections_per_address=2))
    with connect(live) as busy:
        # Its headers are complete, its body is not.
        host = f"Host: 127.0.0.1:{live.endpoint.port}\r\nContent-Type: application/json\r\n"
        busy.sendall(f"POST /api/tokens HTTP/1.1\r\n{host}Content-Length: 2\r\n\r\n".encode())
        time.sleep(0.2)
        with connect(live) as idle, connect(live):
            assert received(idle) == b""
        busy.sendall(b"{}")
        assert busy.recv(2**16).startswith(b"HTTP/1.1 422")
