"""Silent streams send events, because the idle timers of clients do not count comments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.options import Limits, LoadConfig
from eagle_mlx.serve.speculation import Speculation
from tests.clients.scripted_target import Line, call, scripted_target_folder
from tests.serve.api.dialects import DIALECTS, Dialect, Question
from tests.serve.api.live import live, one_model, wide
from tests.serve.api.test_waits import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Gate, Stream, gated, long_bodies
from tests.serve.chat.formats import WEATHER

KEEP_ALIVES = {
    COMPLETIONS: '"text":"","logprobs":null,"finish_reason":null',
    CHAT: '"delta":{},"logprobs":null,"finish_reason":null',
    MESSAGES: "event: ping",
    RESPONSES: "event: response.in_progress",
}


@pytest.mark.parametrize("path", KEEP_ALIVES)
def test_a_stream_sends_events_that_clients_count_while_a_prompt_is_read(path: str) -> None:
    body = long_bodies()[path]
    with gated(limits=Limits(keep_alive_seconds=0.01)) as (server, gate):
        stream = Stream(server, path, body)
        stream.until(KEEP_ALIVES[path], 3)
        gate.open()
        events = stream.events()
        whole = server.http.post(path, json=body).json()
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    if path == CHAT:
        content = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert content == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_stream_sends_events_that_clients_count_while_a_call_is_held_back(dialect: Dialect, tmp_path: Path) -> None:
    line = Line("names", call("get_weather", city="Oslo " * 100, days=3))
    plan = LoadConfig(scripted_target_folder(tmp_path, [line]), Speculation(mode="none"))
    models = one_model(lambda: load(plan, lambda _: None), wide(Limits(keep_alive_seconds=0.01)))
    body = dialect.body(Question((("user", "x"),), max_tokens=400))
    tool = dict(WEATHER["function"])
    nested = {CHAT: {"type": "function", "function": tool}, RESPONSES: {"type": "function", **tool}}
    body["tools"] = [nested.get(dialect.path) or {"name": tool["name"], "input_schema": tool["parameters"]}]
    with live(models=models) as server:
        gate = Gate(server)
        stream = Stream(server, dialect.path, body)
        gate.let(12)  # the prompt, and the beginning of the call
        server.until(lambda: server.service.totals.emitted > 5)
        stream.until(KEEP_ALIVES[dialect.path], 5)
        gate.open()
        assert any("get_weather" in json.dumps(event) for event in stream.events())
