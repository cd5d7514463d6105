"""How answers that take too long end, and who waits for whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Semaphore
from typing import Any

import httpx
import openai
import pytest

from eagle_mlx.serve.api.cli import main
from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.model import Loaded
from tests.serve.api.live import DEPTH, NAME, Live, engine, live, wide

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
CHUNK = 16
LONG = [3 + n % 400 for n in range(100)]


class Gate:
    """Lets an engine make a given number of steps."""

    def __init__(self, server: Live):
        loaded = server.service.worker.loaded
        assert loaded is not None
        self.engine, self._real, self._allowed = loaded.engine, loaded.engine.step, Semaphore(0)

        self.submitted = 0
        """HTTP requests that the engine's thread will see after its current step."""
        self.ended: list[str] = []
        """The clients of ended requests, in order."""

        def step() -> Any:
            self._allowed.acquire()
            ended = self._real()
            self.ended += [request.client for request in ended]
            return ended

        def submit(*job: Any) -> Any:
            made = really_submit(*job)
            self.submitted += 1
            return made

        really_submit, server.service.worker.submit = server.service.worker.submit, submit  # type: ignore[method-assign]
        self.engine.step = step  # type: ignore[method-assign]

    def let(self, steps: int) -> None:
        self._allowed.release(steps)

    def open(self) -> None:
        self.engine.step = self._real  # type: ignore[method-assign]
        self.let(1)


@contextmanager
def gated(max_batch: int = 4, limits: Limits | None = None, **settings: object) -> Iterator[tuple[Live, Gate]]:
    made = engine(max_batch=max_batch, prefill_chunk=CHUNK)
    with live(lambda: Loaded(made, "ngram", DEPTH, {"temperature": 0.0}), wide(limits, **settings)) as server:
        gate = Gate(server)
        try:
            yield server, gate
        finally:
            gate.open()
            gate.let(10_000)


class Stream:
    """A stream that is read step by step."""

    def __init__(self, server: Live, path: str, body: dict[str, Any]):
        self._context = server.http.stream("POST", path, json={**body, "stream": True})
        answer = self._context.__enter__()
        assert answer.status_code == 200, answer.read()
        self._lines = answer.iter_lines()
        self.rest: list[str] = []

    def until(self, sign: str, count: int) -> None:
        """Read until so many lines have this sign."""
        while count:
            self.rest.append(next(self._lines))
            count -= sign in self.rest[-1]

    def events(self) -> list[dict[str, Any]]:
        """Return the data of all events after the end."""
        lines = [*self.rest, *self._lines]
        self._context.__exit__(None, None, None)
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(payload) for payload in data if payload != "[DONE]"]

    def end(self) -> str:
        lines = list(self._lines)
        self._context.__exit__(None, None, None)
        return "\n".join(lines)


def long_bodies() -> dict[str, dict[str, Any]]:
    text = "def f(x): return x + 1; " * 12
    chat = [{"role": "user", "content": text}]
    return {
        COMPLETIONS: {"prompt": LONG, "max_tokens": 3},
        CHAT: {"messages": chat, "max_tokens": 3},
        MESSAGES: {"messages": chat, "max_tokens": 3},
        RESPONSES: {"input": text, "max_output_tokens": 3},
    }


class Clock:
    """A clock that tests advance."""

    def __init__(self, server: Live):
        self.now = 1000.0
        server.service.worker.clock = lambda: self.now


TEXT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}


