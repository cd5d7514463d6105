"""Tools, schemas and reasoning over HTTP, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

import eagle_mlx as em
from eagle_mlx.serve.api.conversation import arguments_of
from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.chat import ToolCall
from eagle_mlx.serve.speculation import Speculation
from tests.clients.scripted_target import Line, call, scripted_target_folder
from tests.fakes import tiny_target
from tests.full import in_turn
from tests.serve.api.dialects import CHAT, DIALECTS, MESSAGES, RESPONSES, Answer, Dialect, Question, read
from tests.serve.api.live import NAME, Live, live, loaded_format, one_model
from tests.serve.chat.formats import ADDED, TEMPLATES, VOCAB, WEATHER, format_with_template

USER: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]


def streamed(server: Live, fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the message that the chunks build, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for chunk in server.openai.chat.completions.create(**fields, stream=True):
        delta = chunk.choices[0].delta.model_dump()
        message["content"] += delta["content"] or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for made in delta["tool_calls"] or []:
            if made.pop("index") == len(message["tool_calls"]):
                message["tool_calls"].append(made)
            else:
                assert made["id"] is made["type"] is made["function"]["name"] is None
                message["tool_calls"][-1]["function"]["arguments"] += made["function"]["arguments"]
        reason = chunk.choices[0].finish_reason or reason
    return message, reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_required_call_is_made(caller: Live, choice: Any) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "messages": USER,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 5,
    }
    answer = caller.openai.chat.completions.create(**fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    calls: Any = answer.message.tool_calls
    assert len(calls) == 1
    assert calls[0].function.name == "get_weather"
    assert set(json.loads(calls[0].function.arguments)) >= set(WEATHER["function"]["parameters"]["required"])
    message, reason = streamed(caller, fields)
    assert reason == "tool_calls"
    assert message["content"] == ""
    assert [made["function"] for made in message["tool_calls"]] == [made.function.model_dump() for made in calls]
    assert message["tool_calls"][0]["id"]

    # The next turn of the conversation, as clients send it.
    again = [*USER, answer.message, {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}]
    after = caller.openai.chat.completions.create(model=NAME, messages=again, tools=[WEATHER], max_tokens=4)
    assert after.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("kind", ["array", ["array", "null"]])
def test_the_arguments_of_a_required_call_are_an_object_whatever_type_the_schema_has(caller: Live, kind: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind, "maxProperties": 0}}}
    fields = {"messages": USER, "tools": [tool], "tool_choice": "required", "max_tokens": 200, "seed": 1}
    (choice,) = caller.http.post(CHAT.path, json=fields | {"parallel_tool_calls": False}).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {}


def test_tokens_of_a_conversation_include_its_tools(thinker: Live) -> None:
    fields = {"messages": USER, "tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": False}}
    answer = thinker.http.post("/tokenize", json=fields)
    assert "x-ignored-fields" not in answer.headers
    usage = thinker.http.post(CHAT.path, json=fields | {"max_tokens": 1}).json()["usage"]
    assert answer.json()["count"] == usage["prompt_tokens"]


def test_reasoning_is_returned_separately(thinker: Live) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "messages": USER,
        "max_tokens": 60,
        "seed": 3,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    thinking = thinker.openai.chat.completions.create(**fields).choices[0]
    assert thinking.message.reasoning_content  # type: ignore[attr-defined]
    assert not thinking.message.content
    message, reason = streamed(thinker, fields)
    assert message["reasoning_content"] == thinking.message.reasoning_content  # type: ignore[attr-defined]
    assert reason == thinking.finish_reason == "length"
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    plain = thinker.openai.chat.completions.create(**fields).choices[0].message
    assert plain.content
    assert not hasattr(plain, "reasoning_content")


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_effort_none_turns_reasoning_off(dialect: Dialect) -> None:
    template = TEMPLATES["thinking"].replace("and enable_thinking %}", "and enable_thinking is not false %}")
    tokenizer = format_with_template(template, ADDED["thinking"]).tokenizer
    target = em.Target(tiny_target(layers=2, vocab=VOCAB).model, tokenizer, name="thinking")
    effort: dict[str, Any] = {"reasoning": {"effort": "none"}} if dialect is RESPONSES else {"reasoning_effort": "none"}
    with live(lambda: Loaded(em.Engine(target))) as server:

        def prompt_tokens(**more: Any) -> int:
            body = dialect.body(Question((("user", "hi"),), max_tokens=2))
            usage = server.http.post(dialect.path, json=body | more).json()["usage"]
            return int(usage.get("prompt_tokens") or usage["input_tokens"])

        off = prompt_tokens(chat_template_kwargs={"enable_thinking": False})
        assert prompt_tokens(**effort) == off < prompt_tokens()
        assert prompt_tokens(**effort, chat_template_kwargs={"enable_thinking": True}) == prompt_tokens()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_effort_that_the_template_does_not_name_becomes_low_or_high(dialect: Dialect) -> None:
    words = "{'max': ' a b c d', 'high': ' a b', 'low': ' a'}"
    tokenizer = format_with_template("{{ messages[0].content + " + words + "[reasoning_effort] }}").tokenizer
    target = em.Target(tiny_target(layers=2, vocab=VOCAB).model, tokenizer, name="effort")
    with live(lambda: Loaded(em.Engine(target))) as server:

        def prompt_tokens(effort: str) -> int:
            body = dialect.body(Question((("user", "hi"),), max_tokens=2))
            body |= {
                CHAT: {"reasoning_effort": effort},
                MESSAGES: {"output_config": {"effort": effort}},
                RESPONSES: {"reasoning": {"effort": effort}},
            }[dialect]
            usage = server.http.post(dialect.path, json=body).raise_for_status().json()["usage"]
            return int(usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))

        assert prompt_tokens("low") < prompt_tokens("high") == prompt_tokens("xhigh") < prompt_tokens("max")
        if dialect is not MESSAGES:
            assert prompt_tokens("minimal") == prompt_tokens("low")


def test_an_unsupported_schema_fails_only_its_own_request(thinker: Live) -> None:
    schema = {"type": "string", "pattern": "(?<=a)b"}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": schema}}},
    }
    answer = thinker.http.post("/v1/chat/completions", json={"messages": USER, "response_format": form})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    fields = {"messages": USER, "max_tokens": 3}
    assert thinker.http.post("/v1/chat/completions", json=fields).status_code == 200


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a model that tries to make two calls, or one that does not fit the schema."""
    two = "Let me see.\n" + call("get_weather", city="Rome", days=3) + "\n" + call("get_weather", city="Oslo", days=4)
    wrong = "Hm.\n" + call("get_weather", city="Bonn", days=99)
    script = [Line("'two' in messages[-1].content", two), Line("'wrong' in messages[-1].content", wrong)]
    plan = LoadConfig(scripted_target_folder(tmp_path_factory.mktemp("talker"), script), Speculation(mode="ngram"))
    with live(models=one_model(lambda: load(plan, lambda _: None))) as running:
        yield running


