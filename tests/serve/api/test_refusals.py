"""What is refused, with which messages, and that other requests are not affected."""

from __future__ import annotations

import gzip
import json
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.serve.api.conversation import Names
from eagle_mlx.serve.api.errors import ApiError
from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.messages import MessagesRequest
from eagle_mlx.serve.api.received import read
from tests.full import some
from tests.serve.api.live import NAME, Live, live, wide

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
IMAGE = {
    "role": "user",
    "content": [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORM = "response_format.json_schema"
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def calling(function: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def formed(form: dict[str, Any]) -> dict[str, Any]:
    return {"messages": USER, "response_format": form}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    limits = Limits(body_mb=1 / 256, queue=2)
    with live(settings=wide(limits, api_key="secret", allow_origin=("https://page.example",))) as running:
        yield running


def post(server: Live, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of a request that the server itself must refuse."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.headers["content-type"] == "application/json"
    parsed = answer.json()
    assert set(parsed) == {"error"}, parsed
    assert set(parsed["error"]) == {"message", "type", "param", "code"}
    assert parsed["error"]["message"]
    return answer.status_code, parsed["error"]


def still_serves(server: Live) -> None:
    answer = server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "temperature": 0})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        (COMPLETIONS, {}, "prompt", "required"),
        (COMPLETIONS, {"prompt": ""}, None, "empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "empty list"),
        (COMPLETIONS, {"prompt": [[]]}, None, "empty"),
        (COMPLETIONS, {"prompt": ["x"] * 65}, "prompt", "at most 64"),
        (COMPLETIONS, {"prompt": [1, "x"]}, "prompt[1]", "valid"),
        (COMPLETIONS, {"prompt": [4096]}, "prompt", "vocabulary of 4096"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt[0]", "greater than"),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt[0]", "less"),
        (COMPLETIONS, {"prompt": "x", "temperature": "1"}, "temperature", "number"),
        (COMPLETIONS, {"prompt": "x", "temperature": True}, "temperature", "number"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature", "greater"),
        (COMPLETIONS, {"prompt": "x", "temperature": 2.1}, "temperature", "equal to 2"),
        (COMPLETIONS, {"prompt": "x", "top_p": 2}, "top_p", "at most 1"),
        (COMPLETIONS, {"prompt": "x", "top_k": -2}, "top_k", "at least 0"),
        (COMPLETIONS, {"prompt": "x", "min_p": 1.5}, "min_p", "from 0"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**63}, "seed", "less"),
        (COMPLETIONS, {"prompt": "x", "presence_penalty": 2.1}, "presence_penalty", "equal to 2"),
        (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "0.001"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"4096": 1}}, "logit_bias", "vocabulary"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias", "number"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
        (COMPLETIONS, {"prompt": "x", "stop": "a" * 257}, "stop", "256"),
        (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop", "non-empty strings"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n", "greater"),
        (COMPLETIONS, {"prompt": "x", "n": 17}, "n", "at most 16"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of", "equal n"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs", "20"),
        (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs", "integer"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "echo"),
        (COMPLETIONS, {"prompt": "x", "guided_regex": "a"}, "guided_regex", "not supported"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 5}, "min_tokens", "0"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options", "stream"),
        (COMPLETIONS, {"prompt": "x", "spec_decode": "eagle"}, "spec_decode", "'ngram' and 'none'"),
        (COMPLETIONS, {"prompt": "x", "num_speculative_tokens": -1}, "num_speculative_tokens", "greater"),
        (
            COMPLETIONS,
            {"prompt": "x", "spec_decode": "none", "num_speculative_tokens": 2},
            "num_speculative_tokens",
            "drafts nothing",
        ),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "system"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "text"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "must be text"),
        (CHAT, {"messages": [*USER, {**IMAGE}]}, "messages[1].content[1]", "image_url is not supported"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            None,
            "input_audio is not supported",
        ),
        (CHAT, {"messages": USER, "audio": {}}, "audio", "not supported"),
        (CHAT, {"messages": USER, "functions": []}, "functions", "not supported"),
        (CHAT, {"messages": USER, "top_logprobs": 1}, "top_logprobs", "logprobs"),
        (CHAT, {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
        (CHAT, {"messages": USER, "tools": [TOOL]}, "tools", "parser"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHAT, {"messages": USER, "tools": [TOOL] * 129}, "tools", "same name"),
        (CHAT, {"messages": USER, "tools": [named("no spaces")]}, "tools[0].function.name", "pattern"),
        (CHAT, {"messages": USER, "tools": [named("x" * 129)]}, "tools[0].function.name", "pattern"),
        (CHAT, {"messages": USER, "tools": [named("f", parameters="x")]}, "tools[0].function.parameters", "dict"),
        (CHAT, {"messages": USER, "tools": [named("f", description=["x"])]}, "tools[0].function.description", "string"),
        (CHAT, {"messages": USER, "tool_choice": "always"}, "tool_choice", "required"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
        (CHAT, {"messages": [calling({"name": "f", "arguments": 3})]}, ARGUMENTS, "string"),
        (CHAT, {"messages": USER, "chat_template_kwargs": [1]}, "chat_template_kwargs", "dict"),
        (
            CHAT,
            {"messages": USER, "chat_template_kwargs": {"enable_thinking": "false"}},
            "chat_template_kwargs",
            "true or false",
        ),
        (CHAT, formed({"type": "xml"}), "response_format.type", "json_object"),
        (CHAT, formed({"type": "json_object", "schema": []}), "response_format.schema", "dict"),
        (CHAT, formed({"type": "json_schema"}), "response_format.json_schema", "must be an object"),
        (CHAT, formed({"type": "json_schema", "json_schema": {"schema": {}}}), f"{FORM}.name", "required"),
        (CHAT, formed({"type": "json_schema", "json_schema": {"name": "a"}}), f"{FORM}.schema", "required"),
        (CHAT, formed({"type": "json_schema", "json_schema": {"name": "", "schema": {}}}), f"{FORM}.name", "1"),
        (CHAT, formed({"type": "json_schema", "json_schema": {"name": "a", "schema": True}}), f"{FORM}.schema", "dict"),
        (
            CHAT,
            {
                "messages": USER,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "wizard"}}},
            },
            None,
            "schema",
        ),
        ("/tokenize", {}, "prompt", "messages"),
        ("/tokenize", {"prompt": 1}, "prompt", "string"),
        ("/detokenize", {"tokens": [4096]}, "tokens", "4096"),
        ("/detokenize", {"tokens": "x"}, "tokens", "list"),
    ],
)
def test_a_request_that_cannot_be_meant(server: Live, path: str, body: Any, param: str | None, reason: str) -> None:
    status, error = post(server, path, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert reason in error["message"]
    if param is not None:
        assert error["param"] == param


def test_an_error_names_a_field_only_if_it_was_raised_for_one() -> None:
    for error, param in [
        (PromptError.at("tools[0].function", "two have the same name"), "tools[0].function"),
        (ConfigError("stop must be non-empty strings", "stop"), "stop"),
        (PromptError("tools: what a template wrote about them"), None),
        (ConfigError("messages[0].content must be text"), None),
    ]:
        assert error.field == param
    assert str(PromptError.at("tools[0].function", "two")) == "tools[0].function: two"


def test_prompts_that_do_not_fit_the_context(server: Live) -> None:
    for path, body in [
        (COMPLETIONS, {"prompt": "x y z " * 300}),
        (CHAT, {"messages": [{"role": "user", "content": "x y z " * 300}], "max_tokens": 1}),
    ]:
        status, error = post(server, path, body)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "512" in error["message"]


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 32_000}, {"max_tokens": 10**20}])
def test_the_context_limits_answers(server: Live, limit: dict[str, int]) -> None:
    """Some agents ask for 32,000 tokens whatever the context is."""
    body = {"prompt": [7] * 500, "temperature": 0, "ignore_eos": True, **limit}
    answer = server.http.post(COMPLETIONS, json=body).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"
    chat = server.http.post(CHAT, json={"messages": USER, "ignore_eos": True, **limit}).json()
    assert chat["usage"]["total_tokens"] == 512


