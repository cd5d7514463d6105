"""A headless Chromium, controlled by its own protocol through a pipe, to test pages as people see them."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--renderer-process-limit=1",
    "--disable-features=SpareRendererForSitePerProcess,BackForwardCache",
    "--remote-debugging-pipe",
)


def chromium() -> str | None:
    """Return Chromium's path, or None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Page:
    """One page of a browser."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """All requests, messages and errors."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; return its answer."""
        self._calls += 1
        command: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        until = time.monotonic() + 30
        while True:
            message = self._next(until)
            if message.get("id") == self._calls:
                assert "error" not in message, f"{method}: {message['error']['message']}"
                result: dict[str, Any] = message["result"]
                return result
            if "method" in message:
                self.events.append(message)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._answers, 1 << 16)
            assert read, "the browser has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        return event

    def open(self, url: str, width: int = 1100, height: int = 800, scheme: str = "light") -> None:
        """Open a page on a screen of the given size in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.goto(url)

    def goto(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        since = len(self.events)
        self.call("Page.navigate", url=url)
        until = time.monotonic() + 30
        while not any(event["method"] == "Page.loadEventFired" for event in self.events[since:]):
            self.events.append(self._next(until))

    def js(self, expression: str) -> Any:
        """Return the value of an expression; await it if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the visible text of an element in one line; empty if it is hidden."""
        seen = f"(e => e?.checkVisibility() ? e.innerText : '')(document.querySelector({selector!r}))"
        return " ".join(str(self.js(seen)).split())

    def until(self, expression: str, seconds: float = 30.0) -> None:
        """Wait for an expression to become true."""
        end = time.monotonic() + seconds
        while not self.js(f"!!({expression})"):
            assert time.monotonic() < end, f"{expression}: not within {seconds} s; {self.js('document.body.innerText')}"
            time.sleep(0.05)

    def screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Yield a page of a new browser, which ends with the block. Raises AssertionError if it does not start."""
    path = chromium()
    assert path is not None, "no chromium"
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    shell = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
    process = subprocess.Popen(
        ["bash", "-c", shell, path, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(read_commands, write_answers),
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(profile)},
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Page(commands, answers)
    finally:
        os.close(commands)  # the browser then ends
        os.close(answers)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
