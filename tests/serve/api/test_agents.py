"""Requests of Claude Code and Codex CLI, and how their APIs refuse, fail, and share a batch with chats.

The requests have the form of late 2026 in public issues and captures; the words are ours. Sources:
github.com/ggml-org/llama.cpp/pull/20623 (the header among the system blocks),
github.com/webai-at-home/webai-at-home/issues/214 (Codex's fields), github.com/ROCm/ATOM/pull/2178 (its tools).
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.serve.api.model import Loaded
from tests.fakes import tiny_target
from tests.serve.api.live import DEPTH, NAME, Live, engine, live

MESSAGES, COUNT, RESPONSES, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "hi"}]
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
COMMAND = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}


def claude_code(turn: str) -> dict[str, Any]:
    """Return a turn after two tool calls. turn: the header's content, which changes every time."""
    calls = [
        {"type": "tool_use", "id": f"toolu_{i}", "name": "Bash", "input": {"command": command}}
        for i, command in enumerate(("ls", "cat a.py"))
    ]
    thought = {"type": "thinking", "thinking": "Two looks.", "signature": "sig"}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_0", "content": [{"type": "text", "text": "a.py"}]},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such file", "is_error": True, **EPHEMERAL},
    ]
    return {
        "model": NAME,
        "max_tokens": 32_000,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.37; cch={turn};"},
            {"type": "text", "text": "You help with code.", **EPHEMERAL},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<reminder/>"}, {"type": "text", "text": "Look."}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, *calls]},
            {"role": "user", "content": [*results, {"type": "text", "text": "Go on.", **EPHEMERAL}]},
        ],
        "tools": [
            {"name": "Bash", "description": "Runs a command.", "input_schema": COMMAND},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "xhigh"},
    }


def codex() -> dict[str, Any]:
    """Return a turn after a command."""
    text = {"type": "input_text", "text": "<environment_context/>"}
    call = {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": '{"command": "ls"}'}
    return {
        "model": NAME,
        "instructions": "You help with code.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Ask before writing."}],
            },
            {"type": "message", "role": "user", "content": [text]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "thought:QSBsb29rLg=="},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "description": "", "strict": False, "parameters": COMMAND},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
            },
            {
                "type": "namespace",
                "name": "mcp__docs",
                "description": "",
                "tools": [{"type": "function", "name": "read"}],
            },
            {"type": "tool_search", "execution": "client", "description": "", "parameters": COMMAND},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x-codex-installation-id": "0199"},
    }


def test_billing_headers_do_not_change_the_prompt_of_claude_code(thinker: Live) -> None:
    body = claude_code("a1")
    answer = thinker.http.post(f"{MESSAGES}?beta=true", json=body, headers={"anthropic-beta": "claude-code-20250219"})
    assert answer.status_code == 200, answer.text
    assert '"type":"message_stop"' in answer.text
    counted = [
        thinker.http.post(COUNT, json={key: value for key, value in claude_code(turn).items() if key in COUNTED}).json()
        for turn in ("a1", "a much longer header")
    ]
    told = [
        {"role": "system", "content": "You help with code.\n\nBe brief."},
        {"role": "user", "content": "<reminder/>\n\nLook."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Two looks.",
            "tool_calls": [called("toolu_0", "Bash", "ls"), called("toolu_1", "Bash", "cat a.py")],
        },
        {"role": "tool", "tool_call_id": "toolu_0", "content": "a.py"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no such file"},
        {"role": "user", "content": "Go on."},
    ]
    tools = [function("Bash", "Runs a command.", COMMAND)]
    thinks = {"enable_thinking": True}
    fields = {"messages": told, "tools": tools, "max_tokens": 1, "chat_template_kwargs": thinks}
    chat = thinker.http.post(CHAT, json=fields).json()
    assert counted == [{"input_tokens": chat["usage"]["prompt_tokens"]}] * 2
    system = "You help with code."
    counts = [
        thinker.http.post(COUNT, json={"messages": USER, "system": instructions}).json()
        for instructions in (system, f"x-anthropic-billing-header: cch=1;\n{system}")
    ]
    assert counts[0] == counts[1]


COUNTED = ("model", "system", "messages", "tools", "thinking", "context_management", "output_config")


@pytest.mark.parametrize("hosted", [False, True])
def test_deferred_tools_are_described_where_the_search_of_claude_code_found_them(caller: Live, hosted: bool) -> None:
    """The prompt keeps its beginning, so the prefix cache serves it. A hosted search would never find them."""
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    later = {"input_schema": {}, "defer_loading": True}
    names = ("Stop", "Stop", "Gone")
    body = {
        "tools": [
            {"name": "ToolSearch", "description": "Finds tools.", "input_schema": {}},
            {"name": "Stop", "description": "Stops a task.", **later},
            {"name": "Placeholder", **later},
            *([search] if hosted else []),
        ],
        "messages": [
            *USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "ToolSearch", "input": {"command": "x"}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": [{"type": "tool_reference", "tool_name": name} for name in names],
                    }
                ],
            },
        ],
    }
    about = {"name": "Stop", "description": "Stops a task.", "parameters": {}}
    definition = f"<functions>\n<function>{json.dumps(about, separators=(',', ':'))}</function>\n</functions>"
    notes = ("[the tool Stop is described above]", "[the tool Gone is not offered]")
    tools = [
        function("ToolSearch", "Finds tools.", {}),
        function("Stop", "Stops a task.", {}),
        function("Placeholder", None, {}),
    ]
    told = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [called("a", "ToolSearch", "x")]},
        {"role": "tool", "tool_call_id": "a", "content": "\n\n".join((definition, *notes))},
    ]
    fields = {"messages": told, "tools": tools if hosted else tools[:1], "max_tokens": 1}
    chat = caller.http.post(CHAT, json=fields).json()
    assert caller.http.post(COUNT, json=body).json() == {"input_tokens": chat["usage"]["prompt_tokens"]}
    forced = body | {"max_tokens": 200, "tool_choice": {"type": "tool", "name": "Stop"}}
    answer = caller.http.post(MESSAGES, json=forced).json()
    assert [block["name"] for block in answer["content"]] == ["Stop"]


