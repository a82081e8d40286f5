"""The addresses that the page asks, and how an answer or an error is told: always as JSON."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from threading import Event
from typing import Any

import torch
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from manyheads.errors import ManyheadsError
from manyheads.studio.generation import WatchedGeneration
from manyheads.studio.handlers import Desk
from manyheads.studio.kept_run import Stopped
from manyheads.studio.queue import Turns
from manyheads.studio.requests import GONE, Asked, LeftError, RefusedError, parse

# What can go wrong while a request is read or answered; any other error is our own.
ERRORS = (RefusedError, ManyheadsError, LeftError, ClientDisconnect, HTTPException, MemoryError)

Work = Callable[[Asked, Stopped], Any]
LOG = logging.getLogger("manyheads.studio")


def routes(desk: Desk, turns: Turns, naming: Turns) -> list[Route]:
    """One address a question; a body and an answer are JSON objects.

    To name the heads of a model takes long and is done once: it has a line of its own, so that
    nobody waits for it who asks something else.
    """

    async def models(_: Request) -> Response:
        return JSONResponse(desk.models())

    questions: dict[str, Work] = {
        "read": desk.read,
        "atlas": desk.atlas,
        "look": desk.look,
        "lookers": desk.lookers,
        "rows": desk.rows,
        "map": desk.map,
        "answers": desk.answers,
        "patch": desk.patch,
    }
    found = [Route("/api/models", models, methods=["GET"])]
    for name, work in questions.items():
        found.append(Route(f"/api/{name}", _question(work, turns), methods=["POST"]))
    found.append(Route("/api/kinds", _question(desk.kinds, naming), methods=["POST"]))
    found.append(Route("/api/write", _writing(desk, turns), methods=["POST"]))
    return found


async def answer_error(_: Request, error: Exception) -> Response:
    """A sentence for whatever went wrong; our own faults go to the log and not to the page."""
    status, sentence = _told(error)
    if status == 500:
        LOG.error("a request failed", exc_info=error)
    return JSONResponse({"error": sentence}, status_code=status)


def _told(error: Exception) -> tuple[int, str]:
    match error:
        case RefusedError():
            return error.status, error.sentence
        case ManyheadsError():
            return 422, str(error)
        case LeftError() | ClientDisconnect():
            return GONE, "Nobody waits for this answer."
        case HTTPException(status_code=405):
            return 405, "This address answers to another method."
        case HTTPException(status_code=404):
            return 404, "There is nothing at this address."
        case HTTPException():
            return error.status_code, "The request cannot be read."
        case MemoryError():
            return 503, "There is not enough memory for this: give a shorter text."
        case _:
            return 500, "The studio failed at this; its terminal says why."


def _question(work: Work, turns: Turns) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        asked = await _asked(request)
        async with _watched(request) as gone:
            return JSONResponse(await turns.take(_resting(work, asked), gone))

    return answer


def _writing(desk: Desk, turns: Turns) -> Callable[[Request], Awaitable[Response]]:
    """Tokens as they come, a JSON object a line; whoever closes the page ends the writing."""

    async def answer(request: Request) -> Response:
        asked = await _asked(request)
        gone = Event()
        writer = await turns.take(_resting(desk.writer, asked), gone)

        async def lines() -> AsyncIterator[str]:
            try:
                while (told := await turns.take(_step(writer), gone)) is not None:
                    yield _line(told)
                yield _line({"done": True, "letters": writer.finish()})
            except (RefusedError, ManyheadsError) as error:
                yield _line({"error": _told(error)[1]})
            except LeftError:
                return
            except Exception as error:
                LOG.error("writing failed", exc_info=error)
                yield _line({"error": _told(error)[1]})
            finally:
                gone.set()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return answer


async def _asked(request: Request) -> Asked:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, "The body must be sent as application/json.")
    return parse(await request.body())


@asynccontextmanager
async def _watched(request: Request) -> AsyncIterator[Event]:
    """An event that is set when whoever asked goes away."""
    gone = Event()

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()

    waiting = asyncio.create_task(wait())
    try:
        yield gone
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting


def _resting(work: Callable[[Asked, Stopped], Any], asked: Asked) -> Callable[[Stopped], Any]:
    def rested(stopped: Stopped) -> Any:
        with torch.inference_mode():
            return work(asked, stopped)

    return rested


def _step(writer: WatchedGeneration) -> Callable[[Stopped], dict[str, Any] | None]:
    def step(stopped: Stopped) -> dict[str, Any] | None:
        return writer.step(stopped)

    return step


def _line(told: dict[str, Any]) -> str:
    return json.dumps(told, ensure_ascii=False, allow_nan=False) + "\n"
