"""A server with a tiny model, running in a thread on a free port."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import uvicorn.server
from openai import OpenAI

import eagle_mlx as em
from eagle_mlx.request_state import RequestState
from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.models import Models
from eagle_mlx.serve.api.options import Settings
from eagle_mlx.serve.api.server import Server, address, create_app, listen
from eagle_mlx.serve.api.service import ModelSource, Service
from tests.serve.api.given import PATIENCE, given_head, given_target, given_target_of

NAME = "tiny"
DEPTH = 3


def engine(mode: str = "ngram", max_batch: int = 4, context: int = 512, **settings: int | None) -> em.Engine:
    """Return an engine. The tiny model's greedy text soon repeats, so n-grams are often accepted and often rejected."""
    target = given_target()
    target.context_length = context
    proposer = {"none": lambda: None, "ngram": em.NgramProposer, "eagle": lambda: given_head(target)}[mode]()
    return em.Engine(target, proposer, policy=em.FixedPolicy(DEPTH), max_batch=max_batch, **settings)  # type: ignore[arg-type]


def remembering() -> Loaded:
    """Return a model whose n-grams draft with the texts of earlier requests, after matches that a text alone lacks."""
    proposer = em.NgramProposer(min_ngram=12, memory=em.Memory())
    made = em.Engine(given_target(), proposer, policy=em.FixedPolicy(DEPTH), max_batch=4)
    return Loaded(made, "ngram", DEPTH, {"temperature": 0.0})


def loaded_format(name: str, **settings: int | None) -> Loaded:
    """Return a model with the chat format of this name, which drafts n-grams."""
    target = given_target_of(name)
    made = em.Engine(target, em.NgramProposer(), policy=em.FixedPolicy(DEPTH), max_batch=4, **settings)  # type: ignore[arg-type]
    return Loaded(made, "ngram", DEPTH)


class Hasty:
    """`asyncio` for uvicorn, which sleeps 0.1 s before it looks for its end, and again when it ends."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = Hasty()  # type: ignore[assignment]


class Live:
    """A running server and its clients."""

    def __init__(self, server: Server, base: str):
        self.server, self.base = server, base
        self.models = server.models
        self.service: Service = next(iter(server.models.services.values()))
        """The service of the only model, or of the first one."""
        self.key = self.models.settings.api_key
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.http = httpx.Client(base_url=base, headers=headers, timeout=PATIENCE)

    @cached_property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.base}/v1", api_key=self.key or "none", max_retries=0)

    def until(self, true: Callable[[], bool], seconds: float = 20.0) -> float:
        """Wait for a condition. Return how long it took."""
        began = time.monotonic()
        while not true():
            took = time.monotonic() - began
            assert took < seconds, f"did not come about within {seconds} s"
            time.sleep(0.005)
        return time.monotonic() - began

    @contextmanager
    def slowed(self, seconds: float = 20.0) -> Iterator[None]:
        """Make every step of the engine take at least this long within the context."""
        loaded, over = self.service.worker.loaded, Event()
        assert loaded is not None
        step = loaded.engine.step

        def slow() -> list[RequestState]:
            over.wait(seconds)
            return step()

        loaded.engine.step = slow  # type: ignore[method-assign]
        try:
            yield
        finally:
            loaded.engine.step = step  # type: ignore[method-assign]
            over.set()

    def terminate(self) -> None:
        """End as on SIGTERM."""
        self.server.handle_exit(signal.SIGTERM, None)

    @property
    def idle(self) -> bool:
        return self.models.idle and all(service.running == 0 for service in self.models.services.values())


def wide(limits: Limits | None = None, **settings: object) -> Settings:
    return Settings(limits=limits or Limits(), **settings)  # type: ignore[arg-type]


def one_model(load: Callable[[], Loaded], settings: Settings | None = None, name: str = NAME) -> Models:
    """Return the model as `--target` serves it."""
    return Models(settings or wide(), [ModelSource(name, load, max_batch=4)], at_start=True)


@contextmanager
def live(
    load: Callable[[], Loaded] | None = None,
    settings: Settings | None = None,
    wait: bool = True,
    unread_bytes: int | None = None,
    models: Models | None = None,
) -> Iterator[Live]:
    """Start a server, wait until it is ready, and end it.

    unread_bytes: the system's buffer for unread answers, if smaller than usual. models: replaces the one from `load`.
    """
    load = load or (lambda: Loaded(engine(), "ngram", DEPTH, {"temperature": 0.0}))
    server = Server(create_app(models or one_model(load, settings)))
    sock = listen("127.0.0.1", 0)
    if unread_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unread_bytes)
    running = Live(server, address(sock))
    thread = Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        if wait:
            running.until(lambda: server.models.state == "ready" or server.models.failure is not None, PATIENCE)
        yield running
    finally:
        running.http.close()
        if "openai" in vars(running):
            running.openai.close()
        server.should_exit = True
        thread.join(timeout=20)
        sock.close()
        assert not thread.is_alive()


ELSEWHERE = pytest.mark.skipif(sys.platform != "linux", reason="only there is 127.0.0.2 an address of this machine")


def another_client(server: Live) -> httpx.Client:
    """Return a client with another address."""
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    return httpx.Client(base_url=server.base, transport=transport, timeout=PATIENCE)
