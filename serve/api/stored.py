"""Items of responses as they are published, and stored responses, which later requests continue, list or delete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .answer import dumps
from .errors import ApiError
from .responses_request import Item

_ITEM_BYTES = 300
"""Memory of a stored item besides its JSON: three objects, and the id."""
_RESPONSE_BYTES = 1000
"""Memory of a stored response besides its items and its JSON, at most."""
_MOST_ITEMS = 100
"""Maximum items per page, as in OpenAI's API."""
ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class StoredItem(NamedTuple):
    id: str
    json: bytes
    """The item as OpenAI lists it."""

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> StoredItem:
        return cls(item["id"], dumps(item).encode())


def stored_items(items: Sequence[Item], place: str) -> list[StoredItem]:
    """Return input items to store. place: the last part of their ids, if the client gave none."""
    return [StoredItem.of(_listed(item, f"{place}_{index}")) for index, item in enumerate(items)]


def _listed(item: Item, place: str) -> dict[str, Any]:
    """Return an item as OpenAI lists it."""
    fields = item.model_dump(exclude_none=True)
    kind = fields.setdefault("type", "message")
    if kind == "message" and isinstance(fields.setdefault("content", ""), str):
        part = "output_text" if fields["role"] == "assistant" else "input_text"
        fields["content"] = [{"type": part, "text": fields["content"]}]
    for part in fields["content"] if kind == "message" else ():
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    return {"id": f"{ID_PREFIXES.get(kind, 'item')}_{place}", "status": "completed", **fields}


@dataclass(frozen=True)
class StoredResponse:
    json: bytes
    items: Sequence[StoredItem]
    """The whole conversation, including the response."""
    outputs: int
    """How many of the items belong to the response."""
    client: str
    nbytes: int
    """Memory that it takes, as if it shared no items with earlier turns."""

    @classmethod
    def of(cls, response: Mapping[str, Any], before: Sequence[StoredItem], client: str) -> StoredResponse:
        """before: the conversation without the response."""
        outputs, json = list(map(StoredItem.of, response["output"])), dumps(response).encode()
        items = (*before, *outputs)
        nbytes = _RESPONSE_BYTES + len(json) + sum(len(item.json) + _ITEM_BYTES for item in items)
        return cls(json, items, len(outputs), client, nbytes)

    def page(self, query: Mapping[str, str]) -> bytes:
        """Return the JSON of a page of the conversation before the response. Raises ApiError 400.

        query: `order`, `after` and `limit` as in OpenAI's API.
        """
        order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
        if order not in ("asc", "desc"):
            raise ApiError(400, "order: must be asc or desc", "order")
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _MOST_ITEMS):
            raise ApiError(400, f"limit: must be an integer from 1 to {_MOST_ITEMS}", "limit")
        items = self.items[: len(self.items) - self.outputs][:: 1 if order == "asc" else -1]
        start = 0
        if after is not None:
            start = 1 + next((index for index, item in enumerate(items) if item.id == after), -1)
            if not start:
                raise ApiError(400, f"after: there is no item with the id {after[:100]!r}", "after")
        page = items[start : start + int(limit)]
        ids = [item.id for item in page] or [""]
        ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": len(items) > start + len(page)}
        data = b",".join(item.json for item in page)
        return b'{"object":"list","data":[%b],%b' % (data, dumps(ends)[1:].encode())


class ResponseMemory:
    """Stores responses within a count and a size.

    Beyond these, the client with the most bytes loses its least recently used response.
    """

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes = most, most_bytes
        self._nbytes = Counter[str]()
        """By client."""
        self._responses: dict[str, StoredResponse] = {}

    @property
    def nbytes(self) -> int:
        return self._nbytes.total()

    def store(self, id: str, stored: StoredResponse) -> None:
        self._responses[id] = stored
        self._nbytes[stored.client] += stored.nbytes
        while len(self._responses) > self.most or self.nbytes > self.most_bytes:
            ((largest, _),) = self._nbytes.most_common(1)
            self.delete(next(id for id, stored in self._responses.items() if stored.client == largest))

    def get(self, id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises ApiError if it is missing: 400 if the field `param` names it, else 404."""
        stored = self.delete(id, param)
        self.store(id, stored)  # as the most recently used
        return stored

    def delete(self, id: str, param: str | None = None) -> StoredResponse:
        if id not in self._responses:
            kept = f"the server keeps {self.most} responses, at most {self.most_bytes >> 20} MB"
            why = f"it was sent with store false, was deleted, or is too old ({kept})"
            message = f"response {id[:100]!r} is not stored: {why}. Send the conversation as input"
            code = "response_not_found" if param is None else "previous_response_not_found"
            raise ApiError(404 if param is None else 400, message, param, code)  # as in OpenAI's API
        stored = self._responses.pop(id)
        self._nbytes[stored.client] -= stored.nbytes
        self._nbytes += Counter()  # drops clients without any
        return stored