def told(server: Live, dialect: Dialect, body: dict[str, Any]) -> list[Answer]:
    """Return the answer, whole and streamed."""
    whole = server.http.post(dialect.path, json=body)
    assert whole.status_code == 200, whole.text
    lines = server.http.post(dialect.path, json=body | {"stream": True}).text.split("\n")

    async def each() -> AsyncIterator[str]:
        for line in lines:
            yield line

    return [dialect.whole(whole.json()), asyncio.run(read(dialect, each()))]


def asking(dialect: Dialect, text: str, **function: Any) -> dict[str, Any]:
    """Return a question in an API's format, with one tool that the model may call or not."""
    fields = dialect.body(Question((("user", text),), max_tokens=200))
    tool = {**WEATHER["function"], **function}
    if dialect is CHAT:
        return fields | {"tools": [{"type": "function", "function": tool}]}
    if dialect is RESPONSES:
        return fields | {"tools": [{"type": "function", **tool}]}
    tool["input_schema"] = tool.pop("parameters")
    return fields | {"tools": [tool]}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_auto_makes_at_most_one_call_if_parallel_calls_are_off(talker: Live, dialect: Dialect) -> None:
    body = asking(dialect, "two")
    for answer in told(talker, dialect, body):
        assert [name for name, _ in answer.calls] == ["get_weather"] * 2
    at_most_one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    body |= at_most_one if dialect is MESSAGES else {"parallel_tool_calls": False}
    for answer in told(talker, dialect, body):
        assert [json.loads(given) for _, given in answer.calls] == [{"city": "Rome", "days": 3}]
        assert answer.text == "Let me see."
        assert answer.has_ended