def test_other_models_and_paths(server: Live) -> None:
    assert post(server, COMPLETIONS, {"prompt": "x", "model": "gpt"})[1]["code"] == "model_not_found"
    assert server.http.get("/v1/models/gpt").status_code == 404
    for method, path, status in [("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/health", 405)]:
        answer = server.http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_a_path_that_is_not_there_names_those_that_are(server: Live) -> None:
    message = server.http.get("/v1/nothing").json()["error"]["message"]
    for path in (CHAT, COMPLETIONS, "/tokenize", "/v1/models/{model}", "/health"):
        assert path in message


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1}),
    (CHAT, {"messages": USER, "max_tokens": 1}),
    ("/v1/responses", {"input": USER, "max_output_tokens": 1}),
    ("/v1/messages", {"messages": USER, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/v1/responses/input_tokens", {"input": USER}),
    ("/tokenize", {"prompt": "x"}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named(
    server: Live, path: str, body: dict[str, Any], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if stream and path.endswith(("/tokenize", "_tokens")):
        return
    fields = {**body, **({"stream": True} if stream else {}), f"strange_{stream}": {"a": 1}, "id slot\r\nX": 3}
    unknown = ["id?slot??X", f"strange_{stream}"]
    for name in body.keys() & {"messages", "input"}:
        fields[name] = [{**USER[0], "colour": 1}]
        unknown.append(f"{name}[0].colour")
    names = ", ".join(sorted(unknown))
    for _ in range(2):
        answer = server.http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == names
    assert sum(f"{path}: ignored unknown fields: {names};" in line for line in caplog.messages) == 1
    assert "x-ignored-fields" not in server.http.post(path, json=body).headers


def test_many_unknown_fields_are_named_in_part(server: Live) -> None:
    answer = server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1} | {f"a{i}": 1 for i in range(20_000)})
    assert answer.status_code == 200
    assert len(answer.headers["x-ignored-fields"].split(", ")) == 20


def test_known_fields_are_checked_despite_unknown_ones(server: Live) -> None:
    strange = {"cache_prompt": True, "id_slot": 3}
    for body in ({"prompt": "x", "n": "1", **strange}, {"prompt": "x", "suffix": "y", **strange}, strange):
        answer = server.http.post(COMPLETIONS, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] != "unknown_parameter"
    nested = {"messages": [{"role": "user", "content": 3, "colour": 1}]}
    assert post(server, CHAT, nested)[1]["param"] == "messages[0].content"


def test_unknown_fields_are_refused_if_the_operator_wants_it() -> None:
    with live(settings=wide(strict_fields=True)) as server:
        for path, body in REQUESTS:
            assert server.http.post(path, json=body).status_code == 200
            answer = server.http.post(path, json={**body, "colour": 1})
            assert answer.status_code == 400
            assert "colour is not a known field" in answer.json()["error"]["message"]
        status, error = post(server, CHAT, {"messages": [{**USER[0], "colour": 1}]})
        assert (status, error["param"], error["code"]) == (400, "messages[0].colour", "unknown_parameter")


def test_thoughts_are_taken_back_under_both_names(server: Live) -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [*USER, {"role": "assistant", "content": "x", name: "hm"}, *USER]
        assert server.http.post(CHAT, json={"messages": messages, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_whole_numbers_may_be_written_as_floats(server: Live, path: str) -> None:
    """Google's types have `top_k` as a float, and so do requests of its ADK."""
    settings = {"max_tokens": 2, "top_k": 4, "seed": 7, "n": 2, "num_speculative_tokens": 1, "temperature": 1}
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    answers = [
        server.http.post(path, json=body | {name: kind(value) for name, value in settings.items()})
        for kind in (int, float)
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [4, 4]
    status, error = post(server, path, body | {"top_k": 4.5})
    assert (status, error["param"]) == (400, "top_k")


def test_whole_numbers_inside_objects_may_be_floats_too(server: Live) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1.0, "maxItems": 2.0}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for path, body in [
        (COMPLETIONS, {"prompt": [5, 6], "max_tokens": 2, "stop_token_ids": [7.0]}),
        (CHAT, {"messages": USER, "max_tokens": 2, "response_format": form}),
        ("/v1/messages", {"messages": USER, "max_tokens": 2, "thinking": {"type": "enabled", "budget_tokens": 1024.0}}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2, "reasoning": {"max_tokens": 9.0}}),
    ]:
        answer = server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text


def test_the_arguments_of_earlier_calls_stay_as_they_were(server: Live) -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1.0}}
    turns = [*USER, {"role": "assistant", "content": [call]}]
    body, _ = read(MessagesRequest, json.dumps({"messages": turns, "max_tokens": 2.0}).encode())
    assert repr(body.messages[1].content[0].input) == "{'x': 1.0}"  # type: ignore[union-attr]


def test_harmless_fields_are_taken(server: Live) -> None:
    harmless: dict[str, Any] = {
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit"},
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "stop": None,
        "n": None,
    }
    body = {"messages": USER, "max_tokens": 1, "parallel_tool_calls": True, "tool_choice": "auto", **harmless}
    predicted = {"type": "content", "content": [{"type": "text", "text": "def f(x):"}]}
    assert server.http.post(CHAT, json=body | {"prediction": predicted}).status_code == 200
    answer = server.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1, "max_tool_calls": 3})
    assert answer.status_code == 200, "it limits tools that OpenAI runs"
    assert "x-ignored-fields" not in answer.headers