def test_a_timed_out_answer_ends_with_its_text_so_far() -> None:
    with ThreadPoolExecutor(2) as pool, gated(limits=Limits(request_seconds=30)) as (server, gate):
        clock = Clock(server)
        whole = pool.submit(server.http.post, COMPLETIONS, json=TEXT)
        server.until(lambda: gate.submitted == 1)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True}
        streamed = Stream(server, CHAT, chat)
        gate.let(12)
        server.until(lambda: gate.engine.active == 2 and all(r.tokens for r in gate.engine.snapshot().requests))
        clock.now += 31
        gate.let(1)
        answer = whole.result(30).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["timings"]["cut_off"] == "time"
        assert 0 < answer["usage"]["completion_tokens"] < 400
        text = streamed.end()
        assert '"finish_reason":"length"' in text
        assert '"cut_off":"time"' in text
        assert text.rstrip().endswith("data: [DONE]")
        server.until(lambda: server.idle)
        gate.open()
        count = answer["usage"]["completion_tokens"]
        after = server.http.post(COMPLETIONS, json={**TEXT, "max_tokens": count}).json()
        assert "cut_off" not in after["timings"]
        assert after["choices"][0]["text"] == answer["choices"][0]["text"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_times_out_without_a_token_gets_an_error(streamed: bool) -> None:
    with ThreadPoolExecutor(3) as pool, gated(max_batch=1, limits=Limits(request_seconds=30)) as (server, gate):
        clock = Clock(server)
        held = pool.submit(server.http.post, COMPLETIONS, json={**TEXT, "prompt": LONG})
        server.until(lambda: gate.engine.waiting == 1)
        gate.let(1)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": streamed}
        path = MESSAGES if streamed else CHAT
        waits = pool.submit(server.http.post, path, json=body)
        server.until(lambda: gate.submitted == 2)
        gate.let(1)
        server.until(lambda: gate.engine.waiting == 2)
        clock.now += 31
        gate.let(1)
        for answer in (held.result(30), *(() if streamed else (waits.result(30),))):
            assert answer.status_code == 504
            assert answer.headers["x-should-retry"] == "false"
            assert (answer.json()["error"]["type"], answer.json()["error"]["code"]) == ("timeout_error", "timeout")
        if streamed:
            told = waits.result(30).text.split("\n\n")[-2]
            assert told.startswith("event: error\n")
            assert json.loads(told.split("data: ")[1])["error"]["type"] == "timeout_error"
        server.until(lambda: server.idle and gate.engine.waiting == 0)


def test_official_clients_do_not_retry_after_a_timeout() -> None:
    with ThreadPoolExecutor(1) as pool, gated(limits=Limits(request_seconds=30)) as (server, gate):
        clock = Clock(server)
        client = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=3)
        answer = pool.submit(client.completions.create, model=NAME, prompt=LONG, max_tokens=4)
        server.until(lambda: gate.engine.waiting == 1)
        clock.now += 31
        gate.let(2)
        with pytest.raises(openai.InternalServerError, match="before its first token"):
            answer.result(30)
        server.until(lambda: server.idle)
        assert server.service.totals.requests["failed"] == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES])
def test_a_request_can_limit_its_own_answers_time(path: str) -> None:
    """From its first token; earlier time does not count."""
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    fields: Any = {"input": "x"} if path == RESPONSES else {"messages": [{"role": "user", "content": "x"}]}
    body = {**(TEXT if path == COMPLETIONS else fields), most: 400, "t_max_predict_ms": 2000}
    with ThreadPoolExecutor(1) as pool, gated() as (server, gate):
        clock = Clock(server)
        answer = pool.submit(server.http.post, path, json=body)
        server.until(lambda: gate.engine.waiting == 1)
        clock.now += 1000
        gate.let(6)
        server.until(lambda: any(request.tokens for request in gate.engine.snapshot().requests))
        server.until(lambda: any(slot.deadline < 1e9 for slot in server.service.worker.slots))
        assert not answer.done()
        clock.now += 3
        gate.let(6)
        told = answer.result(30).json()
        assert told["timings"]["cut_off"] == "time"
        if path == MESSAGES:
            assert told["stop_reason"] == "max_tokens"
        elif path == RESPONSES:
            assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        else:
            assert told["choices"][0]["finish_reason"] == "length"
        server.until(lambda: server.idle)


def test_invalid_times_are_refused(server: Live, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, reason in (("0", "above 0"), ("nan", "a finite number")):
        assert main(["--request-seconds", seconds]) == 2
        assert f"--request-seconds must be {reason}" in capsys.readouterr().err
    answer = server.http.post(COMPLETIONS, json={"prompt": "x", "t_max_predict_ms": -1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "t_max_predict_ms")
    answer = server.http.post(COMPLETIONS, json={"prompt": "x", "t_max_predict_ms": 0, "max_tokens": 2})
    assert answer.status_code == 200


def test_clients_are_distinguished_by_address() -> None:
    """With a proxy on this machine, by the address that it names."""
    behind = {"forwarded_allow_ips": "127.0.0.1"}
    with ThreadPoolExecutor(6) as pool, gated(max_batch=1, **behind) as (server, gate):
        body = {"prompt": [5, 6, 7], "max_tokens": 3}

        def ask(address: str) -> httpx.Response:
            return server.http.post(COMPLETIONS, json=body, headers={"X-Forwarded-For": address})

        first = [pool.submit(ask, "10.0.0.1") for _ in range(4)]
        server.until(lambda: gate.submitted == 4)
        other = pool.submit(ask, "10.0.0.2")
        server.until(lambda: gate.submitted == 5)
        gate.let(1000)
        assert {answer.result(30).status_code for answer in (*first, other)} == {200}
        assert gate.ended.index("10.0.0.2") <= 2  # in turn, not after all requests of the other
