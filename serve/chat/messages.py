"""Messages of OpenAI's API, read into what chat templates expect; the place of whatever cannot be used is named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_mlx.errors import PromptError

Message = Mapping[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The roles of the API, and their names in templates."""
_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content", "reasoning"},
    "tool": {"role", "content", "name", "tool_call_id"},
}


_NOT_TEXT = {
    "document": "documents are",
    "image": "images are",
    "image_url": "images are",
    "input_image": "images are",
    "input_file": "files are",
    "input_audio": "sound is",
    "audio_url": "sound is",
    "video_url": "videos are",
    "file": "files are",
}


def why_unsupported(kind: object) -> str | None:
    """Why a part of this type cannot be read; None for what is text, and for types that nobody knows."""
    known = _NOT_TEXT.get(kind) if isinstance(kind, str) else None
    return f"{known} not supported; this server reads text alone" if known else None


def read_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates take them: contents as text, arguments of calls as objects, `developer` as `system`.

    Raises PromptError that names the message, as `messages[2].content: ...`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise PromptError("messages: must be a list of at least one message")
    read = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    _check_results(read)
    return read


def _check_results(messages: Sequence[Message]) -> None:
    """Raise PromptError for a tool's message whose call no earlier message makes. A call without an id fits any."""
    made: set[str | None] = set()
    for index, message in enumerate(messages):
        made |= {call.get("id") for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and made.isdisjoint({message["tool_call_id"], None}):
            raise PromptError(
                f"messages[{index}].tool_call_id: no earlier message of the assistant has a call with the id "
                f"{message['tool_call_id'][:100]!r}; send the message with that call before its result"
            )


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where}: must be an object with a role and a content")
    given_role = message.get("role")
    role = _ROLES.get(given_role) if isinstance(given_role, str) else None
    if role is None:
        raise PromptError(f"{where}.role: must be one of {', '.join(_ROLES)}; got {given_role!r}")
    given = {key: value for key, value in message.items() if value is not None and value != []}
    if unknown := sorted(given.keys() - _KEYS[role]):
        raise PromptError(f"{where}: {unknown[0]!r} is not supported in a message of role {given_role!r}")
    read: dict[str, Any] = {"role": role, "content": _content(message.get("content"), "tool_calls" in given, where)}
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if key not in given:
            continue
        if not isinstance(given[key], str):
            raise PromptError(f"{where}.{key}: must be text")
        read["reasoning_content" if key == "reasoning" else key] = given[key]
    if role == "tool" and "tool_call_id" not in given:
        raise PromptError(f"{where}.tool_call_id: a tool's message must name the call that it answers")
    if "tool_calls" in given:
        read["tool_calls"] = _calls(given["tool_calls"], where)
    return read


def _content(content: Any, may_lack: bool, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if not isinstance(content, Sequence) or not content:
        raise PromptError(f"{where}.content: must be text, or a list of text parts")
    return "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        reason = why_unsupported(kind) or f"only parts of type 'text' are supported; got {kind!r}"
        raise PromptError(f"{where}: {reason}")
    text: Any = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{where}.text: must be text")
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise PromptError(f"{where}.tool_calls: must be a list of calls")
    return [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise PromptError(f"{where}: must be an object with an id, the type 'function' and a function")
    if not isinstance(function.get("name"), str) or not isinstance(call.get("id", ""), str):
        raise PromptError(f"{where}: the function's name and the call's id must be text")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **read} if "id" in call else read


def _arguments(value: Any, where: str) -> dict[str, Any]:
    """Templates write arguments in their own way, so they get the object and not its JSON text."""
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError) as e:
        raise PromptError(f"{where}: not valid JSON ({e})") from e
    if not isinstance(arguments, dict):
        raise PromptError(f"{where}: must be the JSON text of an object")
    return arguments


def with_late_instructions_said(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with instructions behind the first turn said by the user, for templates that know no other place."""
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    late = ({**message, "role": "user"} if message["role"] == "system" else message for message in messages[first:])
    return [dict(message) for message in (*messages[:first], *late)]


def with_argument_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as JSON text, for templates that join them to other text."""
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _as_text(call: Message) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
