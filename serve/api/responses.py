"""OpenAI's Responses API: answers as responses or as numbered events, and stored responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from sse_starlette import ServerSentEvent
from starlette.responses import JSONResponse, Response

from eagle_mlx.request import Output

from ..chat import Delta
from .answer import dumps, named_event, respond
from .chat import EncodedChat
from .conversation import BareTool, PartsAnswer, PendingParts, counted
from .errors import ERRORS, EVENTS, TOO_LONG, ApiError, documented
from .metrics import stats
from .model import Loaded
from .received import Received, client_of, key_of, models_of, receive
from .responses_request import Functions, Item, ItemReference, ResponsesRequest, chat_request, input_items, sealed
from .schema import SERVICE_TIER, ChatRequest
from .service import Call
from .stored import ResponseMemory, StoredResponse

Conversation = tuple[ChatRequest, Functions, Sequence[Item], Sequence[bytes]]
"""A chat, the functions it offers, its items, and those to store."""
Keep = Callable[[dict[str, Any]], None]
_ITEM: TypeAdapter[Item] = TypeAdapter(Item)
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_INPUT_EVENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""The event prefix and the input's name, by type of call."""


def _content(part: Delta) -> tuple[str, str, dict[str, Any]]:
    """Return the event prefix of a part without a call, its text, and further fields of these events."""
    if part.reasoning:
        return "response.reasoning_text", part.reasoning, {}
    return "response.output_text", part.content, {"logprobs": []}


