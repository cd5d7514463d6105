"""Stored responses, which later requests continue or delete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .answer import dumps
from .errors import ApiError

_ITEM_BYTES = 60  # memory of a stored item besides its JSON, at most: an object, and its place in a list
_RESPONSE_BYTES = 1000  # memory of a stored response besides its items and its JSON, at most


@dataclass(frozen=True)
class StoredResponse:
    json: bytes
    items: Sequence[bytes]  # the whole conversation, including the response, as JSON
    outputs: Mapping[str, bytes]  # the response's own items, by id
    client: str
    nbytes: int  # memory that it takes, as if it shared no items with earlier turns

    @classmethod
    def of(cls, response: Mapping[str, Any], before: Sequence[bytes], client: str) -> StoredResponse:
        """before: the conversation without the response."""
        json = dumps(response).encode()
        outputs = {item["id"]: dumps(item).encode() for item in response["output"]}
        items = (*before, *outputs.values())
        return cls(
            json, items, outputs, client, _RESPONSE_BYTES + len(json) + sum(len(item) + _ITEM_BYTES for item in items)
        )


class ResponseMemory:
    """Stores responses within a count and a size.

    Beyond these, the client with the most bytes loses its least recently used response.
    """

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes = most, most_bytes
        self._nbytes = Counter[str]()  # by client
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

    def item(self, id: str, param: str) -> bytes:
        """Return an item of a stored response. Raises ApiError 400 that names the field `param` if it is missing."""
        response = f"resp_{id.partition('_')[2].rpartition('_')[0]}"
        outputs = self.get(response).outputs if response in self._responses else {}
        if id not in outputs:
            raise ApiError(400, f"{param}: item {id[:100]!r} is not stored; send the item itself", param)
        return outputs[id]

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
