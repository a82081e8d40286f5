"""Connections of the studio: slow clients are disconnected, and no address can hold them all."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from manyheads.studio.requests import LIMITS

TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class LimitedProtocol(H11Protocol):
    """HTTP with a time limit for headers and a limit on connections per address.

    A connection too many replaces the oldest one of its address that has no request yet, so that
    slow clients cannot keep out others, even from the same machine.
    """

    opened_at: float
    _deadline: asyncio.TimerHandle | None = None

    @property
    def has_request(self) -> bool:
        """Whether all headers of a request have arrived and its response is not complete."""
        return self.conn.their_state is not h11.IDLE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for headers, and close another connection if there are too many."""
        super().connection_made(transport)
        self.opened_at = self.loop.time()
        self._limit_headers()
        address = self.client and self.client[0]
        own = [
            connection
            for connection in self.connections
            if isinstance(connection, LimitedProtocol)
            and (connection.client and connection.client[0]) == address
        ]
        if len(own) > LIMITS.connections_per_address:
            waiting = [connection for connection in own if not connection.has_request]
            oldest = min(waiting, key=lambda connection: connection.opened_at)
            # A closing connection no longer counts.
            oldest.connections.discard(oldest)
            oldest.transport.close()

    def data_received(self, data: bytes) -> None:
        """Read what has arrived, and start or end the time for headers."""
        super().data_received(data)
        self._limit_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time for headers."""
        super().connection_lost(exc)
        self._cancel_deadline()

    def _limit_headers(self) -> None:
        if self.has_request:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(LIMITS.header_seconds, self._give_up)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if not self.has_request and not self.transport.is_closing():
            self.transport.write(TOO_SLOW)
            self.transport.close()
