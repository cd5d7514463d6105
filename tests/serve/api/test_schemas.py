"""Schemas that cost too much are refused, do not affect other clients, and do not delay the server's end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.serve.api import chat
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.server import Server, address, create_app, listen
from eagle_mlx.serve.chat import structured
from tests.serve.api.live import DEPTH, Live, engine, live, one_model, wide
from tests.serve.chat.formats import by_schema

CHAT = "/v1/chat/completions"
HANGS = {"type": "integer", "multipleOf": 99999999}


def asking(schema: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    return {"messages": messages, "max_tokens": 60, "response_format": by_schema(schema), **more}


def test_an_endless_schema_is_refused_and_other_requests_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_mlx.serve.chat.structured.COMPILE_SECONDS", 2.0)
    with live() as server, ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(server.http.post, CHAT, json=asking(HANGS))
        while not hanging.done():
            answer = server.http.post(CHAT, json=asking({"type": "boolean"}))
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["message"]["content"] in ("true", "false")
        assert hanging.result().status_code == 400
        error = hanging.result().json()["error"]
        assert ": too complex: " in error["message"]  # of time or of memory
        assert error["param"] == "response_format.json_schema.schema"


def test_requests_without_a_schema_do_not_wait_for_slow_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()

    def grammar(_: Any, schema: object, *more: object) -> None:
        if schema is not None:
            over.wait(60)
            raise ConfigError("too complex")

    monkeypatch.setattr(structured.Grammars, "grammar", grammar)
    plain = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with live() as server, ThreadPoolExecutor(6) as pool:
        try:
            hanging = [pool.submit(server.http.post, CHAT, json=asking({})) for _ in range(6)]
            server.until(lambda: server.service.waiting == 6)
            assert server.http.post(CHAT, json=plain).status_code == 200
            assert not any(answer.done() for answer in hanging)
        finally:
            over.set()
        assert {answer.result().status_code for answer in hanging} == {400}


def test_a_grammar_limit_ends_only_its_own_request() -> None:
    """All share a pattern. The random model hits the lexer's limit; a bias makes the others write what is allowed."""
    pattern = {"type": "string", "pattern": ".{0,200}(a|e).{0,200}(t|s).{0,200}(red|blue)"}
    with live() as server:
        for seed in range(3):
            answer = server.http.post(CHAT, json=asking(pattern, temperature=1.5, seed=seed))
            assert answer.status_code == 400
            assert (
                "the grammar failed: the text cannot follow it any further: lexer error"
                in answer.json()["error"]["message"]
            )
            loaded = server.service.worker.loaded
            assert loaded is not None
            tokens = loaded.tokenizer.encode('"atred"', add_special_tokens=False)
            bias = {str(token): 100.0 for token in tokens}
            good = asking(pattern, temperature=0, logit_bias=bias, max_tokens=1)
            assert server.http.post(CHAT, json=good).status_code == 200


def test_a_server_with_hanging_threads_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()
    monkeypatch.setattr(chat, "encode_chat", lambda *arguments: over.wait(60))
    made = Server(
        create_app(one_model(lambda: Loaded(engine(), "ngram", DEPTH, {"temperature": 0.0}), wide(drain_seconds=0.1)))
    )
    made.config.timeout_graceful_shutdown = 0.2  # type: ignore[assignment]  # asyncio accepts it
    sock = listen("127.0.0.1", 0)
    thread = Thread(target=made.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    server = Live(made, address(sock))
    try:
        server.until(lambda: server.service.loaded is not None)
        with ThreadPoolExecutor(40) as pool:
            answers = [pool.submit(server.http.post, CHAT, json=asking({})) for _ in range(40)]
            server.until(lambda: server.service.waiting == 40)
            server.terminate()
            server.until(lambda: not thread.is_alive(), seconds=30)
            assert all(answer.exception() is not None or answer.result().status_code >= 400 for answer in answers)
    finally:
        over.set()
        server.http.close()
        server.openai.close()
        sock.close()
