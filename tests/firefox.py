"""Firefox by its own protocol, Marionette, where the system has it: pages are opened and read."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATH = shutil.which("firefox-esr") or shutil.which("firefox")
needs_firefox = pytest.mark.skipif(PATH is None, reason="there is no Firefox here")
START_SECONDS = 60.0


class Firefox:
    """One window. Messages are arrays of type, number, command and arguments."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rwb")
        self._number = 0
        self._receive()
        self._send("WebDriver:NewSession", {"capabilities": {"alwaysMatch": {}}})

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        self._send("WebDriver:SetWindowRect", {"width": width, "height": height})
        self._send("WebDriver:Navigate", {"url": url})

    def run(self, script: str) -> Any:
        """The value that the script returns in the page."""
        arguments: dict[str, Any] = {"script": script, "args": [], "sandbox": None}
        return self._send("WebDriver:ExecuteScript", arguments)["value"]

    def enter_frame(self, number: int) -> None:
        """Scripts run in that frame of the page from now on."""
        self._send("WebDriver:SwitchToFrame", {"id": number})

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Until the expression is true in the page."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"still not: {condition}"
            time.sleep(0.1)

    def errors(self, of: str) -> list[str]:
        """What the scripts of such addresses have raised, and what a policy has blocked."""
        self._send("Marionette:SetContext", {"value": "chrome"})
        messages: list[str] = self.run(
            "return Services.console.getMessageArray().filter((each) => "
            f"each instanceof Ci.nsIScriptError && each.sourceName.startsWith({json.dumps(of)}) "
            "&& !(each.flags & each.warningFlag)).map(String)"
        )
        self._send("Marionette:SetContext", {"value": "content"})
        return messages

    def _send(self, command: str, arguments: dict[str, Any]) -> Any:
        self._number += 1
        message = json.dumps([0, self._number, command, arguments]).encode()
        self._stream.write(b"%d:%s" % (len(message), message))
        self._stream.flush()
        _, _, error, result = self._receive()
        assert error is None, error
        return result

    def _receive(self) -> Any:
        length = b""
        while (digit := self._stream.read(1)) != b":":
            assert digit, "Firefox has ended"
            length += digit
        return json.loads(self._stream.read(int(length)))


@contextmanager
def launch_firefox(folder: Path) -> Iterator[Firefox]:
    """A browser with a new profile in that folder."""
    assert PATH is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "user.js").write_text(f'user_pref("marionette.port", {port});\n')
    command = [PATH, "--headless", "--marionette", "-remote-allow-system-access", "--no-remote"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [*command, "--profile", str(folder)], stdout=quiet, stderr=quiet
    ) as process:
        try:
            with _connect(port) as connection:
                yield Firefox(connection)
        finally:
            process.terminate()


def _connect(port: int) -> socket.socket:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
