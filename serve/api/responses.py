"""OpenAI's Responses API: answers as responses or as numbered events, and stored responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, TypeAdapter
from starlette.responses import Response

from eagle_mlx.request import Output

from ..chat import Delta
from .answer import Measured, dumps, named_event, stats
from .conversation import PartsAnswer
from .errors import ERRORS, EVENTS, ApiError, Shape, documented
from .flow import body_of, in_turn, json_response, models_of, respond
from .limits import Limits
from .responses_request import (
    ID_PREFIXES,
    Ended,
    Functions,
    Item,
    OutputCustomCall,
    OutputFunctionCall,
    OutputMessage,
    OutputReasoning,
    ResponsesRequest,
    chat_request,
    input_items,
    listed,
    sealed,
)
from .schema import SERVICE_TIER


class ResponsesUsage(Shape):
    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseObject(Measured):
    """A response. It repeats the request's settings, with defaults filled in."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Ended
    background: Literal[False]
    error: None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None] | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponsesUsage


class InputItem(Shape):
    """An item from the client or an earlier response; its other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str
    status: str


class InputItemList(Shape):
    object: Literal["list"]
    data: list[InputItem]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


@dataclass(frozen=True)
class StoredResponse:
    response: dict[str, Any]
    items: Sequence[Item]
    """The whole conversation, including the response."""
    nbytes: int
    """JSON size of the conversation, including earlier turns."""

    def input_items(self) -> list[dict[str, Any]]:
        """Return the conversation before the response, oldest item first, each with an id and a status."""
        id = str(self.response["id"]).removeprefix("resp_")
        count = len(self.items) - len(self.response["output"])
        return [listed(item, f"{id}_in_{index}") for index, item in enumerate(self.items[:count])]


class ResponseMemory:
    """Stores the most recently used responses, within a count and a size. Belongs to the event loop.

    Each entry holds its whole conversation, so it does not depend on earlier entries.
    """

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes = most, most_bytes
        self.nbytes = 0
        self._responses: dict[str, StoredResponse] = {}

    def store(self, id: str, stored: StoredResponse) -> None:
        self._responses[id] = stored
        self.nbytes += stored.nbytes
        while len(self._responses) > self.most or self.nbytes > self.most_bytes:
            self.delete(next(iter(self._responses)))

    def get(self, id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises ApiError if it is missing: 400 if the field `param` names it, else 404."""
        found = self.delete(id, param)
        self.store(id, found)  # as the most recently used
        return found

    def delete(self, id: str, param: str | None = None) -> StoredResponse:
        """Remove and return a stored response. Raises ApiError as `get` does."""
        if id not in self._responses:
            message = (
                f"response {id[:100]!r} is not stored: it was sent with store false, was deleted, or is too old (the "
                f"server keeps {self.most} responses, at most {self.most_bytes >> 20} MB). Send the conversation as "
                "input"
            )
            code = "response_not_found" if param is None else "previous_response_not_found"
            raise ApiError(404 if param is None else 400, message, param, code)  # as in OpenAI's API
        found = self._responses.pop(id)
        self.nbytes -= found.nbytes
        return found


Keep = Callable[[dict[str, Any]], None]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
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