def test_decoding_ends_with_the_only_call(talker: Live) -> None:
    body = asking(CHAT, "two")
    whole = talker.http.post(CHAT.path, json=body).json()
    for more in ({"n": 2}, {"spec_decode": "none"}, {"num_speculative_tokens": 2}):
        single = talker.http.post(CHAT.path, json=body | {"parallel_tool_calls": False} | more).json()
        answers = len(single["choices"])
        assert {choice["finish_reason"] for choice in single["choices"]} == {"tool_calls"}
        assert single["usage"]["completion_tokens"] < answers * (whole["usage"]["completion_tokens"] - 4)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_the_fragment_of_a_call_that_was_cut_short_is_omitted(talker: Live, dialect: Dialect) -> None:
    body = asking(dialect, "wrong")
    limit = next(key for key in ("max_tokens", "max_output_tokens") if key in body)
    cuts: list[dict[str, Any]] = [{limit: count} for count in (3, 4, 5)]
    if dialect is not RESPONSES:  # it has no stop strings
        cuts.append({"stop_sequences" if dialect is MESSAGES else "stop": ["Bonn"]})
    for cut in cuts:
        for answer in told(talker, dialect, body | cut):
            assert (answer.text, answer.calls, answer.has_ended) == ("Hm.", [], True)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_strict_holds_with_auto_once_a_call_begins(talker: Live, dialect: Dialect) -> None:
    for answer in told(talker, dialect, asking(dialect, "wrong")):
        assert [json.loads(given) for _, given in answer.calls] == [{"city": "Bonn", "days": 99}]
    for answer in told(talker, dialect, asking(dialect, "wrong", strict=True)):
        ((name, given),) = answer.calls
        assert name == "get_weather"
        arguments = json.loads(given)
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 9
        assert answer.text == "Hm."


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_anthropics_client_sends_results_back(talker: Live, stream: bool) -> None:
    """It begins with a conversation that the server should keep, and sends whole ones if the server cannot."""

    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Return the weather in a city."""
        cities.append(city)
        return f"{days} days of sun"

    cities: list[str] = []
    with anthropic.Anthropic(base_url=talker.base, api_key="none", max_retries=0) as client:
        runner: Any = client.beta.messages.tool_runner(
            model=NAME,
            max_tokens=200,
            messages=[{"role": "user", "content": "two"}],
            tools=[get_weather],
            stream=stream,
        )
        assert runner.until_done().stop_reason == "end_turn"
    assert cities == ["Rome", "Oslo"]


LONG = "".join(f"Line {n} of a letter.\n" for n in range(8))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a model that calls a tool with a long argument."""
    plan = LoadConfig(
        scripted_target_folder(tmp_path_factory.mktemp("writer"), [Line("names", call("write", text=LONG, end=True))]),
        Speculation(mode="ngram", no_memory=True),  # with earlier answers, a long draft is one event
    )
    with live(models=one_model(lambda: load(plan, lambda _: None))) as running:
        yield running


