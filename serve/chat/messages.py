"""Messages of OpenAI's API as chat templates expect them."""

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
    """Return messages as templates take them: arguments of calls as objects, `developer` as `system`.

    The fields have the types of `serve/api/schema.py`; contents are text. Raises PromptError that names the message,
    as `messages[2].content: ...`.
    """
    read, made = [], set[str | None]()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        one = _message(message, where)
        made |= {call.get("id") for call in one.get("tool_calls", ())}
        if one["role"] == "tool" and made.isdisjoint({one["tool_call_id"], None}):  # a call without an id fits any
            raise PromptError(
                f"{where}.tool_call_id: no earlier message of the assistant has a call with the id "
                f"{one['tool_call_id'][:100]!r}; send the message with that call before its result"
            )
        read.append(one)
    return read


def _message(message: Message, where: str) -> dict[str, Any]:
    role = _ROLES[message["role"]]
    given = {key: value for key, value in message.items() if value is not None and value != []}
    if unknown := sorted(given.keys() - _KEYS[role]):
        raise PromptError(f"{where}: {unknown[0]!r} is not supported in a message of role {message['role']!r}")
    if "content" not in given and "tool_calls" not in given:
        raise PromptError(f"{where}.content: must be text, or a list of text parts")
    if role == "tool" and "tool_call_id" not in given:
        raise PromptError(f"{where}.tool_call_id: a tool's message must name the call that it answers")
    if "reasoning" in given:
        given["reasoning_content"] = given.pop("reasoning")
    if "tool_calls" in given:
        given["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(given["tool_calls"])]
    return {"content": "", **given, "role": role}


def _call(call: Message, where: str) -> dict[str, Any]:
    """Templates write arguments in their own way, so they get the object and not its JSON text."""
    function, where = call["function"], f"{where}.function.arguments"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as e:
        raise PromptError(f"{where}: not valid JSON ({e})") from e
    if not isinstance(arguments, dict):
        raise PromptError(f"{where}: must be the JSON text of an object")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def with_late_instructions_said(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with instructions after the first turn said by the user, if a template takes no others."""
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    late = ({**message, "role": "user"} if message["role"] == "system" else message for message in messages[first:])
    return [dict(message) for message in (*messages[:first], *late)]


def with_argument_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with the arguments of calls as JSON text, for templates that join them to other text."""
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _as_text(call: Message) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
