"""A studio that really listens, for as long as a test needs it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette

from manyheads.studio.security import Endpoint
from manyheads.studio.server import bind_endpoint, make_app, make_server


@dataclass(frozen=True)
class LiveServer:
    app: Starlette
    endpoint: Endpoint

    def quiet_within(self, seconds: float) -> bool:
        """Whether nobody waits for the model or uses it before the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.app.state.queue.waiting == 0:
                return True
            time.sleep(0.02)
        return False


@contextmanager
def live_server(
    models: list[tuple[str, Any]], indexes: list[tuple[str, Any]] | None = None
) -> Iterator[LiveServer]:
    endpoint, server_socket = bind_endpoint("127.0.0.1", 0)
    app = make_app(models, endpoint, indexes or [])
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server_socket]}, daemon=True)
    with server_socket:
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield LiveServer(app, endpoint)
        server.should_exit = True
        thread.join(timeout=10)