def test_keys(guarded: Live) -> None:
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        for path in ("/v1/models", "/tokenize", "/openapi.json"):
            answer = guarded.http.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        assert guarded.http.get("/health", headers=headers).status_code == 200
        assert guarded.http.get("/metrics", headers=headers).status_code == 200
    assert guarded.openai.models.list().data[0].id == NAME


def test_pages_of_named_origins_alone_are_let_in(guarded: Live, server: Live) -> None:
    def allowed(running: Live, origin: str) -> str | None:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Authorization": ""}
        value: str | None = running.http.options(CHAT, headers=headers).headers.get("access-control-allow-origin")
        return value

    assert allowed(guarded, "https://page.example") == "https://page.example"
    assert allowed(guarded, "https://other.example") is None
    assert allowed(server, "https://page.example") is None


def test_a_compressed_body_is_refused_by_name(server: Live) -> None:
    content = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    answer = server.http.post(
        COMPLETIONS, content=gzip.compress(content), headers={**headers, "content-encoding": "gzip"}
    )
    assert answer.status_code == 400
    assert "compressed (gzip)" in answer.json()["error"]["message"]
    for coding in ("identity", ""):
        answer = server.http.post(COMPLETIONS, content=content, headers={**headers, "content-encoding": coding})
        assert answer.status_code == 200


