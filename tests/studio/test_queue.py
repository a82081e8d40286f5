"""One model call at a time, for everybody, and none for those who left."""

import asyncio
import gc
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from manyheads.studio.generation import WatchedGeneration
from manyheads.studio.queue import RequestQueue
from manyheads.studio.requests import DisconnectedError, RequestError
from manyheads.studio.run_cache import IsCancelled
from tests.studio import models
from tests.studio.live_server import LiveServer, live_server

TEXT = "The cat sat on the mat and the dog sat on the log"


def post(endpoint: Any, name: str, body: dict[str, Any]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", f"/api/{name}", json.dumps({"model": "tiny", **body}), headers)
    answer = connection.getresponse()
    response = answer.status, answer.read().decode()
    connection.close()
    return response


@pytest.fixture(scope="module")
def studio() -> Any:
    with live_server([("tiny", models.decoder())]) as result:
        yield result


def test_cancelled_work_leaves_no_warning() -> None:
    complaints: list[Any] = []

    async def given_up() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, response: complaints.append(response)
        )
        queue, started = RequestQueue(max_waiting=2), threading.Event()

        def work(cancelled: IsCancelled) -> None:
            started.set()
            while not cancelled():
                time.sleep(0.001)
            raise DisconnectedError

        taken = asyncio.create_task(queue.run(work, threading.Event()))
        while not started.is_set():
            await asyncio.sleep(0.001)
        taken.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taken
        queue.close()
        del taken
        gc.collect()

    asyncio.run(given_up())
    assert not complaints


def test_two_at_work_never_meet() -> None:
    queue, inside, most = RequestQueue(max_waiting=8), 0, 0

    def work(cancelled: IsCancelled) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        assert not cancelled()
        time.sleep(0.01)
        inside -= 1

    async def crowd() -> None:
        await asyncio.gather(*(queue.run(work, threading.Event()) for _ in range(6)))

    asyncio.run(crowd())
    assert most == 1
    assert queue.waiting == 0


def test_whoever_left_while_waiting_is_skipped() -> None:
    queue, ran = RequestQueue(max_waiting=8), []

    async def line() -> None:
        first, gone = threading.Event(), threading.Event()
        slow = asyncio.create_task(queue.run(lambda _: time.sleep(0.1), first))
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(queue.run(lambda _: ran.append(1), gone))
        await asyncio.sleep(0.02)
        gone.set()
        await slow
        with pytest.raises(DisconnectedError):
            await waiting

    asyncio.run(line())
    assert ran == []


def test_a_cancelled_caller_stops_the_work() -> None:
    queue, ended = RequestQueue(max_waiting=8), threading.Event()

    def work(cancelled: IsCancelled) -> None:
        while not cancelled():
            time.sleep(0.005)
        ended.set()

    async def leave() -> None:
        task = asyncio.create_task(queue.run(work, threading.Event()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The next in line is served.
        assert await queue.run(lambda _: 5, threading.Event()) == 5

    asyncio.run(leave())
    assert ended.is_set()


def test_a_line_that_is_too_long_is_closed() -> None:
    queue = RequestQueue(max_waiting=1)

    async def crowd() -> None:
        first = asyncio.create_task(queue.run(lambda _: time.sleep(0.1), threading.Event()))
        await asyncio.sleep(0.02)
        with pytest.raises(RequestError, match="try again soon"):
            await queue.run(lambda _: None, threading.Event())
        await first

    asyncio.run(crowd())


def test_two_users_at_once_get_their_own_answers(studio: LiveServer) -> None:
    alone = {
        at: post(
            studio.endpoint, "attention_from", {"text": TEXT, "heads": ["L0H0"], "position": at}
        )
        for at in range(4)
    }
    off = {"text": TEXT, "edits": {"ablated": ["L0H0"]}}
    answered = post(studio.endpoint, "predictions", off)
    with ThreadPoolExecutor(6) as crowd:
        looks = [
            crowd.submit(
                post,
                studio.endpoint,
                "attention_from",
                {"text": TEXT, "heads": ["L0H0"], "position": at % 4},
            )
            for at in range(12)
        ]
        answers = [crowd.submit(post, studio.endpoint, "predictions", off) for _ in range(6)]
        writes = [
            crowd.submit(post, studio.endpoint, "generate", {"text": TEXT, "max_new_tokens": 8})
            for _ in range(3)
        ]
    for at, look in enumerate(looks):
        assert look.result() == alone[at % 4]
    assert {each.result() for each in answers} == {answered}
    assert len({each.result() for each in writes}) == 1
    assert writes[0].result()[0] == 200
    assert studio.quiet_within(5)


def test_others_get_their_turn_while_a_text_is_written(studio: LiveServer) -> None:
    connection = http.client.HTTPConnection(studio.endpoint.host, studio.endpoint.port, timeout=60)
    body = json.dumps({"model": "tiny", "text": TEXT, "max_new_tokens": 400, "temperature": 1.0})
    connection.request("POST", "/api/generate", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert json.loads(answer.readline())["position"] > 0
    status, _ = post(studio.endpoint, "tokens", {"text": "Another text of another user"})
    assert status == 200
    # The writing went on meanwhile and is not over yet.
    assert json.loads(answer.readline())["position"] > 0
    connection.close()
    assert studio.quiet_within(10)


def test_a_tab_closed_in_mid_writing_leaves_the_server_well(
    studio: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = [], WatchedGeneration.step

    def counted(self: WatchedGeneration, cancelled: IsCancelled) -> Any:
        steps.append(1)
        return step(self, cancelled)

    monkeypatch.setattr(WatchedGeneration, "step", counted)
    for _ in range(3):
        connection = http.client.HTTPConnection(
            studio.endpoint.host, studio.endpoint.port, timeout=60
        )
        body = json.dumps({"model": "tiny", "text": TEXT, "max_new_tokens": 512, "heads": ["L1H1"]})
        connection.request("POST", "/api/generate", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        connection.close()
        answer.close()
    assert studio.quiet_within(10)
    assert 3 <= len(steps) < 3 * 512 / 2
    status, response = post(studio.endpoint, "generate", {"text": TEXT, "max_new_tokens": 2})
    assert status == 200
    assert json.loads(response.splitlines()[-1])["done"]


def test_a_generation_that_is_stopped_leaves_no_complaint(
    studio: LiveServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for pause in (0.0, 0.01, 0.02, 0.03):
        connection = http.client.HTTPConnection(
            studio.endpoint.host, studio.endpoint.port, timeout=60
        )
        body = json.dumps({"model": "tiny", "text": TEXT, "max_new_tokens": 512, "heads": ["L1H1"]})
        connection.request("POST", "/api/generate", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        time.sleep(pause)
        connection.close()
        answer.close()
    assert studio.quiet_within(10)
    gc.collect()
    # A future whose exception nobody reads complains when it is collected: logging without a
    # handler writes to stderr.
    assert capfd.readouterr() == ("", "")


def test_a_question_that_nobody_waits_for_is_dropped(studio: LiveServer) -> None:
    connection = http.client.HTTPConnection(studio.endpoint.host, studio.endpoint.port, timeout=60)
    body = json.dumps({"model": "tiny", "text": models.WORDS * 60})
    connection.request("POST", "/api/tokens", body, {"content-type": "application/json"})
    connection.close()
    assert studio.quiet_within(20)
    assert post(studio.endpoint, "tokens", {"text": TEXT})[0] == 200