def test_requests_of_codex_are_answered(thinker: Live) -> None:
    answer = thinker.http.post(RESPONSES, json=codex())
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.split("\n\n")[-2].split("data: ", 1)[1])
    assert last["type"] in ("response.completed", "response.incomplete")
    told = [
        {"role": "system", "content": "You help with code.\n\nAsk before writing."},
        {"role": "user", "content": "<environment_context/>\n\nLook."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "A look.",
            "tool_calls": [called("c1", "exec_command", "ls")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    ]
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tools = [
        function("exec_command", "", COMMAND),
        function("apply_patch", "The input follows this grammar (lark):\nx", text | {"additionalProperties": False}),
        function("mcp__docs__read", None, None),
    ]
    chat = thinker.http.post(CHAT, json={"messages": told, "tools": tools, "max_tokens": 1}).json()
    assert last["response"]["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_verbosity_reaches_templates_that_support_it() -> None:
    target = tiny_target(layers=2, tokenizer=True)
    assert target.tokenizer is not None
    template = target.tokenizer.chat_template
    target.tokenizer.chat_template = template + "{% if verbosity == 'low' %}Be brief.{% endif %}"
    with live(lambda: Loaded(em.Engine(target), "none", 0)) as running:
        for path, body in (
            (CHAT, lambda wish: {"messages": USER, "max_tokens": 1, "verbosity": wish}),
            (RESPONSES, lambda wish: {"input": USER, "max_output_tokens": 1, "text": {"verbosity": wish}}),
        ):
            usages = [running.http.post(path, json=body(wish)).json()["usage"] for wish in ("low", "high")]
            low, high = (usage.get("prompt_tokens") or usage.get("input_tokens") for usage in usages)
            assert low > high


def called(id: str, name: str, command: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps({"command": command})}}


def function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}], "max_tokens": 1}


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
ONE = {"messages": USER, "max_tokens": 1}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
SPACE = {"type": "namespace", "name": "a b", "tools": [{"type": "function", "name": "f" * 30}]}
BAD = {"type": "json_schema", "name": "a", "schema": {"type": "wizard"}}


