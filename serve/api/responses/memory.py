"""Responses that may be asked for again, or gone on from: the last ones, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ApiError
from .schema import Item


@dataclass(frozen=True)
class Kept:
    response: dict[str, Any]
    items: Sequence[Item]
    """The whole conversation, the response with it."""
    nbytes: int
    """Of the conversation as JSON, with all that came before."""


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
        """Raises ApiError 404 where it is not kept. param: the field that named it."""
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
        return ApiError(404, said, param, "previous_response_not_found" if param else "response_not_found")
