"""OpenAI Responses API answers: the text of Chat Completions as items, in stored conversations."""

from __future__ import annotations

import gc
import json
import tracemalloc
from statistics import median
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from eagle_mlx.serve.api.errors import ApiError
from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.stored import ResponseMemory, StoredResponse
from tests.full import diagonal
from tests.serve.api.given import TARGET
from tests.serve.api.live import DEPTH, NAME, Live, engine, live, wide
from tests.serve.chat.formats import CLOCK, WEATHER

URL, CHAT = "/v1/responses", "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "def f(x):"}]
TURNS: Any = [*USER, {"role": "assistant", "content": "return x"}, {"role": "user", "content": "def g(x):"}]
TOOL: Any = {"type": "function", **WEATHER["function"], "strict": True}
GREEDY: dict[str, Any] = {"max_output_tokens": 24, "temperature": 0.0}


def ask(server: Live, **body: Any) -> dict[str, Any]:
    answer = server.http.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def memory(server: Live) -> ResponseMemory:
    """Return the stored responses of requests without a key."""
    memories: dict[str, ResponseMemory] = server.server.config.app.state.responses  # type: ignore[union-attr]
    return memories.get("", ResponseMemory(0, 0))


def said(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def events(server: Live, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; each one's name is its type, and they are numbered."""
    pieces = server.http.post(URL, json={**body, "stream": True}).text.split("\n\n")
    assert pieces.pop() == ""
    named = [piece.split("\n") for piece in pieces if not piece.startswith(":")]  # a slow model's keep-alive comments
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name.removeprefix("event: ") for name, _ in named] == [event["type"] for event in bodies]
    assert [event["sequence_number"] for event in bodies] == list(range(len(bodies)))
    return bodies


def streamed(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that events build, which equal those of the last event."""
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    text = ""
    for event in stream[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            text = ""
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind == "output_item.done":
            items[-1] = event["item"]
        elif kind.endswith(".done") and "part" not in event:
            assert text == event.get("text", event.get("arguments", event.get("input")))
        assert event["output_index"] == len(items) - 1
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
    last = stream[-1]["response"]
    assert stream[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == items
    return items


def alike(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items without ids, which differ in every answer."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize(
    ("given", "sampling"),
    diagonal(
        ["def f(x):", USER, TURNS], [{"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"top_k": 9, "seed": 8}]
    ),
)
def test_the_text_is_that_of_chat_completions(server: Live, given: Any, sampling: dict[str, Any]) -> None:
    messages = USER if isinstance(given, str) else given
    fields = {"messages": [{"role": "system", "content": "Be brief."}, *messages], "max_tokens": 24, **sampling}
    chat = server.http.post(CHAT, json=fields).json()
    mine = {"input": given, "instructions": "Be brief.", "max_output_tokens": 24, **sampling}
    response = ask(server, **mine)
    assert said(response) == chat["choices"][0]["message"]["content"]
    cut_off = chat["choices"][0]["finish_reason"] == "length"
    ended = ("incomplete", {"reason": "max_output_tokens"}) if cut_off else ("completed", None)
    assert (response["status"], response["incomplete_details"]) == ended
    usage, used = response["usage"], chat["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (used["prompt_tokens"], used["completion_tokens"])
    assert usage["total_tokens"] == used["total_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert alike(streamed(events(server, **mine))) == alike(response["output"])


def test_the_official_client_reads_whole_and_streamed_answers(server: Live) -> None:
    whole = server.openai.responses.create(model=NAME, input="def f(x):", **GREEDY)
    with server.openai.responses.stream(model=NAME, input="def f(x):", **GREEDY) as stream:
        received = list(stream)
    pieces = [event.delta for event in received if event.type == "response.output_text.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.output_text
    assert received[-1].type == f"response.{whole.status}"
    assert TARGET is not None or whole.status == "incomplete"  # a random model never ends its turn
    assert received[-1].response.output_text == whole.output_text


def test_answers_match_the_official_types(server: Live) -> None:
    Response.model_validate(ask(server, input=USER, **GREEDY))
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    for event in events(server, input=USER, **GREEDY):
        adapter.validate_python(event)


def test_an_answer_follows_a_schema(server: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "a", "strict": True, "schema": schema | {"additionalProperties": False}}
    response = ask(server, input=USER, max_output_tokens=60, seed=1, text={"format": form})
    assert json.loads(said(response))["a"] in ("x", "y")
    assert (response["status"], response["text"]) == ("completed", {"format": form})
    assert json.loads(said(ask(server, input=USER, seed=1, max_output_tokens=60, text={"format": form}))) == json.loads(
        said(response)
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_function_is_called_and_its_output_goes_back(caller: Live, choice: Any) -> None:
    weather = [{"role": "user", "content": "How is the weather in Oslo?"}]
    free: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 300, "seed": 5}
    fields = {"input": weather, "tool_choice": choice, "parallel_tool_calls": False, **free}
    response = ask(caller, **fields)
    (call,) = response["output"]
    assert (call["type"], call["name"], response["status"]) == ("function_call", "get_weather", "completed")
    assert set(json.loads(call["arguments"])) >= set(WEATHER["function"]["parameters"]["required"])
    assert alike(streamed(events(caller, **fields))) == alike([call])
    # The next turn: from the stored response, from the whole conversation, and from Chat Completions.
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    parts = output | {"output": [{"type": "input_text", "text": "sunny"}]}
    function = {"name": call["name"], "arguments": call["arguments"]}
    told = [
        *weather,
        {"role": "assistant", "content": "", "tool_calls": [{"id": call["call_id"], "function": function}]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "sunny"},
    ]
    chat = {"messages": told, "tools": [WEATHER], "max_tokens": 9, "seed": 5}
    wanted = caller.http.post(CHAT, json=chat).json()["choices"][0]["message"]["content"]
    short = free | {"max_output_tokens": 9}
    assert said(ask(caller, input=[output], previous_response_id=response["id"], **short)) == wanted
    assert said(ask(caller, input=[*weather, call, parts], store=False, **short)) == wanted


def test_other_kinds_of_tools_become_functions(caller: Live) -> None:
    """Tools as Codex offers them. Tools that OpenAI itself would run are left out."""
    patch = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
    }
    space = {
        "type": "namespace",
        "name": "mcp__time",
        "description": "",
        "tools": [{"type": "function", **CLOCK["function"]}],
    }
    tools = [{"type": "web_search", "external_web_access": False}, patch, space]
    fields: dict[str, Any] = {"input": USER, "tools": tools, "max_output_tokens": 300, "parallel_tool_calls": False}
    (clock,) = ask(caller, **fields, tool_choice={"type": "function", "name": "clock", "namespace": "mcp__time"})[
        "output"
    ]
    assert (clock["type"], clock["name"], clock["namespace"]) == ("function_call", "clock", "mcp__time")
    chosen = fields | {"tool_choice": {"type": "custom", "name": "apply_patch"}, "seed": 1, "temperature": 0.2}
    answer = ask(caller, **chosen)
    assert [tool["type"] for tool in answer["tools"]] == ["custom", "namespace"], "a search needs further fields"
    Response.model_validate(answer)
    items = streamed(events(caller, **chosen))
    assert alike(items) == alike(answer["output"])
    # Both are sent back, each with its output.
    custom = {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "*** Begin Patch"}
    done = {"type": "custom_tool_call_output", "call_id": "b", "output": "Done"}
    clocked = {"type": "function_call_output", "call_id": clock["call_id"], "output": "noon"}
    back = [*USER, clock, custom, clocked, done]
    assert ask(caller, **fields | {"input": back, "max_output_tokens": 2})["usage"]["output_tokens"] == 2


def test_reasoning_items_can_be_sent_back(thinker: Live) -> None:
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "seed": 3}
    fields = {"input": USER, "max_output_tokens": 40, "include": ["reasoning.encrypted_content"], **thinks}
    answer = thinker.http.post(CHAT, json={"messages": USER, "max_tokens": 40, **thinks}).json()
    chat, used = answer["choices"][0]["message"], answer["usage"]["completion_tokens"]
    response = ask(thinker, **fields)
    (thought,) = response["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", chat["reasoning_content"])
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": used}
    assert alike(streamed(events(thinker, **fields))) == alike([thought])
    assert (
        ask(thinker, **fields | {"reasoning": {"effort": "none"}, "chat_template_kwargs": None})["output"][0]["type"]
        == "message"
    )
    # A client may send back the reasoning in clear text, or as the encrypted content that it received.
    told = [*USER, {"role": "assistant", "content": "y", "reasoning_content": chat["reasoning_content"]}, *USER]
    count = thinker.http.post("/tokenize", json={"messages": told}).json()["count"]
    shown = {"type": "reasoning", "id": "rs_1", "summary": [], "content": thought["content"]}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    for item in (shown, sealed):
        back = [*USER, item, {"role": "assistant", "content": [{"type": "output_text", "text": "y"}]}, *USER]
        assert ask(thinker, input=back, max_output_tokens=1)["usage"]["input_tokens"] == count
    foreign = [*USER, sealed | {"encrypted_content": "gAAAAABo"}, *USER]
    assert ask(thinker, input=foreign, max_output_tokens=1)["usage"]["input_tokens"] < count


def test_a_conversation_continues_from_a_stored_response(server: Live) -> None:
    first = ask(server, input="def f(x):", instructions="Be brief.", max_output_tokens=9, seed=1)
    follow = {"input": "def g(x):", "max_output_tokens": 9, "seed": 2}
    second = ask(server, previous_response_id=first["id"], **follow)
    # Instructions are not carried over, as in OpenAI's documentation.
    whole = [*USER, {"role": "assistant", "content": said(first)}, {"role": "user", "content": "def g(x):"}]
    assert said(second) == said(ask(server, **follow | {"input": whole}))
    third = events(server, previous_response_id=second["id"], **follow)[-1]["response"]
    longer = [*whole, {"role": "assistant", "content": said(second)}, {"role": "user", "content": "def g(x):"}]
    assert said(third) == said(ask(server, **follow | {"input": longer}))
    assert server.http.get(f"{URL}/{third['id']}").json() == third
    assert server.openai.responses.retrieve(first["id"]).output_text == said(first)
    server.openai.responses.delete(first["id"])
    with pytest.raises(openai.NotFoundError, match="was deleted, or is too old"):
        server.openai.responses.retrieve(first["id"])
    # Later responses keep the deleted turn.
    assert said(ask(server, previous_response_id=second["id"], **follow)) == said(third)


def test_input_tokens_are_those_that_the_response_counts(caller: Live) -> None:
    """LiteLLM counts the tokens of Anthropic's clients this way."""
    first = ask(caller, input=USER, instructions="Be brief.", max_output_tokens=2)
    for fields in (
        {"input": "def f(x):"},
        {"input": TURNS, "instructions": "Be brief.", "tools": [TOOL]},
        {"input": "def g(x):", "previous_response_id": first["id"]},
    ):
        counted = caller.openai.responses.input_tokens.count(model=NAME, **fields)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == ask(caller, **fields, max_output_tokens=2)["usage"]["input_tokens"]
    long = caller.http.post(f"{URL}/input_tokens", json={"input": "def f(x):\n" * 2000})
    assert long.json()["input_tokens"] > 2000
    assert caller.http.post(f"{URL}/input_tokens", json={}).json()["error"]["param"] == "input"


@pytest.mark.parametrize("nothing", [{}, {"input": None}, {"input": []}], ids=str)
def test_a_stored_response_can_be_followed_by_another_answer_without_new_input(
    server: Live, nothing: dict[str, Any]
) -> None:
    """LangGraph's agents with `use_previous_response_id` ask this way for a structured response."""
    first = ask(server, input="def f(x):", max_output_tokens=9, seed=1)
    second = ask(server, **nothing, previous_response_id=first["id"], max_output_tokens=9, seed=2)
    whole = [*USER, *first["output"]]
    assert said(second) == said(ask(server, input=whole, max_output_tokens=9, seed=2))
    third = ask(server, input=USER, previous_response_id=second["id"], max_output_tokens=9, seed=3)
    longer = [*whole, *second["output"], *USER]
    assert said(third) == said(ask(server, input=longer, max_output_tokens=9, seed=3))
    answer = server.http.post(URL, json=nothing)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_a_conversation_may_refer_to_items_of_stored_responses(server: Live) -> None:
    first = ask(server, input="def f(x):", max_output_tokens=9, seed=1)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    follow = {"max_output_tokens": 9, "seed": 2}
    second = ask(server, input=[*USER, reference, *USER], **follow)
    whole = [*USER, {"role": "assistant", "content": said(first)}, *USER]
    assert said(second) == said(ask(server, input=whole, **follow))
    third = ask(server, input=USER, previous_response_id=second["id"], **follow)
    longer = [*whole, {"role": "assistant", "content": said(second)}, *USER]
    assert said(third) == said(ask(server, input=longer, **follow))
    forgotten = ask(server, input=USER, store=False, **follow)["output"][0]["id"]
    for id, reason in [(reference["id"], "is given twice"), (forgotten, "is not stored; send the item itself")]:
        answer = server.http.post(URL, json={"input": [*USER, reference, {"type": "item_reference", "id": id}]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input[2].id")
        assert reason in error["message"]


def test_items_that_could_not_be_read_again_are_refused(server: Live) -> None:
    item = {"type": "media", "kind": "Ö"}
    assert server.http.post(URL, json={"input": [item, *USER]}).status_code == 400
    for kept in ({**item, "kind": "image"}, {"type": "input_image", "image_url": "x"}):
        first = ask(server, input=[kept, *USER], max_output_tokens=2)
        assert ask(server, input="go on", previous_response_id=first["id"], max_output_tokens=2)["status"]


def test_responses_that_are_not_stored_are_not_found() -> None:
    with live(settings=wide(Limits(responses=2))) as server:
        ids = [ask(server, input="x", max_output_tokens=1)["id"] for _ in range(3)]
        ids.append(ask(server, input="x", max_output_tokens=1, store=False)["id"])
        assert [server.http.get(f"{URL}/{id}").status_code for id in ids] == [404, 200, 200, 404]
        answer = server.http.post(URL, json={"input": "x", "previous_response_id": ids[0]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "previous_response_id")
        assert error["code"] == "previous_response_not_found"
        assert "the server keeps 2 responses" in error["message"]
        assert server.http.delete(f"{URL}/{ids[0]}").status_code == 404
        assert server.http.get(f"{URL}/{ids[1]}?stream=true").status_code == 400
    with live(settings=wide(Limits(response_bytes=6000))) as server:
        ids = [ask(server, input="x" * 400, max_output_tokens=1)["id"] for _ in range(3)]
        assert [server.http.get(f"{URL}/{id}").status_code for id in ids] == [404, 404, 200]


def test_the_size_of_stored_responses_is_that_of_their_memory() -> None:
    items = [{"type": "reasoning"}] * 1900 + USER
    with live(settings=wide(Limits(containers=2000))) as server:

        def added() -> int:
            """Return the bytes of a response, and of what other threads keep or free meanwhile."""
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            ask(server, input=items, max_output_tokens=1)
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        tracemalloc.start()
        first = ask(server, input=items, max_output_tokens=1)["id"]
        more = median(added() for _ in range(5))
        tracemalloc.stop()
        assert 0.5 * (counted := memory(server).nbytes / 6) < more < counted
        more_items = {"input": items[:200], "previous_response_id": first}
        answer = server.http.post(URL, json=more_items)
        assert answer.status_code == 413
        assert "more than 2000 items" in answer.json()["error"]["message"]


def test_a_client_with_many_responses_loses_its_own() -> None:
    memory = ResponseMemory(3, 1 << 20)
    for id, client in [("a", "quiet"), ("b", "busy"), ("c", "busy"), ("d", "busy"), ("e", "busy")]:
        memory.store(id, StoredResponse.of({"output": []}, (), client))
    for id in "bc":
        with pytest.raises(ApiError, match="is not stored"):
            memory.get(id)
    assert [memory.get(id).client for id in "ade"] == ["quiet", "busy", "busy"]
    for id in "ade":
        memory.delete(id)
    assert memory.nbytes == 0


def test_responses_belong_to_the_key_that_made_them() -> None:
    """Another key can neither read, continue nor delete them, nor make the server drop them."""
    with live(settings=wide(Limits(responses=2), api_key="mine yours")) as server:
        as_other = {"Authorization": "Bearer yours"}
        server.http.headers["Authorization"] = "Bearer mine"
        body = {"input": "x", "max_output_tokens": 1}
        id = ask(server, **body)["id"]
        missing = server.http.get(f"{URL}/resp_none").json()["error"]["message"]
        answer = server.http.get(f"{URL}/{id}", headers=as_other)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == missing.replace("resp_none", id)
        assert server.http.delete(f"{URL}/{id}", headers=as_other).status_code == 404
        answer = server.http.post(URL, json=body | {"previous_response_id": id}, headers=as_other)
        assert answer.json()["error"]["code"] == "previous_response_not_found"
        for _ in range(3):
            assert server.http.post(URL, json=body, headers=as_other).status_code == 200
        assert ask(server, **body, previous_response_id=id)["previous_response_id"] == id


def test_a_response_repeats_its_settings_with_defaults() -> None:
    with live(lambda: Loaded(engine(), "ngram", 3, {"temperature": 0.5})) as server:
        response = ask(server, input="x", max_output_tokens=1, top_p=0.9)
        assert (response["temperature"], response["top_p"]) == (0.5, 0.9)
        response = ask(server, input="x", max_output_tokens=1, temperature=0.0)
        assert (response["temperature"], response["top_p"]) == (0.0, 1.0)


def test_a_client_that_disconnects_frees_its_row_and_stores_nothing(server: Live) -> None:
    kept = memory(server).nbytes
    body = {"input": USER, "max_output_tokens": 400, "stream": True, "temperature": 0}
    with server.slowed(0.05):
        with server.http.stream("POST", URL, json=body) as answer:
            pieces = answer.iter_text()  # closes the stream once nothing refers to it
            next(pieces)
            server.until(lambda: server.service.running > 0)
        assert not server.idle
    assert server.until(lambda: server.idle) < 1.0
    assert memory(server).nbytes == kept


def test_embeddings_are_refused_with_an_alternative(server: Live) -> None:
    with pytest.raises(openai.InternalServerError, match="llama-server --embedding") as raised:
        server.openai.embeddings.create(model=NAME, input="x")
    assert raised.value.status_code == 501


def test_truncation_drops_the_earliest_turns_of_what_exceeds_the_context() -> None:
    """As OpenAI's Agents SDK asks for it. Instructions stay, and a question that is too long alone is refused."""
    question = "def f(x): return x + 1; " * 3
    turns = [{"role": role, "content": f"{n} {question}"} for n in range(12) for role in ("user", "assistant")]
    system, last = {"role": "developer", "content": "be brief"}, {"role": "user", "content": "now?"}
    fields = {"instructions": "rules", "max_output_tokens": 2, "temperature": 0.0}
    with live(lambda: Loaded(engine(context=512), "ngram", DEPTH)) as server:
        whole = {"input": [turns[0], system, *turns[1:], last], **fields}
        refused = server.http.post(URL, json=whole)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        answer = ask(server, **whole, truncation="auto")
        assert answer["truncation"] == "auto"
        used = answer["usage"]["input_tokens"]
        assert used < 512
        counts = [ask(server, **fields, input=[system, *turns[2 * n :], last], store=False) for n in (8,)]
        assert [count["usage"]["input_tokens"] for count in counts] == [used]
        later = ask(server, **fields, input=[last], previous_response_id=answer["id"], truncation="auto")
        assert 0 < later["usage"]["input_tokens"] < 512
        huge = {"role": "user", "content": question * 60}
        for conversation in ([huge], [*turns, huge]):
            refused = server.http.post(URL, json={**fields, "input": conversation, "truncation": "auto"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert ask(server, **fields, input=[last], truncation="auto")["usage"]["input_tokens"] < used