class PendingResponse(PendingParts):
    """Numbers the events of a response, from its beginning on."""

    def __init__(self, call: Call, body: ResponsesRequest, conversation: Conversation, keep: Keep):
        """keep: stores the response, unless `store` is false."""
        chat, self.functions, self._items, _ = conversation
        super().__init__(call, chat, self.functions.names, body.stream_options)
        self.body, self.keep = body, keep
        self._settings = _settings(body) | body.model_dump(include={"temperature", "top_p"})
        """Until the model is loaded, only what the client gave."""
        self._number = -1  # the last event's; before the first, -1
        self._is_over = False  # whether the last event was written, which may be in the buffer of a slow reader

    async def prepare(self, received: Received[Any], loaded: Loaded) -> PartsAnswer:
        """Make the engine requests. With `truncation`, leave out the earliest 1, 2, 4, ... turns of a conversation that
        exceeds the context: by ever more, so that most later requests begin alike, for the prefix cache."""
        dropped, limits = 0, self.call.service.settings.limits
        while True:
            try:
                return await super().prepare(received, loaded)
            except ApiError as e:
                rest = _without_turns(self._items, max(1, dropped))
                if e.code != TOO_LONG or self.body.truncation != "auto" or len(rest) == len(self._items):
                    raise
            dropped, self._items = max(1, 2 * dropped), rest
            self._chat = await received.in_turn(lambda: chat_request(self.body, self._items, self.functions, limits))

    def answer(self, chat: EncodedChat) -> ResponseAnswer:
        params = chat.requests[0].params
        self._settings |= {"temperature": params.temperature, "top_p": params.top_p}
        return ResponseAnswer(self, chat)

    def keep_alive(self) -> ServerSentEvent:
        """Return `response.in_progress` again, or the event that comes before it."""
        if self._is_over:
            return ServerSentEvent(comment="over", sep="\n")
        kind = "response.created" if self._number < 0 else "response.in_progress"
        fields = self._numbered(kind, response=self.begun())
        return ServerSentEvent(dumps(fields), event=kind, sep="\n")

    def open(self) -> str:
        begun = self.begun()
        created = self.event("response.created", response=begun) if self._number < 0 else ""
        return created + self.event("response.in_progress", response=begun)

    def fail(self, error: ApiError) -> bytes:
        if self._number < 0:
            return self.event("error", code=error.code, message=error.message, param=error.param).encode()
        code = "invalid_prompt" if error.status == 400 else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": error.message}}
        return self.end(self.begun() | failed).encode()

    def end(self, response: dict[str, Any]) -> str:
        self._is_over = True
        return self.event(f"response.{response['status']}", response=response)

    def event(self, type: str, **fields: Any) -> str:
        return named_event(self._numbered(type, **fields))

    def _numbered(self, type: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": type, "sequence_number": self._number, **fields}

    def begun(self) -> dict[str, Any]:
        return {
            "id": f"resp_{self.call.id}",
            "object": "response",
            "created_at": self.call.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.call.service.name,
            "output": [],
            **self._settings,
            "service_tier": SERVICE_TIER,
            "truncation": self.body.truncation or "disabled",
            "usage": None,
        }


def _without_turns(items: Sequence[Item], count: int) -> Sequence[Item]:
    """Return a conversation from a later question of the user on, with all system messages. The last question stays."""
    roles = [getattr(item, "role", None) for item in items]  # None for items that are no messages
    starts = [at for at, role in enumerate(roles) if role == "user"]
    start = starts[min(count, len(starts) - 1)] if starts else 0
    rules = [items[at] for at in range(start) if roles[at] in ("system", "developer")]
    return [*rules, *items[start:]]


class ResponseAnswer(PartsAnswer):
    """A chat's answer as a response, or as numbered events that write its items in turn."""

    def __init__(self, pending: PendingResponse, chat: EncodedChat):
        super().__init__(pending, chat)
        self._form, self._functions = pending, pending.functions
        self._id = ""

    def ended(self, output: Output) -> dict[str, Any]:
        """Return the response of an answer that is complete or cut off; store it unless `store` is false."""
        cut_off = output.finish_reason == "length"
        last = "incomplete" if cut_off else "completed"
        items = [self._item(i, last if i == self._index else "completed") for i in range(len(self.parts))]
        response = self._form.begun() | {
            "status": last,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": items,
            "usage": self._usage(output),
            **stats(self.call, [output]),
        }
        if self._form.body.store is not False:
            self._form.keep(response)
        return response

    def open(self) -> str:
        return self._form.open()

    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        last = self.end("incomplete" if output.finish_reason == "length" else "completed")
        return last + self._form.end(self.ended(output))

    def start(self) -> str:
        item = self._item(self._index, "in_progress")
        self._id = item["id"]
        if self.parts[-1].tool_call is not None:
            item[_INPUT_EVENTS[item["type"]][1]] = ""
            return self._form.event("response.output_item.added", output_index=self._index, item=item)
        empty = item["content"][0] | {"text": ""}
        item["content"] = []
        item.pop("encrypted_content", None)
        added = self._form.event("response.output_item.added", output_index=self._index, item=item)
        return added + self._of_item("response.content_part.added", content_index=0, part=empty)

    def extend(self, more: Delta) -> str:
        if (call := self.parts[-1].tool_call) is not None and more.tool_call is not None:
            if self._functions.takes_text(call):
                return ""  # `end` sends it, because a piece of JSON is no text
            return self._of_item("response.function_call_arguments.delta", delta=more.tool_call.arguments)
        name, text, fields = _content(more)
        return self._of_item(f"{name}.delta", content_index=0, delta=text, **fields)

    def end(self, status: str) -> str:
        if not self.parts:
            return ""
        part, item = self.parts[-1], self._item(self._index, status)
        if part.tool_call is not None:
            name, field = _INPUT_EVENTS[item["type"]]
            is_text = self._functions.takes_text(part.tool_call)
            events = self._of_item(f"{name}.delta", delta=item[field]) if is_text else ""
            events += self._of_item(f"{name}.done", name=item["name"], **{field: item[field]})
        else:
            name, text, fields = _content(part)
            events = self._of_item(f"{name}.done", content_index=0, text=text, **fields)
            events += self._of_item("response.content_part.done", content_index=0, part=item["content"][0])
        return events + self._form.event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self.parts) - 1

    def _of_item(self, type: str, **fields: Any) -> str:
        return self._form.event(type, item_id=self._id, output_index=self._index, **fields)

    def _item(self, index: int, status: str) -> dict[str, Any]:
        """Return a part as an item. A call is incomplete only if it was cut off itself."""
        part = self.parts[index]
        if part.tool_call is not None:
            item = self._functions.called(part.tool_call)
            status = "completed" if status == "incomplete" and not self._deltas.reader.has_open_call else status
        elif thought := part.reasoning:
            item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}
            if "reasoning.encrypted_content" in (self._form.body.include or ()):
                item["encrypted_content"] = sealed(thought)
        else:
            content = {"type": "output_text", "text": part.content, "annotations": [], "logprobs": []}
            item = {"type": "message", "role": "assistant", "content": [content]}
        return {"id": f"{_ID_PREFIXES[item['type']]}_{self.call.id}_{index}", **item, "status": status}

    def _usage(self, output: Output) -> dict[str, Any]:
        return {
            "input_tokens": output.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(output.tokens),
            "output_tokens_details": {"reasoning_tokens": self._deltas.thought_tokens(output)},
            "total_tokens": output.prompt_tokens + len(output.tokens),
        }


