"""Requests that end early, and the server's end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import mlx.core as mx
import openai
import pytest

import eagle_mlx as em
from eagle_mlx.errors import TargetError
from eagle_mlx.plan import RoundResult
from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.model import Loaded
from tests.fakes import tiny_target_folder
from tests.full import in_full
from tests.serve.api.live import DEPTH, NAME, Live, engine, live, wide

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
ASK = {"role": "user", "content": "x"}
POISON = 4000
"""A token after which the poisoned model's logits are NaN."""


def poisoned() -> Loaded:
    made = engine()
    base = type(made.target.model)

    def call(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out: mx.array = base.__call__(self, inputs, *args, **kwargs)
        return mx.where((inputs == POISON)[..., None], mx.array(float("nan")), out)

    made.target.model.__class__ = type("Poisoned", (base,), {"__call__": call})
    return Loaded(made, "ngram", DEPTH)


class Held:
    """A stream that has started."""

    def __init__(self, answer: httpx.Response):
        self.answer, self._pieces = answer, answer.iter_text()
        self._text = next(self._pieces)

    def rest(self) -> str:
        return self._text + "".join(self._pieces)


def hold(server: Live, count: int, tokens: int = 400) -> list[Held]:
    """Open streams that do not end, or soon if a test reads them to their end."""
    held = []
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    for _ in range(count):
        request = server.http.build_request("POST", "/v1/chat/completions", json=body)
        answer = server.http.send(request, stream=True)
        assert answer.status_code == 200
        held.append(Held(answer))
    return held


def test_a_client_that_leaves_a_stream_frees_its_rows(server: Live) -> None:
    with server.slowed(0.01):
        held = hold(server, 3)
        server.until(lambda: server.service.running > 0)
        for stream in held:
            stream.answer.close()
        assert not server.idle
    assert server.until(lambda: server.idle) < 1.0
    assert server.service.totals.requests["cancelled"] >= 3


def test_the_tokens_of_a_request_that_is_cancelled_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "eagle_mlx.serve")
    with live() as server:
        with server.slowed(0.01):
            [stream] = hold(server, 1)
            server.until(lambda: server.service.totals.emitted > 10)
            stream.answer.close()
        server.until(lambda: server.idle)
        totals = server.service.totals
    [line] = [message for message in caplog.messages if message.startswith("request ")]
    count = re.search(r" cancelled: (\d+) prompt tokens \(0 cached\), (\d+) tokens, ", line)
    assert count is not None
    assert int(count[1]) == totals.prompt_tokens > 0
    assert 0 < int(count[2]) <= totals.emitted


def test_a_client_that_leaves_before_its_answer_frees_its_row(server: Live) -> None:
    before = server.service.totals.requests["cancelled"]
    for path, body in [
        (COMPLETIONS, {**LONG, "n": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}),
    ]:
        client = httpx.Client(base_url=server.base, timeout=0.5)
        with server.slowed(0.01), pytest.raises(httpx.ReadTimeout):
            client.post(path, json=body)
        client.close()
        assert server.until(lambda: server.idle) < 1.0
    assert server.service.totals.requests["cancelled"] == before + 2


def test_many_clients_of_which_some_leave() -> None:
    rng = random.Random(0)
    with live(settings=wide(Limits(queue=24))) as server:

        async def one(client: httpx.AsyncClient) -> str:
            body = {"prompt": "x" * rng.randint(1, 40), "max_tokens": rng.randint(1, 30), "stream": rng.random() < 0.5}
            leaves = rng.random() < 0.3
            try:
                async with asyncio.timeout(rng.random() / 5 if leaves else 60):
                    answer = await client.post(COMPLETIONS, json=body)
            except TimeoutError:
                assert leaves
                return "left"
            assert answer.status_code in (200, 429), answer.text
            if answer.status_code == 429:
                assert answer.headers["retry-after"]
            elif body["stream"]:
                assert answer.text.endswith("data: [DONE]\n\n")
                assert "error" not in answer.text
            return str(answer.status_code)

        async def many() -> list[str]:
            limits = httpx.Limits(max_connections=64)
            async with httpx.AsyncClient(base_url=server.base, timeout=60, limits=limits) as client:
                return await asyncio.gather(*(one(client) for _ in range(in_full(160, 80))))

        ended = Counter(asyncio.run(many()))
        assert set(ended) == {"200", "429", "left"}
        assert server.until(lambda: server.idle) < 1.0
        assert server.service.totals.requests["failed"] == 0
        assert server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3}).status_code == 200