class ResponseAnswer(PartsAnswer):
    """A chat's answer as a response, or as numbered events that write its items in turn."""

    def __init__(self, body: ResponsesRequest, items: Sequence[Item], keep: Keep, limits: Limits):
        """items: the conversation. keep: stores the response with its items, unless `store` is false."""
        self._functions = Functions(body.tools or ())
        chat = chat_request(body, items, self._functions)
        super().__init__(chat, body.max_output_tokens, self._functions.names, limits)
        self.body, self._keep = body, keep
        self._number = -1
        self._id = ""

    def ended(self, output: Output) -> dict[str, Any]:
        """Return the response of an answer that is complete or cut off; store it unless `store` is false."""
        cut_off = output.finish_reason == "length"
        last = "incomplete" if cut_off else "completed"
        items = [self._item(i, last if i == self._index else "completed") for i in range(len(self.parts))]
        response = self._begun() | {
            "status": last,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": items,
            "usage": self._usage(output),
            **stats(self.call, [output]),
        }
        if self.body.store is not False:
            self._keep(response)
        return response

    def open(self) -> str:
        begun = self._begun()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        last = self.end("incomplete" if output.finish_reason == "length" else "completed")
        response = self.ended(output)
        return last + self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> bytes:
        fields = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return named_event({**fields, "sequence_number": 0}).encode()

    def fail(self, error: ApiError) -> bytes:
        code = "invalid_prompt" if error.status == 400 else "server_error"
        response = self._begun() | {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=response).encode()

    def start(self) -> str:
        item = self._item(self._index, "in_progress")
        self._id = item["id"]
        if self.parts[-1].tool_call is not None:
            item[_INPUT_EVENTS[item["type"]][1]] = ""
            return self._event("response.output_item.added", output_index=self._index, item=item)
        empty = item["content"][0] | {"text": ""}
        item["content"] = []
        item.pop("encrypted_content", None)
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return added + self._of_item("response.content_part.added", content_index=0, part=empty)

    def extend(self, more: Delta) -> str:
        if more.tool_call is not None:
            item = self._item(self._index, "completed")
            name, field = _INPUT_EVENTS[item["type"]]
            return self._of_item(f"{name}.delta", delta=item[field])
        name, text, fields = _content(more)
        return self._of_item(f"{name}.delta", content_index=0, delta=text, **fields)

    def end(self, status: str) -> str:
        if not self.parts:
            return ""
        part, item = self.parts[-1], self._item(self._index, status)
        if part.tool_call is not None:
            name, field = _INPUT_EVENTS[item["type"]]
            events = self._of_item(f"{name}.done", name=item["name"], **{field: item[field]})
        else:
            name, text, fields = _content(part)
            events = self._of_item(f"{name}.done", content_index=0, text=text, **fields)
            events += self._of_item("response.content_part.done", content_index=0, part=item["content"][0])
        return events + self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self.parts) - 1

    def _of_item(self, type: str, **fields: Any) -> str:
        return self._event(type, item_id=self._id, output_index=self._index, **fields)

    def _event(self, type: str, **fields: Any) -> str:
        self._number += 1
        return named_event({"type": type, "sequence_number": self._number, **fields})

    def _begun(self) -> dict[str, Any]:
        body = self.body
        form = body.text.format if body.text is not None else None
        choice = body.tool_choice or "auto"
        echoed = {"instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p"}
        return {
            "id": f"resp_{self.call.id}",
            "object": "response",
            "created_at": self.call.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            **body.model_dump(include=echoed),
            "metadata": body.metadata or {},
            "model": self.call.service.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": body.reasoning.model_dump(include={"effort", "summary"}) if body.reasoning else None,
            "store": body.store is not False,
            "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump(by_alias=True, exclude_unset=True) for tool in body.tools or ()],
            "service_tier": SERVICE_TIER,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, index: int, status: str) -> dict[str, Any]:
        """Return a part as an item. Calls are always complete, because a cut-off call is text."""
        part = self.parts[index]
        if part.tool_call is not None:
            item = self._functions.called(part.tool_call)
            status = "in_progress" if status == "in_progress" else "completed"
        elif thought := part.reasoning:
            item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}
            if "reasoning.encrypted_content" in (self.body.include or ()):
                item["encrypted_content"] = sealed(thought)
        else:
            content = {"type": "output_text", "text": part.content, "annotations": [], "logprobs": []}
            item = {"type": "message", "role": "assistant", "content": [content]}
        return {"id": f"{ID_PREFIXES[item['type']]}_{self.call.id}_{index}", **item, "status": status}

    def _usage(self, output: Output) -> dict[str, Any]:
        return {
            "input_tokens": output.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(output.tokens),
            "output_tokens_details": {"reasoning_tokens": self.chat.thought_tokens(output)},
            "total_tokens": output.prompt_tokens + len(output.tokens),
        }


router = APIRouter()
_MOST_ITEMS = 100
"""Maximum items per page, as in OpenAI's API."""


def memory_of(request: Request) -> ResponseMemory:
    memory: ResponseMemory = request.app.state.responses
    return memory


@router.post("/v1/responses", responses=documented(ResponseObject, *ERRORS, **EVENTS))
async def responses(request: Request) -> Response:
    """Return the next turn of a conversation, for clients of OpenAI's newer API."""
    memory = memory_of(request)
    body = await body_of(request, ResponsesRequest)
    service = models_of(request).named(body.model)
    items, nbytes = input_items(body), request.state.size
    if body.previous_response_id:
        before = memory.get(body.previous_response_id, "previous_response_id")
        items, nbytes = [*before.items, *items], before.nbytes + nbytes

    def keep(response: dict[str, Any]) -> None:
        whole = [*items, *_ITEMS.validate_python(response["output"])]
        memory.store(response["id"], StoredResponse(response, whole, nbytes + len(dumps(response).encode())))

    answer = await in_turn(request, lambda: ResponseAnswer(body, items, keep, service.settings.limits))
    return await respond(request, service, answer, body, body.stream)


@router.get("/v1/responses/{id}", responses=documented(ResponseObject, 400, 401, 404))
async def response(request: Request, id: str) -> Response:
    """Return a stored response."""
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "stream: a finished response cannot be streamed; leave out stream", "stream")
    return json_response(memory_of(request).get(id).response)


@router.get("/v1/responses/{id}/input_items", responses=documented(InputItemList, 400, 401, 404))
async def input_items_of(request: Request, id: str) -> Response:
    """Return the conversation that a response answers, in pages."""
    items = memory_of(request).get(id).input_items()
    return json_response(_page(items, request.query_params))


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a list by `order`, `after` and `limit`. Raises ApiError 400 that names the parameter."""
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order: must be asc or desc", "order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _MOST_ITEMS):
        raise ApiError(400, f"limit: must be an integer from 1 to {_MOST_ITEMS}", "limit")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError(400, f"after: there is no item with the id {after[:100]!r}", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > len(page)}


@router.delete("/v1/responses/{id}", responses=documented(DeletedResponse, 401, 404))
async def delete_response(request: Request, id: str) -> Response:
    """Delete a stored response."""
    memory_of(request).delete(id)
    return json_response(DeletedResponse(id=id, object="response", deleted=True))
