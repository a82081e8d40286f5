"""Who may speak to the studio: its own page, by its own name, with its token, in small bodies."""

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

from manyheads.studio.requests import LIMITS, RefusedError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Scripts and styles of our own alone, no frames, no forms, nothing from elsewhere.
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
class Door:
    """Where the studio listens, and the token that those from elsewhere must bring."""

    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = None

    @property
    def cookie(self) -> str:
        """Two studios on one machine must not take each other's."""
        return f"manyheads-{self.port}"

    @property
    def address(self) -> str:
        """What to open in a browser."""
        name = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def knows(self, host: str) -> bool:
        """Whether a Host header names us; a name that somebody else points here does not.

        With a token any number may be said: a page that was led here by a name of its own says
        that name, and knows no token.
        """
        name, port = _split(host)
        if name is None or port != self.port:
            return False
        if name in (*LOOPBACK, self.host.lower()):
            return True
        return self.token is not None and (_is_number(name) or name == socket.gethostname().lower())


class Guard:
    """Stands before the app, and refuses what does not come from the studio's own page."""

    def __init__(self, app: App, door: Door) -> None:
        self.app, self.door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": self._headers(scope, message["headers"])}
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, _bounded(receive), send_guarded)
        except RefusedError as refusal:
            if started:
                raise
            await _refuse(refusal, send_guarded)

    def _check(self, scope: Scope) -> None:
        headers = _headers_of(scope)
        if not self.door.knows(headers.get("host", "")):
            raise RefusedError(
                403, "This name is not the studio's: open the address that it printed."
            )
        self._check_origin(scope, headers)
        if self.door.token is not None and not self._has_token(scope, headers):
            raise RefusedError(
                403, "The token is missing: open the whole address that was printed."
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > LIMITS.body_bytes:
            raise RefusedError(413, f"The body is larger than {LIMITS.body_bytes:,} bytes.")

    def _check_origin(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Another page may lead a person here by a link, and may do nothing else."""
        origin = headers.get("origin")
        if origin is not None:
            said = urlsplit(origin)
            if said.scheme not in ("http", "https") or said.netloc != headers.get("host"):
                raise RefusedError(403, "Another page may not ask the studio.")
        site = headers.get("sec-fetch-site", "none")
        opens = headers.get("sec-fetch-dest") == "document" and scope["path"] == "/"
        if site not in ("same-origin", "none") and not (opens and scope["method"] == "GET"):
            raise RefusedError(403, "Another page may not ask the studio.")

    def _has_token(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        said = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1]
        return self._is_token(said) or self._is_token(_cookie(headers, self.door.cookie))

    def _is_token(self, said: str) -> bool:
        token = self.door.token or ""
        return hmac.compare_digest(said.encode("utf-8", "replace"), token.encode())

    def _headers(self, scope: Scope, given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        added = dict(HEADERS)
        if self.door.token is not None and scope["path"] == "/":
            query = scope["query_string"].decode("latin-1")
            if self._is_token(parse_qs(query).get("token", [""])[-1]):
                cookie = f"{self.door.cookie}={self.door.token}"
                added["set-cookie"] = f"{cookie}; HttpOnly; SameSite=Strict; Path=/"
        return [*given, *((name.encode(), value.encode()) for name, value in added.items())]


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    return host == "localhost" or (_is_number(host) and ip_address(host).is_loopback)


def _bounded(receive: Receive) -> Receive:
    """What arrives, counted, since a header may lie about its length, and not for ever."""
    taken, done = 0, False

    async def bounded() -> Message:
        nonlocal taken, done
        if done:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), LIMITS.body_seconds)
        except TimeoutError:
            raise RefusedError(408, "The body took too long to arrive.") from None
        taken += len(message.get("body", b""))
        done = not message.get("more_body", False)
        if taken > LIMITS.body_bytes:
            raise RefusedError(413, f"The body is larger than {LIMITS.body_bytes:,} bytes.")
        return message

    return bounded


async def _refuse(refusal: RefusedError, send: Send) -> None:
    body = json.dumps({"error": refusal.sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _cookie(headers: Mapping[str, str], name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _split(host: str) -> tuple[str | None, int]:
    """The name and the port of a Host header; a name without a port means port 80."""
    try:
        parts = urlsplit(f"//{host}")
        sound = parts.netloc == host and "@" not in host
        return (parts.hostname if sound else None), 80 if parts.port is None else parts.port
    except ValueError:
        return None, 0


def _is_number(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
