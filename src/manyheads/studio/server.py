"""The studio as a web server: its page, its JSON API and their errors."""

import asyncio
import json
import logging
import secrets
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from errno import EADDRNOTAVAIL
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from manyheads.errors import InputError, ManyheadsError
from manyheads.models.build import Model
from manyheads.studio import requests
from manyheads.studio.circuits import CircuitHandlers
from manyheads.studio.connections import LimitedProtocol
from manyheads.studio.models import ModelStore
from manyheads.studio.queue import RequestQueue
from manyheads.studio.requests import LIMITS, DisconnectedError, RequestBody, RequestError
from manyheads.studio.run_cache import IsCancelled
from manyheads.studio.security import Endpoint, SecurityMiddleware, is_loopback

if TYPE_CHECKING:
    from manyheads.studio.search import SearchHandlers
    from manyheads.tasks.search.index import Index

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What can go wrong while a request is read or answered; any other error is a bug.
ERRORS = (
    RequestError,
    ManyheadsError,
    DisconnectedError,
    ClientDisconnect,
    HTTPException,
    MemoryError,
)
# The methods of `Handlers` that answer a request with JSON, by their addresses.
POSTS = (
    *("tokens", "token_count", "statistics", "predictions", "patching", "comparison"),
    *("attention_from", "attention_to", "attention_rows", "attention_map"),
    *("explain_layer", "explain_batch"),
    *("why_lens", "why_parts", "why_places", "why_link"),
    *("circuit_words", "circuit_suggestion"),
)
LOG = logging.getLogger("manyheads.studio")

Handler = Callable[[RequestBody, IsCancelled], Any]
ReportingHandler = Callable[[RequestBody, Callable[[float], None], IsCancelled], dict[str, Any]]
Respond = Callable[[Request], Awaitable[Response]]


def make_app(
    models: Sequence[tuple[str, Model]],
    endpoint: Endpoint,
    indexes: Sequence[tuple[str, "Index"]] = (),
) -> Starlette:
    """The studio as an ASGI app; with indexes it has a page to search them."""
    handlers, search = CircuitHandlers(ModelStore(models)), None
    if indexes:
        from manyheads.studio.search import SearchHandlers

        search = SearchHandlers(indexes)
    queue = RequestQueue(LIMITS.queued)
    # Kinds of heads and circuits take long, so they have threads of their own with low priority.
    kinds_queue, circuit_queue = (RequestQueue(LIMITS.queued, niceness=10) for _ in range(2))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        for thread in (queue, kinds_queue, circuit_queue):
            thread.close()

    app = Starlette(
        routes=[
            *_page_routes(),
            *_api_routes(handlers, search, queue, kinds_queue, circuit_queue),
        ],
        middleware=[Middleware(SecurityMiddleware, endpoint=endpoint)],
        exception_handlers=dict.fromkeys((*ERRORS, Exception), error_response),
        lifespan=lifespan,
    )
    # A redirect from /main.js/ to /main.js would confirm that the file exists.
    app.router.redirect_slashes = False
    app.state.queue = queue
    return app


def bind_endpoint(host: str, port: int) -> tuple[Endpoint, socket.socket]:
    """Listen on an address; port 0 takes a free one. Outside loopback a token is required."""
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    server_socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server_socket.bind((host, port))
    except (OSError, OverflowError) as error:
        server_socket.close()
        remedy = "use --port 0 for any free port"
        if isinstance(error, socket.gaierror) or getattr(error, "errno", 0) == EADDRNOTAVAIL:
            remedy = "use --host 127.0.0.1 for this machine, or 0.0.0.0 for the whole network"
        raise InputError(f"cannot listen on {host}:{port} ({error})", remedy) from None
    return Endpoint(host=host, port=server_socket.getsockname()[1], token=token), server_socket


def serve(
    models: Sequence[tuple[str, Model]],
    endpoint: Endpoint,
    server_socket: socket.socket,
    *,
    open_browser: bool,
    indexes: Sequence[tuple[str, "Index"]] = (),
) -> None:
    """Answer requests until Ctrl-C."""
    server = make_server(make_app(models, endpoint, indexes))
    with _stopped_by_ctrl_c(server):
        addresses = "\n        ".join(endpoint.urls)
        print(f"studio: {addresses}  (Ctrl-C to stop)", file=sys.stderr, flush=True)
        if open_browser:
            threading.Timer(0.5, webbrowser.open, (endpoint.local_url,)).start()
        server.run(sockets=[server_socket])