@pytest.mark.parametrize("in_result", [False, True])
@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {
                "type": "document",
                "title": "Trees",
                "source": {"type": "text", "media_type": "text/plain", "data": "Oaks."},
            },
            "Trees\n\nOaks.",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Oaks."}]}},
            "Oaks.",
        ),
        (
            {
                "type": "search_result",
                "source": "https://trees.example",
                "title": "Trees",
                "content": [{"type": "text", "text": "Oaks."}, {"type": "text", "text": "Elms."}],
                "citations": {"enabled": True},
            },
            "Trees\n\nhttps://trees.example\n\nOaks.\n\nElms.",
        ),
    ],
)
def test_documents_of_text_and_search_results_are_read(
    thinker: Live, block: dict[str, Any], text: str, in_result: bool
) -> None:
    def body(part: dict[str, Any]) -> dict[str, Any]:
        if not in_result:
            return user(part, {"type": "text", "text": "Which trees?"})
        result = {"type": "tool_result", "tool_use_id": "toolu_0", "content": [part]}
        call = {"type": "tool_use", "id": "toolu_0", "name": "find", "input": {}}
        return {
            "max_tokens": 8,
            "messages": [*USER, {"role": "assistant", "content": [call]}, *user(result)["messages"]],
        }

    def asked(part: dict[str, Any]) -> tuple[Any, Any]:
        given = {**body(part), "temperature": 0, "max_tokens": 8}
        answer = thinker.http.post(MESSAGES, json=given).json()
        return [block.get("thinking") for block in answer["content"]], answer["usage"]["input_tokens"]

    assert asked(block) == asked({"type": "text", "text": text})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": USER}, "max_tokens: field required"),
        ({**ONE, "max_tokens": 0}, "max_tokens: "),
        ({"messages": [], "max_tokens": 1}, "messages: "),
        ({**ONE, "model": "claude-opus"}, "claude-opus"),
        ({**ONE, "top_p": 3}, "top_p must be a number above 0"),
        ({**ONE, "stop_sequences": ["x"] * 17}, "stop_sequences has 17 strings"),
        ({**ONE, "stop_sequences": ["x" * 300]}, "stop_sequences: a stop string is longer"),
        ({**ONE, "stop_sequences": [1]}, "stop_sequences[0]: "),
        ({**ONE, "spec_decode": "mtp"}, "spec_decode 'mtp' is not loaded"),
        ({**ONE, "thinking": {"type": "perhaps"}}, "thinking.type: "),
        ({**ONE, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({**ONE, "messages": [{"role": "user", "content": []}]}, "messages[0].content: "),
        (user(IMAGE), "messages[0].content[0]: image is not supported"),
        (user({"type": "document"}), "messages[0].content[0]: document is not supported"),
        (user({"type": "poem"}), "messages[0].content[0]: the type must be one of text, thinking"),
        (user({"type": "text"}), "messages[0].content[0].text: field required"),
        (user({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "messages[0].content[0]: a block of type"),
        (user("x"), "messages[0].content[0]: input should be an object"),
        ({**ONE, "tools": [{"name": "f f", "input_schema": {}}]}, "tools[0].name: "),
        ({**ONE, "tools": [SEARCH]}, "tools[0].type: web_search_20250305 runs on Anthropic's servers"),
        ({**ONE, "tools": [{"name": f"f{i}", "input_schema": {}} for i in range(129)]}, "tools: "),
        ({**ONE, "tool_choice": {"type": "tool"}}, "tool_choice.name: must name the tool"),
        ({**ONE, "tool_choice": {"type": "any"}}, "tool_choice: 'required' needs tools"),
        ({**ONE, "tools": [SEARCH, {"name": "f", "input_schema": {}}]}, "tools: there is no parser"),
        (
            {**ONE, "output_config": {"format": {"type": "json_schema", "schema": {"type": "wizard"}}}},
            "output_config.format.schema: ",
        ),
        ({**ONE, "messages": [{"role": "user", "content": "x " * 999}]}, "prompt is too long: "),
    ],
)
def test_invalid_messages_requests_are_refused(server: Live, body: dict[str, Any], reason: str) -> None:
    answer = server.http.post(MESSAGES, json=body)
    assert answer.status_code == (404 if "model" in body else 400)
    error = answer.json()
    assert error == {"type": "error", "error": {"type": error["error"]["type"], "message": error["error"]["message"]}}
    assert error["error"]["type"] == ("not_found_error" if "model" in body else "invalid_request_error")
    assert reason in error["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "required"),
        ({"input": 5}, "input", "valid"),
        ({"input": "x", "model": "gpt"}, "model", "not served"),
        ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id", "is not stored"),
        ({"input": "x", "conversation": "conv_0"}, "conversation", "not supported"),
        ({"input": "x", "background": True}, "background", "False"),
        ({"input": "x", "truncation": "last"}, "truncation", "disabled"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs", "0"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include[0]", "should be"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "greater"),
        (items({"type": "poem", "id": "a"}), "input[0]", "must be one of message"),
        (items({"type": "item_reference", "id": "msg_0_0"}), "input[0].id", "is not stored; send the item itself"),
        (items({"role": "user"}), "input[0].content", "required"),
        (items({"role": "wizard", "content": "x"}), "input[0].role", "developer"),
        (items(*USER, {"role": "user", "content": [{"type": "input_image"}]}), "input[1].content[0]", "input_image is"),
        (items({"role": "user", "content": [{"type": "input_file"}]}), "input[0].content[0]", "input_file is"),
        (items({"type": "function_call_output", "output": "x"}), "input[0].call_id", "required"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "runs on OpenAI's servers"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "required"),
        ({"input": "x", "tools": [{"type": "function", "name": "f"}]}, "tools", "no parser"),
        ({"input": "x", "tools": [SPACE]}, "tools[0].name", "pattern"),
        ({"input": "x", "tools": [{"type": "web_search"}, SPACE | {"name": "n" * 120}]}, "tools[1].name", "pattern"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "x", "text": {"format": BAD}}, "text.format.schema", "schema"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "required"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "required"),
        ({"input": "x", "text": {"verbosity": "terse"}}, "text.verbosity", "medium"),
        ({"input": "x " * 999}, "input", "maximum context length is 512 tokens, and the prompt is too long"),
    ],
)
def test_invalid_responses_requests_are_refused(server: Live, body: dict[str, Any], param: str, reason: str) -> None:
    answer = server.http.post(RESPONSES, json=body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if "model" in body else 400)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert reason in error["message"]