def writing(dialect: Dialect, strict: bool = True) -> dict[str, Any]:
    properties = {"text": {"const": LONG}, "end": {"const": True}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return asking(dialect, "x", name="write", parameters=schema, strict=strict)


def pieces_of(server: Live, dialect: Dialect, body: dict[str, Any]) -> tuple[Answer, list[str]]:
    """Return a streamed answer, and the pieces in which its calls' arguments came."""
    lines = server.http.post(dialect.path, json=body | {"stream": True}).raise_for_status().text.split("\n")
    answer, pieces, length = Answer(), list[str](), 0
    for line in lines:
        if line.startswith("data: {"):
            dialect.take(answer, json.loads(line.removeprefix("data: ")))
            arguments = "".join(given for _, given in answer.calls)
            pieces += [arguments[length:]] if len(arguments) > length else []
            length = len(arguments)
    return answer, pieces


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_long_argument_that_a_grammar_enforces_arrives_in_several_events(writer: Live, dialect: Dialect) -> None:
    arguments = {"text": LONG, "end": True}
    for more in ({}, {"spec_decode": "none"}):
        body = writing(dialect) | {"temperature": 0} | more
        answer, pieces = pieces_of(writer, dialect, body)
        ((name, given),) = answer.calls
        assert (name, json.loads(given)) == ("write", arguments)
        assert len(pieces) > 2, "16 tokens that the grammar forces are one event"
        whole = dialect.whole(writer.http.post(dialect.path, json=body).json())
        assert whole.said == answer.said
        assert whole.calls == answer.calls or dialect is MESSAGES
    _, pieces = pieces_of(writer, dialect, writing(dialect, strict=False))
    assert [json.loads(piece) for piece in pieces] == [arguments], "the call could still become text"


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_an_enforced_call_that_was_cut_short_is_returned_in_part(writer: Live, dialect: Dialect) -> None:
    limit = next(key for key in ("max_tokens", "max_output_tokens") if key in writing(dialect))
    cuts: list[dict[str, Any]] = [{limit: 8}]
    if dialect is not RESPONSES:  # it has no stop strings
        cuts.append({"stop_sequences" if dialect is MESSAGES else "stop": ["Line 4"]})
    for cut in cuts:
        body = writing(dialect) | {"temperature": 0} | cut
        whole = writer.http.post(dialect.path, json=body).raise_for_status().json()
        answer, pieces = pieces_of(writer, dialect, body)
        ((name, given),) = answer.calls
        assert name == "write"
        assert json.dumps({"text": LONG}).startswith(given)
        assert len(given) > 50
        assert len(pieces) > 1
        if dialect is MESSAGES:
            fields: Any = {**body, "model": NAME, "extra_body": {"temperature": 0}}
            del fields["temperature"]
            with (
                anthropic.Anthropic(base_url=writer.base, api_key="none", max_retries=0) as client,
                client.messages.stream(**fields) as stream,
            ):
                block: Any = stream.get_final_message().content[0]
            assert block.input == whole["content"][0]["input"] == {}
            assert whole["stop_reason"] == ("max_tokens" if limit in cut else "stop_sequence")
        else:
            assert dialect.whole(whole).calls == answer.calls
        if dialect is CHAT:
            assert whole["choices"][0]["finish_reason"] == ("length" if limit in cut else "stop")
        if dialect is RESPONSES:
            assert whole["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 12345678901234567890123, "b": [1, {"c": "x', {"a": 12345678901234567890123, "b": [1, {}]}),
        ('{"a": 1e999}', {}),
        ('{"a": ' + "[" * 9999, {}),
        ("{", {}),
    ],
)
def test_messages_have_the_complete_arguments_of_a_cut_call_as_an_object(text: str, value: dict[str, Any]) -> None:
    assert arguments_of(ToolCall(0, "id", "f", text)) == value


def test_text_of_a_custom_tool_comes_after_its_json(writer: Live) -> None:
    body = {"input": "x", "temperature": 0, "max_output_tokens": 60}
    body |= {"tools": [{"type": "custom", "name": "write"}], "tool_choice": {"type": "custom", "name": "write"}}
    whole = writer.http.post(RESPONSES.path, json=body).raise_for_status().json()
    lines = writer.http.post(RESPONSES.path, json=body | {"stream": True}).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    (item,) = whole["output"]
    assert item["status"] == "incomplete"
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == item["input"] != ""
    assert item["input"] == events[-1]["response"]["output"][0]["input"]


