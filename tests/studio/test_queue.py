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
from manyheads.studio.kept_run import Stopped
from manyheads.studio.queue import Turns
from manyheads.studio.requests import LeftError, RefusedError
from tests.studio import models
from tests.studio.running import Running, running

TEXT = "The cat sat on the mat and the dog sat on the log"


def post(door: Any, name: str, body: dict[str, Any]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(door.host, door.port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", f"/api/{name}", json.dumps({"model": "tiny", **body}), headers)
    answer = connection.getresponse()
    told = answer.status, answer.read().decode()
    connection.close()
    return told


@pytest.fixture(scope="module")
def studio() -> Any:
    with running([("tiny", models.decoder())]) as found:
        yield found


def test_work_that_is_given_up_leaves_no_complaint() -> None:
    complaints: list[Any] = []

    async def given_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        turns, started = Turns(waiting=2), threading.Event()

        def work(stopped: Stopped) -> None:
            started.set()
            while not stopped():
                time.sleep(0.001)
            raise LeftError

        taken = asyncio.create_task(turns.take(work, threading.Event()))
        while not started.is_set():
            await asyncio.sleep(0.001)
        taken.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taken
        turns.close()
        del taken
        gc.collect()

    asyncio.run(given_up())
    assert not complaints


def test_two_at_work_never_meet() -> None:
    turns, inside, most = Turns(waiting=8), 0, 0

    def work(stopped: Stopped) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        assert not stopped()
        time.sleep(0.01)
        inside -= 1

    async def crowd() -> None:
        await asyncio.gather(*(turns.take(work, threading.Event()) for _ in range(6)))

    asyncio.run(crowd())
    assert most == 1
    assert turns.waiting == 0


def test_whoever_left_while_waiting_is_passed_over() -> None:
    turns, ran = Turns(waiting=8), []

    async def line() -> None:
        first, gone = threading.Event(), threading.Event()
        slow = asyncio.create_task(turns.take(lambda _: time.sleep(0.1), first))
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(turns.take(lambda _: ran.append(1), gone))
        await asyncio.sleep(0.02)
        gone.set()
        await slow
        with pytest.raises(LeftError):
            await waiting

    asyncio.run(line())
    assert ran == []


def test_a_cancelled_caller_stops_the_work() -> None:
    turns, ended = Turns(waiting=8), threading.Event()

    def work(stopped: Stopped) -> None:
        while not stopped():
            time.sleep(0.005)
        ended.set()

    async def leave() -> None:
        task = asyncio.create_task(turns.take(work, threading.Event()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The next in line is served.
        assert await turns.take(lambda _: 5, threading.Event()) == 5

    asyncio.run(leave())
    assert ended.is_set()


def test_a_line_that_is_too_long_is_closed() -> None:
    turns = Turns(waiting=1)

    async def crowd() -> None:
        first = asyncio.create_task(turns.take(lambda _: time.sleep(0.1), threading.Event()))
        await asyncio.sleep(0.02)
        with pytest.raises(RefusedError, match="try again soon"):
            await turns.take(lambda _: None, threading.Event())
        await first

    asyncio.run(crowd())


def test_two_users_at_once_get_what_each_asked_for(studio: Running) -> None:
    alone = {
        at: post(studio.door, "look", {"text": TEXT, "heads": ["L0H0"], "at": at})
        for at in range(4)
    }
    off = {"text": TEXT, "edit": {"off": ["L0H0"]}}
    answered = post(studio.door, "answers", off)
    with ThreadPoolExecutor(6) as crowd:
        looks = [
            crowd.submit(post, studio.door, "look", {"text": TEXT, "heads": ["L0H0"], "at": at % 4})
            for at in range(12)
        ]
        answers = [crowd.submit(post, studio.door, "answers", off) for _ in range(6)]
        writes = [
            crowd.submit(post, studio.door, "write", {"text": TEXT, "max_new_tokens": 8})
            for _ in range(3)
        ]
    for at, look in enumerate(looks):
        assert look.result() == alone[at % 4]
    assert {each.result() for each in answers} == {answered}
    assert len({each.result() for each in writes}) == 1
    assert writes[0].result()[0] == 200
    assert studio.quiet_within(5)


def test_others_get_their_turn_while_a_text_is_written(studio: Running) -> None:
    connection = http.client.HTTPConnection(studio.door.host, studio.door.port, timeout=60)
    body = json.dumps({"model": "tiny", "text": TEXT, "max_new_tokens": 400, "temperature": 1.0})
    connection.request("POST", "/api/write", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert json.loads(answer.readline())["at"] > 0
    status, _ = post(studio.door, "read", {"text": "Another text of another user"})
    assert status == 200
    # The writing went on meanwhile and is not over yet.
    assert json.loads(answer.readline())["at"] > 0
    connection.close()
    assert studio.quiet_within(10)


def test_a_tab_closed_in_mid_writing_leaves_the_server_well(
    studio: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = [], WatchedGeneration.step

    def counted(self: WatchedGeneration, stopped: Stopped) -> Any:
        steps.append(1)
        return step(self, stopped)

    monkeypatch.setattr(WatchedGeneration, "step", counted)
    for _ in range(3):
        connection = http.client.HTTPConnection(studio.door.host, studio.door.port, timeout=60)
        body = json.dumps({"model": "tiny", "text": TEXT, "max_new_tokens": 512, "heads": ["L1H1"]})
        connection.request("POST", "/api/write", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        connection.close()
        answer.close()
    assert studio.quiet_within(10)
    assert 3 <= len(steps) < 3 * 512 / 2
    status, told = post(studio.door, "write", {"text": TEXT, "max_new_tokens": 2})
    assert status == 200
    assert json.loads(told.splitlines()[-1])["done"]


def test_a_question_that_nobody_waits_for_is_dropped(studio: Running) -> None:
    connection = http.client.HTTPConnection(studio.door.host, studio.door.port, timeout=60)
    body = json.dumps({"model": "tiny", "text": models.WORDS * 60})
    connection.request("POST", "/api/read", body, {"content-type": "application/json"})
    connection.close()
    assert studio.quiet_within(20)
    assert post(studio.door, "read", {"text": TEXT})[0] == 200
