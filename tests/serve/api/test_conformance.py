"""What OpenAI's and Anthropic's clients expect besides an answer: fields, ranges, errors, forms of HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from openai.types import CompletionUsage

from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.messages import KNOWN_TOOLS
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.speculation import Speculation
from tests.clients.scripted_target import Line, call, scripted_target_folder
from tests.serve.api.live import NAME, Live, live, one_model
from tests.serve.chat.formats import WEATHER

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}
USER: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    COMPLETIONS: {"prompt": "x", "max_tokens": 2},
    MESSAGES: {"messages": USER, "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


def ok(server: Live, path: str, **more: Any) -> dict[str, Any]:
    answer = server.http.post(path, json=BODIES[path] | more)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def refusal(server: Live, path: str, **more: Any) -> str:
    """Return the field that a 400 is about: by name for OpenAI's clients, from the message for Anthropic's."""
    answer = server.http.post(path, json=BODIES[path] | more)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["message"].partition(" ")[0].rstrip(":") if path == MESSAGES else error["param"])


def events(text: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(payload) for payload in data if payload != "[DONE]"]


def test_completion_tokens_details_count_thoughts(thinker: Live) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "seed": 3}
    used = ok(thinker, CHAT, max_tokens=20, **thinking)["usage"]
    assert used["completion_tokens_details"] == {"reasoning_tokens": 20}  # a random model never ends its reasoning
    assert CompletionUsage.model_validate(used).completion_tokens_details.reasoning_tokens == 20  # type: ignore[union-attr]
    streamed = BODIES[CHAT] | {"max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}} | thinking
    last = events(thinker.http.post(CHAT, json=streamed).text)[-1]
    assert last["usage"] == used | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    plain = ok(thinker, CHAT, chat_template_kwargs={"enable_thinking": False})
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert ok(thinker, COMPLETIONS)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    response = ok(thinker, RESPONSES, max_output_tokens=20, **thinking)
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 20}
    message = ok(thinker, MESSAGES, max_tokens=20, **thinking)
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 20}


def test_service_tier_is_accepted_and_echoed(server: Live) -> None:
    for tier in ("auto", "default", "flex", "priority", "scale"):
        assert ok(server, CHAT, service_tier=tier)["service_tier"] == "default"
        assert ok(server, RESPONSES, service_tier=tier)["service_tier"] == "default"
        ok(server, COMPLETIONS, service_tier=tier)
    assert "service_tier" not in ok(server, CHAT)
    chunks = events(server.http.post(CHAT, json=BODIES[CHAT] | {"service_tier": "auto", "stream": True}).text)
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}
    assert ok(server, MESSAGES, service_tier="standard_only")["usage"]["service_tier"] == "standard"
    for path in BODIES:
        assert refusal(server, path, service_tier="gold") == "service_tier"


@pytest.mark.parametrize("path", BODIES)
def test_sampling_out_of_range_is_refused(server: Live, path: str) -> None:
    most = 1 if path == MESSAGES else 2
    ok(server, path, temperature=most, top_p=0.5)
    for wrong in ({"temperature": most + 0.1}, {"temperature": -0.1}, {"top_p": 1.1}, {"top_p": -0.1}):
        assert refusal(server, path, **wrong) in wrong
    if path in (MESSAGES, RESPONSES):
        return
    ok(server, path, presence_penalty=-2, frequency_penalty=2, logit_bias={"3": -100, "4": 100})
    for wrong in (
        {"presence_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"frequency_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": {"3": 100.5}},
        {"logit_bias": {"3": -101}},
        {"logit_bias": {"999999": 1}},
        {"logit_bias": {"-1": 1}},
    ):
        assert refusal(server, path, **wrong) in wrong


def test_results_without_calls_are_refused(caller: Live) -> None:
    made = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [made]}
    tools = [WEATHER]

    def result(id: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": id, "content": "sunny"}

    ok(caller, CHAT, messages=[*USER, assistant, result("call_1")], tools=tools)
    for wrong in ([*USER, result("call_1")], [*USER, result("call_1"), assistant]):
        assert refusal(caller, CHAT, messages=wrong, tools=tools) == "messages[1].tool_call_id"
    assert refusal(caller, CHAT, messages=[*USER, assistant, result("x")]) == "messages[2].tool_call_id"

    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}]}
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "sunny"}]}
    ok(caller, MESSAGES, messages=[*USER, use, told])
    assert refusal(caller, MESSAGES, messages=[*USER, told]) == "messages[1].content[0].tool_use_id"

    weather_call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"}
    given = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    first = ok(caller, RESPONSES, input=[*USER, weather_call])
    ok(caller, RESPONSES, input=[given], previous_response_id=first["id"])
    assert refusal(caller, RESPONSES, input=[*USER, given]) == "input[1].call_id"
    wrong = given | {"call_id": "d"}
    assert refusal(caller, RESPONSES, input=[wrong], previous_response_id=first["id"]) == "input[0].call_id"


def test_requests_have_ids(server: Live) -> None:
    with anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0) as client:
        ids = {client.messages.create(model=NAME, max_tokens=1, messages=USER)._request_id for _ in range(2)}
    assert len(ids) == 2
    assert all(str(id).startswith("req_") for id in ids)
    assert server.http.post(MESSAGES, json={}).headers["request-id"].startswith("req_")
    assert server.openai.chat.completions.create(model=NAME, max_tokens=1, messages=USER)._request_id


def test_clients_of_anthropic_get_the_models_in_its_form(server: Live) -> None:
    with anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0) as client:
        (model,) = list(client.models.list())
        assert (model.id, model.type, model.display_name) == (NAME, "model", NAME)
        assert model.created_at.year > 2000
        assert client.models.retrieve(NAME) == model
        with pytest.raises(anthropic.NotFoundError) as e:
            client.models.retrieve("other")
    assert e.value.body["type"] == "error"  # type: ignore[index,call-overload]
    assert server.http.get("/v1/models").json()["object"] == "list"
    assert set(server.http.get("/v1/models", headers=ANTHROPIC).json()) == {"data", "has_more", "first_id", "last_id"}


def test_an_unknown_previous_response_is_a_bad_request(server: Live) -> None:
    answer = server.http.post(RESPONSES, json={"input": "x", "previous_response_id": "resp_unknown"})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert error["type"] == "invalid_request_error"
    assert server.http.get(f"{RESPONSES}/resp_unknown").status_code == 404


def test_head_requests_work_on_all_readable_paths(server: Live) -> None:
    kept = ok(server, RESPONSES)["id"]
    paths = ["/", "/health", "/version", "/metrics", "/openapi.json", "/v1/models", f"/v1/models/{NAME}"]
    for path in (*paths, f"{RESPONSES}/{kept}", "/v1/spec_decode/metrics"):
        got, head = server.http.get(path), server.http.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"") == (200, b""), path
        assert head.headers["content-type"] == got.headers["content-type"]
    assert server.http.head("/v1/models/other").status_code == 404
    assert server.http.head(CHAT).status_code == 405


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"tool_choice": {"type": "x", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": "f"}}, "tool_choice.function"),
        (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (CHAT, {"tool_choice": 1}, "tool_choice"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
        ),
        (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]"),
        (CHAT, {"tools": [{"type": "function", "function": []}]}, "tools[0].function"),
        (CHAT, {"response_format": []}, "response_format"),
        (CHAT, {"stop": 1}, "stop"),
        (COMPLETIONS, {"prompt": {}}, "prompt"),
        (MESSAGES, {"system": [1]}, "system[0]"),
        (MESSAGES, {"tool_choice": "auto"}, "tool_choice"),
        (MESSAGES, {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        (RESPONSES, {"tool_choice": {"type": "function"}}, "tool_choice.name"),
        (RESPONSES, {"text": {"format": 1}}, "text.format"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ],
)
def test_errors_name_the_fields_of_clients(server: Live, path: str, more: dict[str, Any], param: str) -> None:
    assert refusal(server, path, **more) == param
    message = server.http.post(path, json=BODIES[path] | more).json()["error"]["message"]
    assert "instance of" not in message


def test_refusals_do_not_echo_long_values(caller: Live) -> None:
    long = "a" * 70_000
    bodies = [
        {"model": long},
        {"tool_choice": {"type": "function", "function": {"name": long}}, "tools": [WEATHER]},
        {"messages": [{"role": long, "content": "x"}]},
        {"response_format": {"type": long}},
        {"chat_template_kwargs": {long: 1}, "messages": [{"role": "tool", "tool_call_id": long, "content": "x"}]},
    ]
    answers = [caller.http.post(CHAT, json=BODIES[CHAT] | body) for body in bodies]
    answers += [caller.http.get(f"/v1/{long[:40_000]}"), caller.http.get(f"/v1/models/{long[:40_000]}")]
    answers += [caller.http.get(f"{RESPONSES}/{long[:40_000]}"), caller.http.request("X" * 1000, "/health")]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert len(answer.content) < 5000, answer.text[:200]


KNOWN = {
    "bash_20250124": ("bash", {"command": "ls"}),
    "text_editor_20250124": ("str_replace_editor", {"command": "undo_edit", "path": "a.txt"}),
    "text_editor_20250728": ("str_replace_based_edit_tool", {"command": "view", "path": "b.txt"}),
    "memory_20250818": ("memory", {"command": "delete", "path": "/memories/c"}),
}
"""Tools that clients run without sending a schema: name, and an example of a call."""


@pytest.fixture(scope="module")
def user_of_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a model that calls the offered tool."""
    lines = [Line(f"'{name}' in names", call(name, **given)) for name, given in KNOWN.values()]
    plan = LoadConfig(scripted_target_folder(tmp_path_factory.mktemp("known"), lines), Speculation())
    with live(models=one_model(lambda: load(plan, lambda _: None))) as running:
        yield running


