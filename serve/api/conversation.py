"""What the front doors beside Chat Completions share: their turns and parts, written as what that route takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Discriminator, Field

from .errors import ApiError, ContextExceeded
from .schema import Body

PARAGRAPH = "\n\n"
"""Between pieces of text that came as blocks of their own."""
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that templates do not know, by those that they do: low, medium and high."""


class Extensions(Body):
    """What this server takes beside each API's own fields."""

    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    spec_decode: Literal["none", "ngram", "draft", "eagle", "mtp"] | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, lt=2**31)
    t_max_predict_ms: float | None = Field(None, ge=0)
    cache_salt: str | None = Field(None, min_length=1)
    """Only requests with the same one share what the prefix cache has; the name is vLLM's."""

    def extensions(self) -> dict[str, Any]:
        """Those that were given, under the names that they have there too."""
        return self.model_dump(include=set(Extensions.model_fields), exclude_none=True)


class Conversation:
    """Turns in, messages of Chat Completions out.

    What a role says several times in a row is one message: many templates refuse roles that do not alternate.
    """

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._made: set[str] = set()
        """Ids of the calls so far."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        return [turn.message() for turn in self._turns]

    def say(self, role: Literal["system", "user"], text: str) -> None:
        if self._turns and self._turns[-1].role == role:
            self._turns[-1].pieces += [PARAGRAPH, text]
        else:
            self._turns.append(_Turn(role, [text]))

    def answer(self, text: str) -> None:
        """Add a piece of what the model said; nothing comes between it and the next."""
        self._open_turn.pieces.append(text)

    def think(self, text: str) -> None:
        self._open_turn.thoughts.append(text)

    def call(self, id: str, name: str, arguments: str) -> None:
        """arguments: the JSON text of an object."""
        self._made.add(id)
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open_turn.calls.append(call)

    def result(self, id: str, text: str, where: str) -> None:
        """Add the result of a call. Raises ApiError 400 that names the field `where` if there was no such call."""
        if id not in self._made:
            said = f"there is no call with the id {id[:100]!r} before this result; send that call too"
            raise ApiError(400, f"{where}: {said}", where)
        self._turns.append(_Turn("tool", [text], {"tool_call_id": id}))

    @property
    def _open_turn(self) -> _Turn:
        """The message that the model is saying."""
        if not self._turns or self._turns[-1].role != "assistant":
            self._turns.append(_Turn("assistant"))
        return self._turns[-1]


@dataclass
class _Turn:
    """A message in pieces, joined once: to extend a text piece by piece takes quadratic time."""

    role: str
    pieces: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        message = {"role": self.role, **self.more, "content": "".join(self.pieces)}
        if self.thoughts:
            message["reasoning_content"] = PARAGRAPH.join(filter(None, self.thoughts))
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def one_of(*kinds: str, otherwise: str = "", alike: Mapping[str, str] | None = None) -> Discriminator:
    """Tells blocks apart by their type, as a tag that is no name: places in bodies then name fields alone.

    otherwise: the type of those that do not say. alike: types that are read as others.
    """

    def tag(value: object) -> str:
        given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        kind = otherwise if given is None else given
        return f"<{(alike or {}).get(str(kind), kind)}>"

    said = f"the type must be one of {', '.join(kinds)}"
    return Discriminator(tag, custom_error_type="unknown_block", custom_error_message=said)


def without_details(tool: object) -> object:
    """What there is to know of a tool that is not run here."""
    return {key: tool[key] for key in ("type", "name") if key in tool} if isinstance(tool, dict) else tool


@contextmanager
def named_as(names: Mapping[str, str], tools: Sequence[int] = ()) -> Iterator[None]:
    """Let errors name the fields of the API that was asked, and not those of Chat Completions.

    names: patterns of the latter, and templates of what they are in the former. tools: where in the request those
    are that the model is told of.
    """
    try:
        yield
    except ContextExceeded as e:
        field = _renamed(e.param or "", names, tools)
        raise ContextExceeded(e.message, field, e.prompt, e.context) from e
    except ApiError as e:
        param = None if e.param is None else _renamed(e.param, names, tools)
        raise ApiError(e.status, _renamed(e.message, names, tools), param, e.code, e.headers) from e


def _renamed(text: str, names: Mapping[str, str], tools: Sequence[int]) -> str:
    """A text with the field at its beginning under its other name."""
    for pattern, name in names.items():
        if found := re.match(pattern, text):
            text = found.expand(name) + text[found.end() :]
            break
    return re.sub(r"^tools\[(\d+)\]", lambda m: f"tools[{tools[int(m[1])]}]" if int(m[1]) < len(tools) else m[0], text)