def test_unknown_paths_of_an_api_answer_in_its_error_format(server: Live) -> None:
    for method, path in [("GET", MESSAGES), ("POST", f"{MESSAGES}/batches")]:
        answer = server.http.request(method, path)
        assert answer.status_code in (404, 405)
        assert answer.json()["type"] == "error"
    assert "type" not in server.http.get("/v1/messagesandmore").json()


def test_failures_in_a_stream_have_the_format_of_each_api() -> None:
    def load() -> Loaded:
        made = engine()

        def broken() -> Any:
            made.abandon("a bolt is loose")
            return []

        made.step = broken  # type: ignore[method-assign]
        return Loaded(made, "ngram", DEPTH)

    with live(load) as server:
        told = server.http.post(MESSAGES, json={**ONE, "stream": True}).text.split("\n\n")[-2]
        assert told.startswith("event: error\n")
        assert json.loads(told.split("data: ")[1])["error"] == {"type": "api_error", "message": "a bolt is loose"}
        told = server.http.post(RESPONSES, json={"input": "x", "stream": True}).text.split("\n\n")[-2]
        response = json.loads(told.split("data: ")[1])["response"]
        assert told.startswith("event: response.failed\n")
        assert (response["status"], response["error"]["message"]) == ("failed", "a bolt is loose")
        assert server.http.post(MESSAGES, json=ONE).json()["error"]["type"] == "api_error"
        assert server.http.post(RESPONSES, json={"input": "x"}).status_code == 500


def test_three_apis_in_one_batch_give_the_same_answers_as_alone() -> None:
    def texts(server: Live, seed: int, api: str, more: dict[str, Any]) -> str:
        sampling = {"seed": seed, "temperature": 0.8, **more}
        messages = [{"role": "user", "content": f"def f{seed}(x):"}]
        if api == CHAT:
            body = {"messages": messages, "max_tokens": 24, **sampling}
            return str(server.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"])
        if api == MESSAGES:
            body = {"messages": messages, "max_tokens": 24, **sampling}
            return "".join(block["text"] for block in server.http.post(MESSAGES, json=body).json()["content"])
        body = {"input": messages, "max_output_tokens": 24, **sampling}
        output = server.http.post(RESPONSES, json=body).json()["output"]
        return "".join(item["content"][0]["text"] for item in output)

    with live(lambda: Loaded(engine("eagle"), "eagle", DEPTH)) as server, ThreadPoolExecutor(6) as pool:
        cases = [(seed, api) for seed in (1, 2) for api in (CHAT, MESSAGES, RESPONSES)]
        alone = [texts(server, *case, {"spec_decode": "none"}) for case in cases]
        with server.slowed(0.01):
            together = list(pool.map(lambda case: texts(server, *case, {}), cases))
        assert together == alone
        assert alone[0] == alone[1] == alone[2] != alone[3]
        assert server.service.totals.drafted > 0