@pytest.mark.parametrize("kind", KNOWN)
def test_known_tools_need_no_schema(user_of_tools: Live, kind: str) -> None:
    name, given = KNOWN[kind]
    tool: dict[str, Any] = {"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}
    message = ok(user_of_tools, MESSAGES, max_tokens=100, tools=[tool])
    (block,) = message["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", name, given)
    assert message["stop_reason"] == "tool_use"
    blocks = events(user_of_tools.http.post(MESSAGES, json=BODIES[MESSAGES] | {"tools": [tool], "stream": True}).text)
    assert blocks[-1]["type"] == "message_stop"

    # The model gets the schema, as for one that the client sends.
    function = KNOWN_TOOLS[kind]
    written = {"name": name, "description": function["description"], "input_schema": function["parameters"]}
    assert set(given) <= set(function["parameters"]["properties"])
    counts = [
        user_of_tools.http.post(f"{MESSAGES}/count_tokens", json={"messages": USER, "tools": tools}).json()
        for tools in ([tool], [written])
    ]
    assert counts[0] == counts[1]
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    assert refusal(user_of_tools, MESSAGES, tools=[hosted]) == "tools[0].type"


def test_the_older_response_format_with_a_schema_is_followed(server: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_object", "schema": schema | {"additionalProperties": False}}
    answer = ok(server, CHAT, max_tokens=60, seed=1, response_format=form)
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] in ("x", "y")
    wrong = {"type": "json_object", "schema": {"properties": {"a": {"type": "wizard"}}}}
    assert refusal(server, CHAT, response_format=wrong) == "response_format.schema"