def test_bodies_that_are_too_large(guarded: Live) -> None:
    long = json.dumps({"prompt": "x" * 5000}).encode()

    def pieces() -> Iterator[bytes]:
        yield from (long[at : at + 100] for at in range(0, len(long), 100))

    headers = {"content-type": "application/json"}
    for content in (long, pieces()):
        answer = guarded.http.post(COMPLETIONS, content=content, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert "--max-body-mb" in answer.json()["error"]["message"]
    still_serves(guarded)


def test_a_body_that_lies_about_its_length_or_never_ends(guarded: Live) -> None:
    host, port = guarded.base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            b"Content-Type: application/json\r\nContent-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        raw.sendall(b"400\r\n" + b"x" * 0x400 + b"\r\n")
        for _ in range(40):
            if select.select([raw], [], [], 0)[0]:  # the answer is there, and the connection may be closed
                break
            raw.sendall(b"400\r\n" + b"x" * 0x400 + b"\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")
    still_serves(guarded)


def test_other_content_types(server: Live) -> None:
    answer = server.http.post(COMPLETIONS, data={"prompt": "x"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


def test_a_queue_that_is_full(guarded: Live) -> None:
    held = {"prompt": ["x"] * 4, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with guarded.slowed(), guarded.http.stream("POST", COMPLETIONS, json=held):
        answer = guarded.http.post(COMPLETIONS, json={"prompt": ["x"] * 3})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    guarded.until(lambda: guarded.idle)
    assert post(guarded, COMPLETIONS, {"prompt": ["x"] * 7})[0] == 400  # could never fit
    still_serves(guarded)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b'{"prompt": "\xc3"}',
        b"[" * 10_000,
        b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"metadata": ' + b'{"a":' * 190 + b"1" + b"}" * 190 + b', "prompt": "x"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "response_format": {"type": "json_object", "schema": {"maximum": 1e999}}}',
        b'{"prompt": "x", "unknown": [-' + b"9" * 309 + b".0]}",
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "max_tokens": 1e-3}',
        b"null",
        b"[]",
        b'"prompt"',
        b'{"prompt": "x"} {}',
        b"{'prompt': 'x'}",
        b'{"prompt": [' + b"true," * 50_000 + b"true]}",
        b'{"prompt": "x", "logit_bias": {' + b",".join(b'"a%d": "b"' % i for i in range(20_000)) + b"}}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_raw_bodies(server: Live, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/detokenize"):
        assert post(server, path, body)[0] == 400
    still_serves(server)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from([10**40, -1, 4096])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
FIELDS = [
    "prompt",
    "messages",
    "model",
    "n",
    "stop",
    "logit_bias",
    "seed",
    "tools",
    "response_format",
    "stream",
    "echo",
]


@settings(max_examples=some(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1), st.sampled_from([COMPLETIONS, CHAT]))
def test_values_of_all_kinds(server: Live, body: dict[str, Any], path: str) -> None:
    body["max_tokens"] = 1
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("tools[0].function.parameters", "tools[2].parameters"),
        ("messages[3].content", "input"),
        ("response_format.type", "text.format.type"),
        ("top_p", "top_p"),
    ],
)
def test_an_error_of_a_translated_request_names_the_field_of_its_api(field: str, named: str) -> None:
    names = Names("input", {"response_format": "text.format", ".function": ""}, [2])
    with pytest.raises(ApiError) as refused, names.used():
        raise ApiError(400, f"{field}: must be shorter", field)
    assert (refused.value.param, refused.value.message) == (named, f"{named}: must be shorter")
    with pytest.raises(ApiError) as refused, names.used():
        raise ApiError(400, f"{field} is a word that a client wrote", "user")
    assert refused.value.message == f"{field} is a word that a client wrote"
