"""What the Messages and Responses APIs share: translating turns and blocks to Chat Completions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Discriminator

from . import schema
from .errors import ApiError

PARAGRAPH = "\n\n"
"""Separates pieces of text that came as separate blocks."""
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Maps efforts that templates do not know to low or high."""


class Extensions(schema.Extensions):
    """Fields that this server adds to each API."""

    chat_template_kwargs: dict[str, Any] | None = None

    def extensions(self) -> dict[str, Any]:
        """Return the fields that were given; Chat Completions has them under the same names."""
        return self.model_dump(include=set(Extensions.model_fields), exclude_none=True)


class Conversation:
    """Collects turns and returns them as messages of Chat Completions.

    Consecutive turns of one role become one message, because many templates require roles to alternate.
    """

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []
        """Messages with lists of pieces, joined once; repeated concatenation takes quadratic time."""
        self._made: set[str] = set()
        """Ids of the calls so far."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        joints = {"content": "", "reasoning_content": PARAGRAPH}
        return [
            {key: joints[key].join(filter(None, value)) if key in joints else value for key, value in turn.items()}
            for turn in self._turns
        ]

    def say(self, role: Literal["system", "user"], text: str) -> None:
        if self._turns and self._turns[-1]["role"] == role:
            self._turns[-1]["content"] += [PARAGRAPH, text]
        else:
            self._turns.append({"role": role, "content": [text]})

    def answer(self, text: str) -> None:
        """Append text to the model's message, without a separator."""
        self._open_turn["content"].append(text)

    def think(self, text: str) -> None:
        self._open_turn.setdefault("reasoning_content", []).append(text)

    def call(self, id: str, name: str, arguments: str) -> None:
        """Add a tool call. arguments: the JSON text of an object."""
        self._made.add(id)
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open_turn.setdefault("tool_calls", []).append(call)

    def result(self, id: str, text: str, where: str) -> None:
        """Add the result of a call. Raises ApiError 400 that names the field `where` if there is no such call."""
        if id not in self._made:
            said = f"there is no call with the id {id[:100]!r} before this result; send that call too"
            raise ApiError(400, f"{where}: {said}", where)
        self._turns.append({"role": "tool", "tool_call_id": id, "content": [text]})

    @property
    def _open_turn(self) -> dict[str, Any]:
        """Return the model's message, opening one if needed."""
        if not self._turns or self._turns[-1]["role"] != "assistant":
            self._turns.append({"role": "assistant", "content": []})
        return self._turns[-1]


def one_of(*kinds: str, otherwise: str = "", alike: Mapping[str, str] | None = None) -> Discriminator:
    """Return a discriminator of blocks by type.

    Tags are bracketed, so that paths in errors name fields only. otherwise: the type of blocks without one. alike: maps
    types to those that they are read as.
    """

    def tag(value: object) -> str:
        given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        kind = otherwise if given is None else given
        return f"<{(alike or {}).get(str(kind), kind)}>"

    said = f"the type must be one of {', '.join(kinds)}"
    return Discriminator(tag, custom_error_type="unknown_block", custom_error_message=said)


def without_details(tool: object) -> object:
    """Keep only the type and name of a tool that does not run here."""
    return {key: tool[key] for key in ("type", "name") if key in tool} if isinstance(tool, dict) else tool


@contextmanager
def named_as(names: Mapping[str, str], tools: Sequence[int] = ()) -> Iterator[None]:
    """Rename the Chat Completions fields in errors to those of the requested API.

    names: patterns of Chat Completions fields, and their replacements. tools: the request index of each tool that the
    model sees.
    """
    try:
        yield
    except ApiError as e:
        e.message = _renamed(e.message, names, tools)
        e.param = None if e.param is None else _renamed(e.param, names, tools)
        raise


def _renamed(text: str, names: Mapping[str, str], tools: Sequence[int]) -> str:
    """Return a text with the field at its beginning renamed."""
    for pattern, name in names.items():
        if found := re.match(pattern, text):
            text = found.expand(name) + text[found.end() :]
            break
    return re.sub(r"^tools\[(\d+)\]", lambda m: f"tools[{tools[int(m[1])]}]" if int(m[1]) < len(tools) else m[0], text)
