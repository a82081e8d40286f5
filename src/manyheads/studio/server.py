"""The studio as a server: the page's files, the questions, and the guard before both."""

import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.studio.handlers import Desk
from manyheads.studio.models import Shelf
from manyheads.studio.queue import Turns
from manyheads.studio.requests import LIMITS
from manyheads.studio.routes import ERRORS, answer_error, routes
from manyheads.studio.security import Door, Guard, is_loopback

SHARED = "manyheads.pictures"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def make_app(models: Sequence[tuple[str, Model]], door: Door) -> Starlette:
    """The whole studio as an ASGI app."""
    turns, naming = Turns(LIMITS.waiting), Turns(LIMITS.waiting, patience=10)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        turns.close()
        naming.close()

    app = Starlette(
        routes=[*_page(), *routes(Desk(Shelf(models)), turns, naming)],
        middleware=[Middleware(Guard, door=door)],
        exception_handlers=dict.fromkeys((*ERRORS, Exception), answer_error),
        lifespan=lifespan,
    )
    # Led from /main.js/ to /main.js, a page would be told of an address that it did not ask.
    app.router.redirect_slashes = False
    app.state.turns = turns
    return app


def open_door(host: str, port: int) -> tuple[Door, socket.socket]:
    """Listen there; port 0 takes any that is free. Elsewhere than on loopback a token is asked."""
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InputError(
            f"nothing can listen at {host}:{port} ({error})", "try --port 0, which takes a free one"
        ) from None
    return Door(host=host, port=listening.getsockname()[1], token=token), listening


def serve(
    models: Sequence[tuple[str, Model]], door: Door, listening: socket.socket, *, browse: bool
) -> None:
    """Answer until Ctrl-C."""
    server = server_of(make_app(models, door))
    # Ctrl-C is how a studio ends, and no failure.
    with suppress(KeyboardInterrupt):
        print(f"studio: {door.address}  (Ctrl-C ends it)", file=sys.stderr, flush=True)
        if browse:
            threading.Timer(0.5, webbrowser.open, (door.address,)).start()
        server.run(sockets=[listening])


def server_of(app: Starlette) -> uvicorn.Server:
    """What speaks HTTP for the app, and no websockets."""
    config = uvicorn.Config(
        app,
        # Our own faults are told by `answer_error`, once; a page that is closed is none.
        log_level="critical",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=2,
        limit_concurrency=200,
    )
    return uvicorn.Server(config)


def _page() -> list[Route]:
    """The files of the page, and those that it shares with the report, read once at the start."""
    folders = [files("manyheads.studio").joinpath("page"), files(SHARED).joinpath("page")]
    found = []
    for file in (each for folder in folders for each in folder.iterdir()):
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in KINDS:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found.append(Route(path, _file(file.read_bytes(), KINDS[suffix]), methods=["GET"]))
    return found


def _file(body: bytes, kind: str) -> Any:
    async def send(_: Request) -> Response:
        return Response(body, headers={"content-type": kind})

    return send
