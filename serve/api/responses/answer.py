"""Answers as responses of the Responses API, or as a stream of numbered events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState

from ..answer import Part, dumps, named_event, part_of, parts_of, stats, stream_answers
from ..chat import ChatAnswer, DeltaStream
from ..errors import ApiError
from ..schema import SERVICE_TIER
from ..service import Call
from ..worker import RequestEvent
from .schema import InputTokensDetails, Item, OutputTokensDetails, ResponsesRequest, ResponsesUsage
from .translate import Functions, echoed, sealed

ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""Prefix of an item's id, by item type."""


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
        return [_described(item, f"{id}_in_{index}") for index, item in enumerate(self.items[:count])]


def _described(item: Item, place: str) -> dict[str, Any]:
    """Return an item as OpenAI lists it. place: the last part of its id if the client gave none."""
    fields = item.model_dump(exclude_none=True)
    kind = fields.setdefault("type", "message")
    if kind == "message" and isinstance(fields["content"], str):
        part = "output_text" if fields["role"] == "assistant" else "input_text"
        fields["content"] = [{"type": part, "text": fields["content"]}]
    for part in fields["content"] if kind == "message" else ():
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    return {"id": f"{ID_PREFIXES[kind]}_{place}", "status": "completed", **fields}


class ResponseMemory:
    """Stores the most recently used responses, within a count and a size. Belongs to the event loop.

    Each entry holds its whole conversation, so it does not depend on earlier entries.
    """

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes = most, most_bytes
        self.nbytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def store(self, id: str, stored: StoredResponse) -> None:
        self._responses[id] = stored
        self.nbytes += stored.nbytes
        while len(self._responses) > self.most or self.nbytes > self.most_bytes:
            self.nbytes -= self._responses.popitem(last=False)[1].nbytes

    def get(self, id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises ApiError if it is missing: 400 if the field `param` names it, else 404."""
        found = self._responses.get(id)
        if found is None:
            raise self._missing(id, param)
        self._responses.move_to_end(id)
        return found

    def delete(self, id: str) -> None:
        """Delete a stored response. Raises ApiError 404 if it is missing."""
        found = self._responses.pop(id, None)
        if found is None:
            raise self._missing(id, None)
        self.nbytes -= found.nbytes

    def _missing(self, id: str, param: str | None) -> ApiError:
        message = (
            f"response {id[:100]!r} is not stored: it was sent with store false, was deleted, or is too old (the "
            f"server keeps {self.most} responses, at most {self.most_bytes >> 20} MB). Send the conversation as input"
        )
        if param is not None:  # as in OpenAI's API
            return ApiError(400, message, param, "previous_response_not_found")
        return ApiError(404, message, None, "response_not_found")


_INPUT_EVENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""The event prefix and the input's name, by type of call."""
_CONTENT_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseWriter:
    """Writes items in turn: each is added, extended and done before the next."""

    def __init__(self, answer: ResponseAnswer, call: Call):
        self._answer, self._call = answer, call
        self._deltas = DeltaStream(answer.chat)
        self._parts: list[Part] = []
        """All parts so far; the last may grow."""
        self._is_open = False
        self._id = ""
        """Id of the last item."""
        self._number = -1

    def open(self) -> str:
        begun = self._answer.begun(self._call)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def write(self, event: RequestEvent) -> str:
        return "".join(self._piece(part_of(delta)) for delta in self._deltas.push(event))

    def close(self, output: Output, more: str = "") -> str:
        cut_off = output.finish_reason == "length"
        last = self._done("incomplete" if cut_off else "completed")
        response = self._answer.ended(self._call, output, self._parts)
        return last + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        return self._event("response.failed", response=self._answer.failed(self._call, error)).encode()

    def _piece(self, part: Part) -> str:
        before = ""
        if self._is_open and self._parts[-1].continues_with(part):
            self._parts[-1].text += part.text
        else:
            before = self._done("completed") + self._added(part)
        if part.call is not None:
            item = self._item("completed")
            name, field = _INPUT_EVENTS[item["type"]]
            return before + self._of_item(f"{name}.delta", delta=item[field])
        more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        return before + self._of_item(f"{_CONTENT_EVENTS[part.kind]}.delta", content_index=0, delta=part.text, **more)

    def _added(self, part: Part) -> str:
        self._parts.append(part)
        self._is_open = True
        item = self._item("in_progress")
        self._id = item["id"]
        if part.call is not None:
            item[_INPUT_EVENTS[item["type"]][1]] = ""
            return self._event("response.output_item.added", output_index=self._index, item=item)
        item["content"] = []
        item.pop("encrypted_content", None)
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return added + self._of_item("response.content_part.added", content_index=0, part=self._content(""))

    def _done(self, status: str) -> str:
        """Return the events that end the open item."""
        if not self._is_open:
            return ""
        self._is_open = False
        part, item = self._parts[-1], self._item(status)
        if part.call is not None:
            name, field = _INPUT_EVENTS[item["type"]]
            events = self._of_item(f"{name}.done", name=item["name"], **{field: item[field]})
        else:
            more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
            events = self._of_item(f"{_CONTENT_EVENTS[part.kind]}.done", content_index=0, text=part.text, **more)
            events += self._of_item("response.content_part.done", content_index=0, part=self._content(part.text))
        return events + self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._parts) - 1

    def _item(self, status: str) -> dict[str, Any]:
        return self._answer.item(self._call, self._parts[-1], self._index, status)

    def _content(self, text: str) -> dict[str, Any]:
        content: dict[str, Any] = self._item("in_progress")["content"][0]
        return content | {"text": text}

    def _of_item(self, type: str, **fields: Any) -> str:
        """Return an event of the last item."""
        return self._event(type, item_id=self._id, output_index=self._index, **fields)

    def _event(self, type: str, **fields: Any) -> str:
        self._number += 1
        return named_event({"type": type, "sequence_number": self._number, **fields})


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@dataclass(frozen=True)
class ResponseAnswer:
    """A prepared chat to be answered with a response."""

    body: ResponsesRequest
    chat: ChatAnswer
    functions: Functions
    items: Sequence[Item]
    """The conversation to answer."""
    nbytes: int
    """JSON size of the conversation."""
    memory: ResponseMemory

    @property
    def requests(self) -> Sequence[RequestState]:
        return self.chat.requests

    def response(self, call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        return self.ended(call, output, parts_of(self.chat.deltas(output)))

    def stream(self, call: Call) -> AsyncIterator[bytes]:
        writer = ResponseWriter(self, call)
        return stream_answers(call, [writer], writer.fail)

    def ended(self, call: Call, output: Output, parts: Sequence[Part]) -> dict[str, Any]:
        """Return the response of an answer that is complete or cut off; store it unless `store` is false."""
        cut_off = output.finish_reason == "length"
        last = len(parts) - 1
        items = [
            self.item(call, part, index, "incomplete" if cut_off and index == last else "completed")
            for index, part in enumerate(parts)
        ]
        response = self.begun(call) | {
            "status": "incomplete" if cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": items,
            "usage": self._usage(output),
            **stats(call, [output]),
        }
        if self.body.store is not False:
            conversation = [*self.items, *_ITEMS.validate_python(items)]
            nbytes = self.nbytes + len(dumps(response).encode())
            self.memory.store(response["id"], StoredResponse(response, conversation, nbytes))
        return response

    def failed(self, call: Call, error: ApiError) -> dict[str, Any]:
        code = "invalid_prompt" if error.status == 400 else "server_error"
        return self.begun(call) | {"status": "failed", "error": {"code": code, "message": error.message}}

    def begun(self, call: Call) -> dict[str, Any]:
        """Return the response before any output."""
        body = self.body
        form = body.text.format if body.text is not None else None
        choice = body.tool_choice or "auto"
        return {
            "id": f"resp_{call.id}",
            "object": "response",
            "created_at": call.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": call.service.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning.model_dump(include={"effort", "summary"}) if body.reasoning else None,
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": echoed(body.tools),
            "service_tier": SERVICE_TIER,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def item(self, call: Call, part: Part, index: int, status: str) -> dict[str, Any]:
        """Return a part as an item. Calls are always complete, because a cut-off call is text."""
        if part.call is not None:
            item = self.functions.called(part.call)
            status = "in_progress" if status == "in_progress" else "completed"
        elif part.kind == "reasoning":
            item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": part.text}]}
            if self.body.wants_encrypted_thoughts:
                item["encrypted_content"] = sealed(part.text)
        else:
            content = {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
            item = {"type": "message", "role": "assistant", "content": [content]}
        return {"id": f"{ID_PREFIXES[item['type']]}_{call.id}_{index}", **item, "status": status}

    def _usage(self, output: Output) -> dict[str, Any]:
        return ResponsesUsage(
            input_tokens=output.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=output.cached_tokens, cache_write_tokens=0),
            output_tokens=len(output.tokens),
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self.chat.thought_tokens(output)),
            total_tokens=output.prompt_tokens + len(output.tokens),
        ).plain()
