"""Common parts of the Messages and Responses APIs: translating to Chat Completions, and answers part by part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json
from starlette.responses import Response

from eagle_mlx.request import Output

from ..chat import Delta, ToolCall
from ..chat.history import PARAGRAPH, with_whole_pairs
from .answer import Answer, PendingAnswer, dumps, respond_encoded
from .chat import DeltaStream, EncodedChat, encoded, render_chat
from .encoding import Encoder
from .errors import ApiError
from .limits import Limits
from .media import Pictures, paragraphs
from .model import Loaded, check
from .received import Received, validated
from .schema import Body, ChatRequest, EventFormat, ToolName
from .service import Call
from .worker import RequestEvent


class OwnTool(Body):
    """The fields of a tool that the client runs, in the Messages and Responses APIs."""

    name: ToolName
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # ignored in the Responses API: all tools are in the prompt
    # Ignored: only the model calls tools.
    allowed_callers: list[str] | None = None


class BareTool(BaseModel):
    """A tool without a schema. Its other fields have no effect here and may be anything."""

    model_config = ConfigDict(strict=True, json_schema_extra={"additionalProperties": True})

    type: str
    name: str | None = None
    strict: bool | None = None

    def refusal(self, owner: str) -> ApiError:
        """Return the error if all tools, of which this is the first, run on the servers of the API's owner."""
        message = f"tools[0].type: {self.type[:60]} runs on {owner}'s servers; give tools that the client runs"
        return ApiError(400, message, "tools[0].type")


class Turns:
    """Collects turns as messages of Chat Completions, one for turns of the same role: templates may want them so."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures
        self._turns: list[dict[str, Any]] = []
        """Messages with lists of pieces, because repeated concatenation takes quadratic time."""
        self._calls: set[str] = set()

    @property
    def messages(self) -> list[dict[str, Any]]:
        turns = [dict(turn) for turn in self._turns]
        for turn in turns:
            turn["content"] = ("".join if turn["role"] == "assistant" else paragraphs)(turn["content"])
            if "reasoning_content" in turn:
                turn["reasoning_content"] = PARAGRAPH.join(filter(None, turn["reasoning_content"]))
        return turns

    def say(self, role: Literal["system", "user", "assistant"], text: str) -> None:
        """Add text: to the model's message as it is, to another as a paragraph."""
        self._turn(role)["content"].append(text)

    def think(self, text: str) -> None:
        self._turn("assistant").setdefault("reasoning_content", []).append(text)

    def call(self, id: str, name: str, arguments: Any) -> None:
        """Add a tool call. arguments: an object, or its JSON text."""
        self._calls.add(id)
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def result(self, id: str, text: str, where: str) -> None:
        """Add the result of a call. Raises ApiError 400 that names the field `where` if there is no such call."""
        if id not in self._calls:
            problem = f"there is no call with the id {id[:100]!r} before this result; send that call too"
            raise ApiError(400, f"{where}: {problem}", where)
        self._turns.append({"role": "tool", "tool_call_id": id, "content": [text]})

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role, "content": []})
        return self._turns[-1]


@dataclass(frozen=True)
class Names:
    """The names of Chat Completions fields in the requested API."""

    messages: str  # The field of all messages. Translated messages have other indexes, so errors name no index.
    fields: Mapping[str, str]  # Beginnings of other fields, and their replacements. Those of a tool begin with a dot.
    tools: list[int]  # the request index of each tool that the model sees

    @contextmanager
    def used(self) -> Iterator[None]:
        """Rename the fields in errors."""
        try:
            yield
        except ApiError as e:
            if e.param is not None:
                e.rename(self._renamed(e.param))
            raise

    def _renamed(self, field: str) -> str:
        if field.startswith("messages"):
            return self.messages
        tool = ""
        if field.startswith("tools["):
            index, _, field = field.removeprefix("tools[").partition("]")
            tool = f"tools[{self.tools[int(index)]}]"
        name = next((name for name in self.fields if field.startswith(name)), "")
        return tool + self.fields.get(name, "") + field.removeprefix(name)


def translated(turns: Turns, fields: dict[str, Any], names: Names, limits: Limits) -> ChatRequest:
    """Return the chat of these turns and other fields. Raises ApiError 400 that names the field of the API."""
    with names.used():
        chat = validated(ChatRequest, {"messages": turns.messages, **fields})
        check(chat, limits)
    return chat.with_pictures(turns.pictures)


async def counted(received: Received[Any], chat: ChatRequest, names: Names, **fields: str) -> Response:
    """Return the number of a chat's prompt tokens, next to other fields. Raises ApiError with the API's field names."""

    def count(loaded: Loaded, encode: Encoder) -> dict[str, Any]:
        return {**fields, "input_tokens": len(render_chat(chat, loaded, encode, must_fit=False).prompt.tokens)}

    with names.used():
        return await respond_encoded(received, count)


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments; of a call that was cut off, those that are complete, as Anthropic's client does."""
    try:
        value = from_json(with_whole_pairs(call.arguments), allow_partial=True)
        dumps(value)
    except ValueError:  # JSON text, but not for every reader: 1e999, thousands of brackets
        value = {}
    return value if isinstance(value, dict) else {}


class PendingParts(PendingAnswer):
    """The answer in parts of a request that was translated to a chat."""

    def __init__(self, call: Call, chat: ChatRequest, names: Names, options: EventFormat | None = None):
        super().__init__(call, options)
        self._chat, self._names = chat, names

    async def prepare(self, received: Received[Any], loaded: Loaded) -> PartsAnswer:
        with self._names.used():
            return self.answer(await encoded(received, loaded, self._chat))

    @abstractmethod
    def answer(self, chat: EncodedChat) -> PartsAnswer:
        """Return the answer of an encoded chat."""


class PartsAnswer(Answer):
    """A chat's answer in parts. Its stream starts, extends and ends each part before the next."""

    def __init__(self, pending: PendingParts, chat: EncodedChat):
        super().__init__(pending, chat.requests)
        self._deltas = DeltaStream(chat)
        self.parts: list[Delta] = []  # joined deltas; the last may grow

    @abstractmethod
    def start(self) -> str:
        """Return the events that start the last part."""

    @abstractmethod
    def extend(self, more: Delta) -> str:
        """Return the event that adds to the last part."""

    @abstractmethod
    def end(self, status: str) -> str:
        """Return the events that end the last part, if there is one; it is `completed` or `incomplete`."""

    @abstractmethod
    def ended(self, output: Output) -> dict[str, Any]:
        """Return the whole answer."""

    def response(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        self.write(RequestEvent(0, (), output=output))  # collects the parts
        return self.ended(output)

    def write(self, event: RequestEvent) -> str:
        return "".join(map(self._piece, self._deltas.push(event)))

    def _piece(self, delta: Delta) -> str:
        last = self.parts[-1] if self.parts else None
        if last and last.tool_call and delta.tool_call and not delta.tool_call.id:
            self.parts[-1] = Delta(tool_call=last.tool_call.joined(delta.tool_call))
            return self.extend(delta)
        if last and last.tool_call is delta.tool_call is None and bool(last.reasoning) == bool(delta.reasoning):
            self.parts[-1] = Delta(last.content + delta.content, last.reasoning + delta.reasoning)
            return self.extend(delta)
        before = self.end("completed")
        self.parts.append(delta)
        return before + self.start() + self.extend(delta)
