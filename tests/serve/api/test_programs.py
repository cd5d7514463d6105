"""Replay of real programs' requests, which tests/clients/try_programs.py recorded and shortened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.speculation import Speculation
from tests.clients.programs import PROGRAMS, SAID, SHORT, Program, script
from tests.clients.scripted_target import scripted_target_folder
from tests.serve.api.live import Live, live, one_model

NAME = "scripted"
RECORDED = Path(__file__).parent / "programs"
FORMED = 60
"""Tokens of answers with a schema, which the scripted target fills with anything."""
Answer = tuple[str, list[tuple[str, Any]]]
"""The text, and the calls by name and arguments."""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    plan = LoadConfig(scripted_target_folder(tmp_path_factory.mktemp("scripted"), script()), Speculation())
    with live(models=one_model(lambda: load(plan, lambda _: None), name=NAME)) as running:
        yield running


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.recorded)
def test_requests_of_programs_are_answered(program: Program, scripted: Live) -> None:
    answers = []
    for line in (RECORDED / program.recorded).read_text().splitlines():
        request = json.loads(line)
        body, formed = request["body"], _is_formed(request["body"])
        if body:
            body["model"] = NAME
        if formed:
            body["max_tokens"] = FORMED
        content = json.dumps(body) if body else None
        answer = scripted.http.request(request["method"], request["path"], headers=request["headers"], content=content)
        assert answer.status_code == 200, answer.text
        if body:
            read = READERS[program.api](_events(answer.text))
            if not formed:
                answers.append(read)
    titles = [answered for answered in answers if answered == (SHORT, [])]
    turn = [answered for answered in answers if answered not in titles]
    if program.calls is None:
        assert titles
        assert not turn
    else:
        name, arguments = program.calls
        assert turn == [("", [(name, dict(arguments))]), (SAID, [])]


def _is_formed(body: dict[str, Any] | None) -> bool:
    return bool(body and body.get("output_config", {}).get("format"))


def _events(text: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(event) for event in data if event != "[DONE]"]


def _read_messages(events: list[dict[str, Any]]) -> Answer:
    kinds = [part["type"] for part in events if part["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            block["text"] = block.get("text", "") + delta.get("text", "")
            block["json"] += delta.get("partial_json", "")
    calls = [(part["name"], json.loads(part["json"])) for part in blocks if part["type"] == "tool_use"]
    return "".join(part["text"] for part in blocks if part["type"] == "text"), calls


def _read_responses(events: list[dict[str, Any]]) -> Answer:
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    texts = [(item["name"], {"input": item["input"]}) for item in items if item["type"] == "custom_tool_call"]
    return text, calls + texts


def _read_chat(events: list[dict[str, Any]]) -> Answer:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = list[dict[str, Any]]()
    for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        calls += [{**call["function"], "arguments": ""}] if "id" in call else []
        calls[-1]["arguments"] += call["function"]["arguments"]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, [(call["name"], json.loads(call["arguments"])) for call in calls]


READERS: dict[str, Callable[[list[dict[str, Any]]], Answer]] = {
    "messages": _read_messages,
    "responses": _read_responses,
    "chat": _read_chat,
}
