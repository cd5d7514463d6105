"""Responses that may be asked for again, or gone on from: the last ones, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ApiError
from .schema import Item

ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""How ids of items begin, by their type."""


@dataclass(frozen=True)
class Kept:
    response: dict[str, Any]
    items: Sequence[Item]
    """The whole conversation, the response with it."""
    nbytes: int
    """Of the conversation as JSON, with all that came before."""

    def input_items(self) -> list[dict[str, Any]]:
        """The conversation that was answered, oldest item first, each item with an id and a status."""
        id = str(self.response["id"]).removeprefix("resp_")
        count = len(self.items) - len(self.response["output"])
        return [_described(item, f"{id}_in_{index}") for index, item in enumerate(self.items[:count])]


def _described(item: Item, place: str) -> dict[str, Any]:
    """An item as OpenAI lists it. place: makes up its id if the client gave none."""
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
    """At most so many responses and bytes; the least recently used goes first. Belongs to the event loop.

    A response stands for its whole conversation, so that it may be gone on from when those before it have gone.
    """

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes = most, most_bytes
        self.nbytes = 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, id: str, kept: Kept) -> None:
        self._kept[id] = kept
        self.nbytes += kept.nbytes
        while len(self._kept) > self.most or self.nbytes > self.most_bytes:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes

    def get(self, id: str, param: str | None = None) -> Kept:
        """Return a kept response. Raises ApiError if it is not kept: 400 if the field `param` names it, else 404."""
        found = self._kept.get(id)
        if found is None:
            raise self._gone(id, param)
        self._kept.move_to_end(id)
        return found

    def delete(self, id: str) -> None:
        """Raises ApiError 404 where it is not kept."""
        found = self._kept.pop(id, None)
        if found is None:
            raise self._gone(id, None)
        self.nbytes -= found.nbytes

    def _gone(self, id: str, param: str | None) -> ApiError:
        said = (
            f"response {id[:100]!r} is not kept here; it may have been sent with store false, deleted, or forgotten: "
            f"the last {self.most} are kept, {self.most_bytes >> 20} MB of them. Send the conversation as input"
        )
        if param is not None:  # as OpenAI answers
            return ApiError(400, said, param, "previous_response_not_found")
        return ApiError(404, said, None, "response_not_found")
