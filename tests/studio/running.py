"""A studio that really listens, for as long as a test needs it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette

from manyheads.studio.security import Door
from manyheads.studio.server import make_app, open_door, server_of


@dataclass(frozen=True)
class Running:
    app: Starlette
    door: Door

    def quiet_within(self, seconds: float) -> bool:
        """Whether nobody waits for the model or uses it before the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.app.state.turns.waiting == 0:
                return True
            time.sleep(0.02)
        return False


@contextmanager
def running(models: list[tuple[str, Any]]) -> Iterator[Running]:
    door, listening = open_door("127.0.0.1", 0)
    app = make_app(models, door)
    server = server_of(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    with listening:
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield Running(app, door)
        server.should_exit = True
        thread.join(timeout=10)