def _settings(body: ResponsesRequest) -> dict[str, Any]:
    """Return the settings of a request as its response repeats them."""
    form, choice = body.text.format if body.text is not None else None, body.tool_choice or "auto"
    tools = [tool for tool in body.tools or () if not isinstance(tool, BareTool)]  # the others are not offered
    return {
        **body.model_dump(include={"instructions", "max_output_tokens", "previous_response_id"}),
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": body.reasoning.model_dump(include={"effort", "summary"}) if body.reasoning else None,
        "store": body.store is not False,
        "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [tool.model_dump(by_alias=True, exclude_unset=True) for tool in tools],
    }


router = APIRouter()


def memory_of(request: Request) -> ResponseMemory:
    """Return the stored responses of the request's API key; requests without a key share them."""
    memories: dict[str, ResponseMemory] = request.app.state.responses
    limits = models_of(request).settings.limits
    return memories.setdefault(key_of(request) or "", ResponseMemory(limits.responses, limits.response_bytes))


async def _conversation(request: Request) -> tuple[Received[ResponsesRequest], Conversation]:
    memory = memory_of(request)
    received = await receive(request, ResponsesRequest)
    body = received.body
    limits, earlier = models_of(request).settings.limits, list[bytes]()
    if body.previous_response_id:
        before = memory.get(body.previous_response_id, "previous_response_id")
        earlier += before.items
        received = replace(received, is_long=received.is_long or before.nbytes >= limits.long_bytes)

    given, references = input_items(body), dict[str, bytes]()
    for at, item in enumerate(given):
        if isinstance(item, ItemReference):
            if item.id in references:  # few references could make a long conversation
                raise ApiError(400, f"input[{at}].id: item {item.id[:100]!r} is given twice", f"input[{at}].id")
            references[item.id] = memory.item(item.id, f"input[{at}].id")
    received = replace(received, is_long=received.is_long or sum(map(len, references.values())) >= limits.long_bytes)

    def read() -> Conversation:
        functions = Functions(body.tools or ())
        new = [_ITEM.validate_json(references[x.id]) if isinstance(x, ItemReference) else x for x in given]
        if len(earlier) + len(new) > limits.containers:
            message = f"the conversation has more than {limits.containers} items; begin a new one"
            raise ApiError(413, message, "input", "request_too_large")
        added = (dumps(item.model_dump(exclude_unset=True)).encode() for item in new)
        kept = [*earlier, *added] if body.store is not False else ()
        items = [*map(_ITEM.validate_json, earlier), *new]
        return chat_request(body, items, functions, limits), functions, items, kept

    return received, await received.in_turn(read)


@router.post("/v1/responses", responses=documented(*ERRORS, **EVENTS))
async def responses(request: Request) -> Response:
    """Return the next turn of a conversation, for clients of OpenAI's newer API."""
    received, conversation = await _conversation(request)
    service = models_of(request).named(received.body.model)

    def keep(response: dict[str, Any]) -> None:
        memory_of(request).store(response["id"], StoredResponse.of(response, conversation[-1], client_of(request)))

    return await respond(received, service, lambda call: PendingResponse(call, received.body, conversation, keep))


@router.post("/v1/responses/input_tokens", responses=documented(*ERRORS))
async def input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation."""
    received, (chat, functions, *_) = await _conversation(request)
    return await counted(received, chat, functions.names, object="response.input_tokens")


@router.get("/v1/responses/{id}", responses=documented(400, 401, 404))
async def response(request: Request, id: str) -> Response:
    """Return a stored response."""
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "stream: a finished response cannot be streamed; leave out stream", "stream")
    return Response(memory_of(request).get(id).json, media_type="application/json")


@router.delete("/v1/responses/{id}", responses=documented(401, 404))
async def delete_response(request: Request, id: str) -> Response:
    """Delete a stored response."""
    memory_of(request).delete(id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})