def breakable(engine: em.Engine) -> Event:
    """Return an event. When set, the next step raises and clears it."""
    broken, observer = Event(), engine.observer

    def fail(result: RoundResult) -> None:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("a bolt is loose")
        assert observer is not None
        observer(result)

    engine.observer = fail
    return broken


def test_a_failing_step_ends_only_its_requests() -> None:
    with live() as server:
        loaded = server.service.worker.loaded
        assert loaded is not None
        broken = breakable(loaded.engine)
        broken.set()
        answer = server.http.post(COMPLETIONS, json=LONG)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "a bolt is loose" in answer.json()["error"]["message"]
        with server.slowed():
            held = hold(server, 1)[0]
            broken.set()
        events = held.rest().split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"]["type"] == "server_error"
        assert events[-2] == "data: [DONE]"
        assert server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3}).status_code == 200
        assert server.service.totals.requests["failed"] == 2


def test_waiting_requests_survive_a_failing_step() -> None:
    with live() as server, ThreadPoolExecutor(1) as pool:
        loaded = server.service.worker.loaded
        assert loaded is not None
        made, broken = loaded.engine, breakable(loaded.engine)
        with server.slowed(0.02):
            held = hold(server, made.max_batch)
            server.until(lambda: made.active == made.max_batch)
            waiting = pool.submit(server.http.post, COMPLETIONS, json={"prompt": "x", "max_tokens": 3})
            server.until(lambda: made.waiting == 1)
            broken.set()
        assert all("a bolt is loose" in stream.rest() for stream in held)
        assert waiting.result().status_code == 200
        assert server.service.totals.requests["failed"] == made.max_batch


def test_nan_logits_end_only_their_request() -> None:
    with live(poisoned) as server, ThreadPoolExecutor(2) as pool:
        wanted = engine("none").generate(["def f(x):"], em.SamplingParams(max_tokens=60))[0].text
        good: dict[str, Any] = {"prompt": "def f(x):", "max_tokens": 60, "temperature": 0}
        other = pool.submit(server.http.post, COMPLETIONS, json=good)
        answer = server.http.post(COMPLETIONS, json={"prompt": [5, POISON], "max_tokens": 5})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert other.result().json()["choices"][0]["text"] == wanted
        with pytest.raises(openai.APIError, match="NaN"):
            list(server.openai.completions.create(model=NAME, prompt=[5, POISON], max_tokens=5, stream=True))


