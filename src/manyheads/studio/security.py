"""Security of the studio: only its own page may send requests, with its token, of limited size."""

import asyncio
import hmac
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

from manyheads.studio.requests import LIMITS, RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY_HOST = ("0.0.0.0", "::")
# Addresses for documentation, to which nothing is sent: the system only looks up its way there.
ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))

# Only our own scripts and styles; no frames, no forms, nothing from elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the studio listens, and the token that requests from other machines need."""

    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = None

    @property
    def cookie_name(self) -> str:
        """Different for two studios on one machine."""
        return f"manyheads-{self.port}"

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses to open in a browser, those that other machines can reach first."""
        names: tuple[str, ...] = (self.host,)
        if self.host in ANY_HOST:
            # Others may not be able to resolve the machine's name.
            names = (*_own_addresses(self.host), socket.gethostname())
        query = f"?token={self.token}" if self.token else ""
        hosts = [f"[{name}]" if ":" in name else name for name in names]
        return tuple(f"http://{host}:{self.port}/{query}" for host in hosts)

    @property
    def local_url(self) -> str:
        """The address for a browser on this machine."""
        if self.host not in ANY_HOST:
            return self.urls[0]
        host = "[::1]" if ":" in self.host else "127.0.0.1"
        return f"http://{host}:{self.port}/?token={self.token}"

    def accepts_host(self, host: str) -> bool:
        """Whether a Host header names this studio, which protects against DNS rebinding.

        With a token any IP address is accepted: a rebound page sends its own host name, and does
        not know the token.
        """
        name, port = _split_host(host)
        if name is None or port != self.port:
            return False
        if name in (*LOOPBACK, self.host.lower()):
            return True
        return self.token is not None and (
            _is_ip_address(name) or name == socket.gethostname().lower()
        )


class SecurityMiddleware:
    """Refuses requests that do not come from the studio's own page."""

    def __init__(self, app: App, endpoint: Endpoint) -> None:
        self.app, self.endpoint = app, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": self._headers(scope, message["headers"])}
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, _limit_body(receive), send_with_headers)
        except RequestError as error:
            if started:
                raise
            await _send_error(error, send_with_headers)

    def _check(self, scope: Scope) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if not self.endpoint.accepts_host(headers.get("host", "")):
            raise RequestError(
                403, "The host name is not that of the studio: open the address that it printed."
            )
        self._check_origin(scope, headers)
        if self.endpoint.token is not None and not self._has_token(scope, headers):
            raise RequestError(
                403, "The token is missing: open the full address that the studio printed."
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > LIMITS.body_bytes:
            raise RequestError(413, f"The body is larger than {LIMITS.body_bytes:,} bytes.")

    def _check_origin(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Another site may link to the page, and may do nothing else."""
        origin = headers.get("origin")
        if origin is not None:
            sent = urlsplit(origin)
            if sent.scheme not in ("http", "https") or sent.netloc != headers.get("host"):
                raise RequestError(403, "Other sites may not send requests to the studio.")
        site = headers.get("sec-fetch-site", "none")
        opens = headers.get("sec-fetch-dest") == "document" and scope["path"] == "/"
        if site not in ("same-origin", "none") and not (opens and scope["method"] == "GET"):
            raise RequestError(403, "Other sites may not send requests to the studio.")

    def _has_token(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.endpoint.cookie_name)
        except CookieError:
            cookie = None
        sent = "" if cookie is None else cookie.value
        return self._has_query_token(scope) or self._is_token(sent)

    def _has_query_token(self, scope: Scope) -> bool:
        return self._is_token(
            parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1]
        )

    def _is_token(self, sent: str) -> bool:
        token = self.endpoint.token or ""
        return hmac.compare_digest(sent.encode("utf-8", "replace"), token.encode())

    def _headers(
        self, scope: Scope, headers: list[tuple[bytes, bytes]]
    ) -> list[tuple[bytes, bytes]]:
        added = dict(HEADERS)
        token = self.endpoint.token
        if token is not None and scope["path"] == "/" and self._has_query_token(scope):
            cookie = f"{self.endpoint.cookie_name}={token}"
            added["set-cookie"] = f"{cookie}; HttpOnly; SameSite=Strict; Path=/"
        return [*headers, *((name.encode(), value.encode()) for name, value in added.items())]


def _own_addresses(host: str) -> tuple[str, ...]:
    """The addresses of this machine in its networks: 0.0.0.0 listens on IPv4, :: on both."""
    addresses = []
    for family, elsewhere in ELSEWHERE[: 1 + (host == "::")]:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            addresses.append(str(probe.getsockname()[0]))
    return tuple(address for address in addresses if not ip_address(address).is_loopback)


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    return host == "localhost" or (_is_ip_address(host) and ip_address(host).is_loopback)


def _limit_body(receive: Receive) -> Receive:
    """Limit the size and the time of a body; its Content-Length header may be wrong."""
    received, done = 0, False
    deadline = time.monotonic() + LIMITS.body_seconds

    async def receive_limited() -> Message:
        nonlocal received, done
        if done:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), deadline - time.monotonic())
        except TimeoutError:
            raise RequestError(408, "The body took too long to arrive.") from None
        received += len(message.get("body", b""))
        done = not message.get("more_body", False)
        if received > LIMITS.body_bytes:
            raise RequestError(413, f"The body is larger than {LIMITS.body_bytes:,} bytes.")
        return message

    return receive_limited


async def _send_error(error: RequestError, send: Send) -> None:
    body = json.dumps({"error": error.message}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        # The body of the request is not read.
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _split_host(host: str) -> tuple[str | None, int]:
    """The name and the port of a Host header; the default port is 80."""
    try:
        parts = urlsplit(f"//{host}")
        valid = parts.netloc == host and "@" not in host
        return (parts.hostname if valid else None), 80 if parts.port is None else parts.port
    except ValueError:
        return None, 0


def _is_ip_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
