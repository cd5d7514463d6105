"""Steps of the engine that do not return."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import inf
from threading import Event, current_thread
from typing import Any

import httpx
import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.api.errors import ApiError
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.options import Settings
from eagle_mlx.serve.api.worker import Job, Worker
from tests.serve.api.live import Live, engine, live, wide

LIMIT = Settings().stuck_seconds


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def stopped(server: Live, reads: bool = False) -> Iterator[tuple[Clock, Future[httpx.Response]]]:
    """Yield a clock and an answer in a context in which the first step does not return, or its reading of a prompt."""
    clock, over = Clock(), Event()
    server.service.worker.clock = clock
    loaded = server.service.loaded
    assert loaded is not None
    owner, name = (loaded.engine.admission, "read") if reads else (loaded.engine, "step")
    whole = getattr(owner, name)

    def hang(*args: Any) -> Any:
        over.wait(60)
        return whole(*args)

    setattr(owner, name, hang)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, "/v1/completions", json={"prompt": "x y z", "max_tokens": 4})
        try:
            server.until(lambda: server.service.worker.work is not None)
            server.until(lambda: not reads or bool(loaded.engine.snapshot().prefilling))
            yield clock, answer
        finally:
            setattr(owner, name, whole)
            over.set()


def health(server: Live) -> tuple[int, str]:
    answer = server.http.get("/health")
    return answer.status_code, answer.json()["status"]


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for record in caplog.records if "has not returned" in (message := record.getMessage())]


def test_a_step_that_does_not_return_is_reported_once_with_all_stacks(caplog: pytest.LogCaptureFixture) -> None:
    with live() as server:
        with stopped(server) as (clock, answer):
            clock.now = LIMIT
            server.service.watchdog.check()
            assert health(server) == (200, "ready")
            clock.now = LIMIT + 1
            server.until(lambda: health(server) == (503, "stuck"))
            clock.now = 3 * LIMIT
            assert health(server) == (503, "stuck")
        server.until(lambda: health(server) == (200, "ready"))
        assert answer.result().status_code == 200
    [report] = reports(caplog)
    assert "in hang" in report  # the engine's thread
    assert "in run_forever" in report  # the event loop's
    assert "returned after all" in caplog.text


def test_a_stuck_server_goes_on_without_a_folder_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk may be full, or read-only."""
    monkeypatch.setattr(tempfile, "tempdir", os.devnull)
    with live() as server:
        with stopped(server) as (clock, answer):
            clock.now = LIMIT + 1
            server.until(lambda: health(server) == (503, "stuck"))
        assert answer.result().status_code == 200
        server.until(lambda: health(server) == (200, "ready"))
    assert "in hang" in reports(caplog)[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x y", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/admin/speculation", {"model": "tiny", "num_speculative_tokens": 2}),
    ],
)
def test_work_between_steps_that_does_not_return_is_reported(
    path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with live() as server, ThreadPoolExecutor(1) as pool:
        clock, over, loaded = Clock(), Event(), server.service.loaded
        assert loaded is not None
        forward = loaded.target.forward

        def hang(*args: Any, **more: Any) -> Any:
            over.wait(60)
            return forward(*args, **more)

        loaded.target.forward = hang  # type: ignore[method-assign]
        server.service.worker.clock = clock
        answer = pool.submit(server.http.post, path, json=body)
        server.until(lambda: server.service.worker.work is not None)
        server.service.watchdog.check()
        clock.now = LIMIT + 1
        server.until(lambda: health(server) == (503, "stuck"))
        over.set()
        assert answer.result().status_code == 200
        server.until(lambda: health(server) == (200, "ready"))
    assert "work between steps" in reports(caplog)[0]


def test_reading_a_prompt_may_take_longer() -> None:
    with live() as server:
        with stopped(server, reads=True) as (clock, answer):
            clock.now = 9 * LIMIT
            server.service.watchdog.check()
            assert health(server) == (200, "ready")
            clock.now = 10 * LIMIT + 1
            server.until(lambda: health(server) == (503, "stuck"))
        assert answer.result().status_code == 200


def test_a_stuck_server_can_end_for_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr("eagle_mlx.serve.api.worker.EXIT_SECONDS", 0.2)
    with live(settings=wide(exit_when_stuck=True)) as server, stopped(server) as (clock, answer):
        clock.now = LIMIT + 1
        assert answer.result(20).status_code == 500
        assert "has not returned" in answer.result().json()["error"]["message"]
        assert health(server) == (503, "stuck")
        server.until(lambda: ends == [1])


def test_the_watchdog_can_be_switched_off() -> None:
    with live(settings=wide(stuck_seconds=0.0)) as server, stopped(server) as (clock, _):
        clock.now = 1e9
        server.service.watchdog.check()
        assert health(server) == (200, "ready")
    with pytest.raises(ConfigError, match="--stuck-seconds above 0"):
        wide(stuck_seconds=0.0, exit_when_stuck=True)


def test_commands_of_a_lost_engine_are_refused_and_not_run_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: None)
    threads, over = list[str](), Event()

    def load() -> Loaded:
        threads.append(current_thread().name)
        return Loaded(engine())

    async def lose() -> None:
        worker = Worker(load, lambda result: None)
        worker.start(asyncio.get_running_loop())
        await worker.load()
        assert worker.loaded is not None
        job = Job(inf, 1, [worker.loaded.engine.prepare([1, 2], SamplingParams())])
        hangs = asyncio.ensure_future(worker.between_steps(lambda: over.wait(60)))
        while worker.work is None:
            await asyncio.sleep(0)
        later = asyncio.ensure_future(worker.load())
        await asyncio.sleep(0)
        worker.submit(job)
        worker.end_process("it hangs")
        with pytest.raises(ApiError, match="it hangs"):
            await later
        [event] = await job.events()
        assert event.output is not None
        assert event.output.error == "it hangs"
        over.set()
        await hangs

    asyncio.run(lose())
    assert threads == ["engine"]


def test_memory_is_freed_after_the_model_is_gone_although_the_thread_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    over, seen = Event(), list[Loaded | None]()

    async def unload() -> None:
        worker = Worker(lambda: Loaded(engine()), lambda result: None)
        worker.start(asyncio.get_running_loop())
        await worker.load()
        monkeypatch.setattr(gc, "collect", lambda: seen.append(worker.loaded))
        busy = asyncio.ensure_future(worker.between_steps(lambda: over.wait(60)))
        while worker.work is None:
            await asyncio.sleep(0)
        unloaded = asyncio.ensure_future(worker.unload())
        await asyncio.sleep(0)
        over.set()
        await unloaded
        assert await busy
        worker.stop()
        worker.join()

    asyncio.run(unload())
    assert seen == [None]
