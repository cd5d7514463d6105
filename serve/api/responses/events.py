"""A response as the events that make it up, each with its number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle_mlx.engine.output import Output

from ..chat import DeltaStream
from ..errors import ApiError
from ..parts import Part, part_of
from ..service import Call
from ..stream import named_event
from ..worker import RequestEvent

if TYPE_CHECKING:
    from .answer import ResponseAnswer

_INPUT_EVENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""By kind of call: how its events begin, and what its input is called."""
_CONTENT_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseWriter:
    """One item after the other: each is added, continued and done before the next."""

    def __init__(self, answer: ResponseAnswer, call: Call):
        self._answer, self._call = answer, call
        self._deltas = DeltaStream(answer.chat)
        self._parts: list[Part] = []
        """All so far; the last one may go on."""
        self._is_open = False
        self._id = ""
        """Of the item that is the last."""
        self._number = -1

    def open(self) -> str:
        begun = self._answer.begun(self._call)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def write(self, event: RequestEvent) -> str:
        return "".join(self._piece(part_of(delta)) for delta in self._deltas.push(event))

    def close(self, output: Output) -> str:
        cut_off = output.finish_reason == "length"
        last = self._done("incomplete" if cut_off else "completed")
        response = self._answer.ended(self._call, output, self._parts)
        return last + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> str:
        return self._event("response.failed", response=self._answer.failed(self._call, error))

    def _piece(self, part: Part) -> str:
        said = ""
        if self._is_open and self._parts[-1].continues_with(part):
            self._parts[-1].text += part.text
        else:
            said = self._done("completed") + self._added(part)
        if part.call is not None:
            item = self._item("completed")
            name, field = _INPUT_EVENTS[item["type"]]
            return said + self._of_item(f"{name}.delta", delta=item[field])
        more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        return said + self._of_item(f"{_CONTENT_EVENTS[part.kind]}.delta", content_index=0, delta=part.text, **more)

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
        """The end of the item that is open."""
        if not self._is_open:
            return ""
        self._is_open = False
        part, item = self._parts[-1], self._item(status)
        if part.call is not None:
            name, field = _INPUT_EVENTS[item["type"]]
            said = self._of_item(f"{name}.done", name=item["name"], **{field: item[field]})
        else:
            more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
            said = self._of_item(f"{_CONTENT_EVENTS[part.kind]}.done", content_index=0, text=part.text, **more)
            said += self._of_item("response.content_part.done", content_index=0, part=self._content(part.text))
        return said + self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._parts) - 1

    def _item(self, status: str) -> dict[str, Any]:
        return self._answer.item(self._call, self._parts[-1], self._index, status)

    def _content(self, text: str) -> dict[str, Any]:
        content: dict[str, Any] = self._item("in_progress")["content"][0]
        return content | {"text": text}

    def _of_item(self, type: str, **fields: Any) -> str:
        """An event of the item that is the last."""
        return self._event(type, item_id=self._id, output_index=self._index, **fields)

    def _event(self, type: str, **fields: Any) -> str:
        self._number += 1
        return named_event({"type": type, "sequence_number": self._number, **fields})