@pytest.mark.parametrize("dialect", in_turn(DIALECTS), ids=lambda dialect: dialect.name)
def test_strict_is_taken_but_not_enforced_if_calls_are_not_json(coder: Live, dialect: Dialect) -> None:
    for strict in (True, False):
        answer = coder.http.post(dialect.path, json=asking(dialect, "x", strict=strict))
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("dialect", in_turn(DIALECTS), ids=lambda dialect: dialect.name)
def test_many_tools_may_be_required(caller: Live, dialect: Dialect) -> None:
    properties = {f"field_{n}": {"type": "string", "description": "a text " * 10} for n in range(16)}
    body = asking(dialect, "x")
    (tool,) = body["tools"]
    function: Any = tool["function"] if dialect is CHAT else tool
    function["input_schema" if dialect is MESSAGES else "parameters"] = {"type": "object", "properties": properties}
    assert len(json.dumps([tool] * 45)) > 75_000
    for count, choice in ((45, "required"), (130, "auto")):
        tools = [json.loads(json.dumps(tool).replace("get_weather", f"tool_{n}")) for n in range(count)]
        wanted = {"type": {"required": "any"}.get(choice, choice)} if dialect is MESSAGES else choice
        limit = "max_output_tokens" if dialect is RESPONSES else "max_tokens"
        answer = caller.http.post(dialect.path, json=body | {"tools": tools, "tool_choice": wanted, limit: 1})
        assert answer.status_code == 400, answer.text
        assert "maximum" in answer.json()["error"]["message"], "only the tiny model's context is too short"


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES], ids=lambda dialect: dialect.name)
def test_allowed_tools_are_the_only_ones(caller: Live, dialect: Dialect) -> None:
    body = asking(dialect, "x")
    other = json.loads(json.dumps(body["tools"][0]).replace("get_weather", "other"))
    named = (
        {"type": "function", "function": {"name": "other"}}
        if dialect is CHAT
        else {"type": "function", "name": "other"}
    )
    for mode in ("required", "auto"):
        subset: dict[str, Any] = {"mode": mode, "tools": [named]}
        choice = {"type": "allowed_tools", **({"allowed_tools": subset} if dialect is CHAT else subset)}
        fields = body | {"tools": [*body["tools"], other], "tool_choice": choice, "seed": 5}
        answer = dialect.whole(caller.http.post(dialect.path, json=fields).raise_for_status().json())
        assert {name for name, _ in answer.calls} <= {"other"}
        assert answer.calls or mode == "auto"
    wrong = json.loads(json.dumps(fields).replace('"other"', '"neither"', 1)) | {"tool_choice": choice}
    assert caller.http.post(dialect.path, json=wrong).status_code == 400


ROME = '{"city": "Rome", "days": 3}'
FAMILIES = {
    "<|channel|>commentary": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}<|call|>"
    ),
    '"parameters": dictionary': f'Let me see.\n{{"name": "get_weather", "parameters": {ROME}}}',
    "<start_of_turn>": "Let me see.\n```tool_code\nget_weather(city='Rome', days=3)\n```",
    "<\uff5ctool▁calls▁begin\uff5c> ```json": (
        "Let me see.\n<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>"
        f"get_weather\n```json\n{ROME}\n```<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>"
    ),
}


MADE_UP = ("<\uff5ctool▁calls▁begin\uff5c> ```json", "look_outside")  # its client says that there is no such tool


@pytest.mark.parametrize(("mark", "name"), [*((mark, "get_weather") for mark in FAMILIES), MADE_UP])
def test_calls_of_other_families_are_the_same_in_every_api(mark: str, name: str, tmp_path: Path) -> None:
    line = Line("names", FAMILIES[mark].replace("get_weather", name))
    plan = LoadConfig(scripted_target_folder(tmp_path, [line], mark=mark), Speculation(mode="ngram"))
    with live(models=one_model(lambda: load(plan, lambda _: None))) as running:
        for dialect in DIALECTS:
            for answer in told(running, dialect, asking(dialect, "x")):
                assert answer.text == "Let me see."
                assert [(called, json.loads(given)) for called, given in answer.calls] == [(name, json.loads(ROME))]
                assert answer.has_ended


@pytest.fixture(scope="module")
def coder() -> Iterator[Live]:
    """A server with a model whose calls are not JSON."""
    with live(lambda: loaded_format("coder")) as running:
        yield running