def test_a_starting_server_reports_it() -> None:
    ready = Event()

    def load() -> Loaded:
        assert ready.wait(20)
        return Loaded(engine(), "ngram", DEPTH)

    with live(load, wait=False) as server:
        health = server.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        answer = server.http.post(COMPLETIONS, json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        assert server.http.get("/metrics").status_code == 200
        ready.set()
        server.until(lambda: server.http.get("/health").status_code == 200)
        assert server.http.get("/health").json() == {"status": "ready"}


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> Loaded:
        raise TargetError("the model is not there")

    with live(load) as server:
        assert isinstance(server.service.worker.failure, TargetError)
        server.until(lambda: server.server.should_exit)


def test_draining_finishes_requests_in_progress() -> None:
    with live() as server:
        with server.slowed():
            held = hold(server, 2, in_full(400, 40))
            server.terminate()
            health = server.http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            answer = server.http.post(COMPLETIONS, json={"prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        for stream in held:
            text = stream.rest()
            assert '"finish_reason":"length"' in text
            assert text.endswith("data: [DONE]\n\n")
        server.until(lambda: server.server.should_exit)


def test_draining_ends_after_its_time_limit() -> None:
    """An answer that is cut is a 503, like a request that is refused: the client may try another server."""
    settings = wide(Limits(queue=60), drain_seconds=0.2)
    with live(settings=settings) as server, server.slowed(0.05), ThreadPoolExecutor(3) as pool:
        whole = [
            pool.submit(server.http.post, COMPLETIONS, json=LONG),
            pool.submit(server.http.post, "/v1/responses", json={"input": "x", "max_output_tokens": 500}),
            pool.submit(server.http.post, "/v1/messages", json={"messages": [ASK], "max_tokens": 500}),
        ]
        server.until(lambda: server.service.running == 3)
        held = hold(server, 6)
        server.terminate()
        for stream in held:
            rest = stream.rest()
            assert '"code":"draining"' in rest
            assert "shutting down" in rest
        for answer in (waiting.result() for waiting in whole):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
            assert answer.json()["error"]["type"] in ("service_unavailable_error", "overloaded_error")
        server.until(lambda: server.server.should_exit, seconds=5)


def test_a_closed_terminal_ends_the_server_like_sigterm(tmp_path: Path) -> None:
    """What it remembers is written, and a second SIGHUP and lines for the closed terminal are no error."""
    target, terminal, its_end = tiny_target_folder(tmp_path / "model"), *os.openpty()
    program = (
        "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # the tests may run under nohup
        "from eagle_mlx.serve.api.cli import command; command()"
    )
    folder = ("--prefix-cache-dir", str(tmp_path / "cache"))
    command = [sys.executable, "-c", program, "--target", str(target), "--spec-decode", "ngram", "--port", "0", *folder]
    with subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True) as process:
        os.close(its_end)
        written = ""
        while (ready := re.search(r"ready: (\S+)\s", written)) is None:
            written += os.read(terminal, 1000).decode()
        stream = {**LONG, "max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{ready[1]}{COMPLETIONS}", json=stream) as answer:
            pieces = answer.iter_text()
            text = next(pieces)
            os.close(terminal)
            process.send_signal(signal.SIGHUP)
            text += "".join(pieces)
        assert text.endswith("data: [DONE]\n\n")
        assert process.wait(timeout=20) == 0
    assert len(list(tmp_path.glob("cache/memory-*.npz"))) == 1


def test_the_command_serves_and_shuts_down(tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path / "model")
    command = [sys.executable, "-m", "eagle_mlx.serve.api.cli", "--target", str(target), "--spec-decode", "ngram"]
    with subprocess.Popen(
        [*command, "--port", "0"], stderr=subprocess.PIPE, text=True, env={**os.environ, "EAGLE_API_KEY": "k"}
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line.strip())
            if line.startswith("ready:"):
                break
        text = "\n".join(lines)
        for word in ("target: ", "speculation: ngram", "blas: ", "context: 512", "memory: ", "model: model"):
            assert word in text
        long = LONG | {"max_tokens": in_full(500, 200)}
        base, headers = lines[-1].removeprefix("ready: "), {"Authorization": "Bearer k"}
        for _ in range(2):
            assert httpx.post(f"{base}/tokenize", json={"prompt": "x"}).status_code == 401
        assert httpx.get(f"{base}/health", headers={"Host": "evil.example"}).status_code == 403
        with httpx.stream("POST", f"{base}{COMPLETIONS}", json=long | {"stream": True}, headers=headers) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in text
        began = time.monotonic()
        assert process.wait(timeout=20) == 0
        assert time.monotonic() - began < 10
        logged = process.stderr.read().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:]+[+-]\d{4} (INFO|WARNING) eagle_mlx.serve: ", line) for line in logged)
    messages = [line.split(": ", 1)[1] for line in logged]
    assert messages.pop().startswith("request ")
    assert messages == [
        "refused with 401: the API key is missing or wrong; client 127.0.0.1",
        "refused with 401: the API key is missing or wrong; client 127.0.0.1",
        "draining: no new requests; those in progress have 30 s",
    ]