@contextmanager
def _stopped_by_ctrl_c(server: uvicorn.Server) -> Iterator[None]:
    """Ctrl-C stops the server, also before it runs.

    An exception would not do: what the server imports when it starts may swallow it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, server.handle_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def make_server(app: Starlette) -> uvicorn.Server:
    """An HTTP server for the app, without websockets."""
    config = uvicorn.Config(
        app,
        # `error_response` logs our own errors.
        log_level="critical",
        access_log=False,
        server_header=False,
        ws="none",
        http=LimitedProtocol,
        timeout_graceful_shutdown=2,
        limit_concurrency=200,
    )
    return uvicorn.Server(config)


async def error_response(_: Request, error: Exception) -> Response:
    """The error as JSON; unexpected ones are logged, and the page does not see their details."""
    status, message = _describe_error(error)
    if status == 500:
        LOG.error("a request failed", exc_info=error)
    # What is left of a body that was given up is not read.
    headers = {"connection": "close"} if status in (408, 413) else None
    return JSONResponse({"error": message}, status_code=status, headers=headers)


def _describe_error(error: Exception) -> tuple[int, str]:
    match error:
        case RequestError():
            return error.status, error.message
        case ManyheadsError():
            return 422, str(error)
        case DisconnectedError() | ClientDisconnect():
            return requests.CLIENT_CLOSED_REQUEST, "The client has disconnected."
        case HTTPException(status_code=405):
            return 405, "This address does not allow this method."
        case HTTPException(status_code=404):
            return 404, "There is nothing at this address."
        case HTTPException():
            return error.status_code, "The request cannot be read."
        case MemoryError():
            return 503, "There is not enough memory: use a shorter text."
        case _:
            return 500, "The request failed: see the terminal of the studio."


def _page_routes() -> list[Route]:
    """The files of the page, and those that it shares with the report, read once at the start."""
    package = files("manyheads")
    contents = {}
    for room in ("studio", "pictures"):
        for file in package.joinpath(room, "page").iterdir():
            content_type = CONTENT_TYPES.get("." + file.name.rpartition(".")[2])
            if content_type is not None:
                path = "/" if file.name == "index.html" else f"/{file.name}"
                contents[path] = file.read_bytes(), {"content-type": content_type}

    async def respond(request: Request) -> Response:
        content, headers = contents[request.url.path]
        return Response(content, headers=headers)

    return [Route(path, respond, methods=["GET"]) for path in contents]


def _api_routes(
    handlers: CircuitHandlers,
    search: "SearchHandlers | None",
    queue: RequestQueue,
    kinds_queue: RequestQueue,
    circuit_queue: RequestQueue,
) -> list[Route]:
    """One address per request; bodies and responses are JSON objects."""

    async def models(_: Request) -> Response:
        indexes = [] if search is None else search.describe()
        return JSONResponse(handlers.models() | {"indexes": indexes})

    async def kinds_progress(_: Request) -> Response:
        return JSONResponse(handlers.kinds_progress())

    by_name: dict[str, Handler] = {name: getattr(handlers, name) for name in POSTS}
    if search is not None:
        by_name |= {"search": search.search, "explain_match": search.explain_match}
    posts = {name: _json_response(handler, queue) for name, handler in by_name.items()}
    posts["kinds"] = _json_response(handlers.kinds, kinds_queue)
    posts["generate"] = _stream_response(handlers.generation, queue)
    posts["worth"] = _stream_response(handlers.worth, queue)
    posts["circuit"] = _progress_response(handlers.circuit, circuit_queue)
    posts["circuit_evaluation"] = _json_response(handlers.circuit_evaluation, circuit_queue)
    return [
        Route("/api/models", models, methods=["GET"]),
        Route("/api/kinds_progress", kinds_progress, methods=["GET"]),
        *(Route(f"/api/{name}", respond, methods=["POST"]) for name, respond in posts.items()),
    ]


def _json_response(handler: Handler, queue: RequestQueue) -> Respond:
    async def respond(request: Request) -> Response:
        body = await _read_body(request)
        async with _watch_disconnect(request) as disconnected:
            return JSONResponse(await queue.run(_bind(handler, body), disconnected))

    return respond


def _stream_response(handler: Handler, queue: RequestQueue) -> Respond:
    """Generated tokens, or heads, as they come: a JSON object per line, until the page is closed.

    The handler returns an object with `step`, which returns None at the end, and `finish`.
    """

    async def respond(request: Request) -> Response:
        body = await _read_body(request)
        disconnected = threading.Event()
        work = await queue.run(_bind(handler, body), disconnected)

        async def lines() -> AsyncIterator[str]:
            try:
                while (line := await queue.run(work.step, disconnected)) is not None:
                    yield _json_line(line)
                yield _json_line({"done": True} | work.finish())
            except DisconnectedError:
                return
            except Exception as error:
                yield _error_line(error)
            finally:
                disconnected.set()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return respond


def _progress_response(handler: ReportingHandler, queue: RequestQueue) -> Respond:
    """How far the work is, a JSON object per line, and at last its result.

    The handler is not in inference mode, since it may need gradients.
    """

    async def respond(request: Request) -> Response:
        body = await _read_body(request)
        disconnected = threading.Event()
        loop = asyncio.get_running_loop()
        fractions: asyncio.Queue[float | None] = asyncio.Queue()

        def report(fraction: float) -> None:
            loop.call_soon_threadsafe(fractions.put_nowait, fraction)

        def finish(task: asyncio.Task[Any]) -> None:
            # Mark the exception as retrieved even if the page is closed.
            if not task.cancelled():
                task.exception()
            fractions.put_nowait(None)

        async def lines() -> AsyncIterator[str]:
            work = partial(handler, body, report)
            task = asyncio.create_task(queue.run(work, disconnected))
            task.add_done_callback(finish)
            try:
                while (fraction := await fractions.get()) is not None:
                    yield _json_line({"fraction": round(fraction, 3)})
                yield _json_line({"done": True} | task.result())
            except DisconnectedError:
                return
            except Exception as error:
                yield _error_line(error)
            finally:
                disconnected.set()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return respond


async def _read_body(request: Request) -> RequestBody:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(415, "The content type must be application/json.")
    return requests.parse_body(await request.body())


@asynccontextmanager
async def _watch_disconnect(request: Request) -> AsyncIterator[threading.Event]:
    """An event that is set when the client disconnects."""
    disconnected = threading.Event()

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        disconnected.set()

    task = asyncio.create_task(wait())
    try:
        yield disconnected
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _bind(handler: Handler, body: RequestBody) -> Callable[[IsCancelled], Any]:
    def work(cancelled: IsCancelled) -> Any:
        with torch.inference_mode():
            return handler(body, cancelled)

    return work


def _error_line(error: Exception) -> str:
    if not isinstance(error, RequestError | ManyheadsError):
        LOG.error("a stream failed", exc_info=error)
    return _json_line({"error": _describe_error(error)[1]})


def _json_line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
