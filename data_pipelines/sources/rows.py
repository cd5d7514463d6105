"""Parse rows of any known shape, or with the field names from `--map`, into conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_mlx.errors import ConfigError, DataError, did_you_mean
from eagle_mlx.vision.images import TYPES, with_marks

from ..conversation import Conversation, Message

SHAPES = """\
  {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
  {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
  {"prompt": "…", "completion": "…"}   (or a prompt alone, for regenerating)
  {"instruction": "…", "input": "…", "output": "…"}
  {"turns": ["…", "…"]}                (a benchmark's questions; the first is a prompt alone)
  {"text": "…"}
A message may also have `tool_calls` and `reasoning_content`, a row `system` and `tools`. For other names, use --map"""
_ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "bot", "model")
_TOOLS = ("function", "observation", "function_response", "tool_response")
_ROLES = {"human": "user", **dict.fromkeys(_ASSISTANTS, "assistant"), **dict.fromkeys(_TOOLS, "tool")}
_CALLS = ("function_call", "tool_call")
"""Roles of LLaMA-Factory and ms-swift for an assistant's message that holds calls as JSON."""
COLUMNS = ("messages", "prompt", "completion", "system", "text", "tools")
"""Columns of a row, before the keys of a message. `tools` may be a list or its JSON."""
KEYS = ("role", "content", "tool_calls", "reasoning_content")
SPEAKERS = ("user", "assistant")
"""Roles that a data set may call otherwise."""
_OPTIONAL = ("system", "tools", "completion")
_LISTS = ("messages", "conversations")


@dataclass(frozen=True)
class FieldMap:
    """Field names in a data set. If empty, rows are not changed."""

    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Maps this project's field names to the data set's."""

    @classmethod
    def parse(cls, text: str) -> FieldMap:
        """Parse `role=from,content=value`. Raises ConfigError for an unknown field or names that clash."""
        fields = [*COLUMNS, *KEYS, *SPEAKERS]
        names: dict[str, str] = {}
        for part in text.split(","):
            ours, _, theirs = (piece.strip() for piece in part.partition("="))
            if not ours or not theirs:
                raise ConfigError(f"--map {text}: {part!r} is not of the form FIELD=NAME, such as role=from")
            if ours not in fields:
                hint = did_you_mean(ours, fields)
                raise ConfigError(f"--map {text}: there is no field {ours!r}; {hint}the fields are {', '.join(fields)}")
            if ours in names:
                raise ConfigError(f"--map {text}: {ours} appears twice")
            names[ours] = theirs
        members = {"messages": ("messages", *KEYS, *SPEAKERS), "prompt": ("prompt", "completion"), "text": ("text",)}
        shapes = [shape for shape, own in members.items() if not names.keys().isdisjoint(own)]
        if len(shapes) > 1:
            raise ConfigError(f"--map {text}: a row is either {' or '.join(shapes)}; name the fields of one of them")
        if "completion" in names and "prompt" not in names:
            raise ConfigError(f"--map {text}: a completion needs a prompt; name its field too, as prompt=NAME")
        return cls(names)

    def apply(self, row: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
        """Return the row with the columns of `SHAPES`. Raises DataError, with the name, if a column is missing."""
        columns = [ours for ours in self.names if ours in COLUMNS]
        for ours in columns:
            self.require(row, ours, origin, "row")
        out = {ours: row[self.names[ours]] for ours in columns}
        if out.keys() & {"prompt", "text", "messages"}:
            return {"tools": row.get("tools"), "system": row.get("system"), **out}
        if any(row.get(name) is not None for name in _LISTS) or ("prompt" in row and len(out) == len(self.names)):
            return {**row, **out}  # only other fields have unknown names
        raise DataError(
            f"{origin}: --map names keys of messages, but there is no `messages` or `conversations`; "
            f"the row's fields are: {_listed(row)}; name the field of the list too, as messages=NAME"
        )

    def require(self, row: Mapping[str, Any], ours: str, origin: str, what: str) -> None:
        """Raise DataError if `ours` has a name here, and the row or message lacks it."""
        theirs = self.names.get(ours)
        if theirs is None or (theirs in row and (row[theirs] is not None or ours in _OPTIONAL or what != "row")):
            return
        raise DataError(
            f"{origin}: no field `{theirs}`, which --map names as the {ours}; "
            f"the {what}'s fields are: {_listed(row)}; fix the row or --map"
        )

    def ours(self, fields: Iterable[str]) -> dict[str, str]:
        return {self.names[ours]: ours for ours in fields if ours in self.names}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "none"


def choose(maps: Iterable[str], source: str) -> FieldMap | None:
    """Return the source's own map (`SOURCE:FIELD=NAME,…`), else the map for all sources, else None."""
    chosen: dict[str, FieldMap] = {}
    for text in maps:
        place = place_of(text)
        parsed = FieldMap.parse(text[len(place) + 1 :] if place else text)
        if place in chosen and place in ("", source):
            raise ConfigError(f"--map {text}: there is another map for this; put all fields into one, with commas")
        chosen[place] = parsed
    return chosen.get(source, chosen.get(""))


def place_of(text: str) -> str:
    """Return the source that a map is for, or "" if it is for all."""
    return text.partition("=")[0].rpartition(":")[0]


def parse_row(row: Mapping[str, Any], origin: str, fields: FieldMap | None = None) -> Conversation:
    """Parse a row in any of `SHAPES`, or with the names of `fields`. Raises DataError with its origin and keys."""
    fields = fields or FieldMap()
    if fields.names:
        row = fields.apply(row, origin)
    row = {k: v for k, v in row.items() if v is not None}
    turns: tuple[Message, ...] = ()
    images: list[object] = []
    alpaca = (row.get("instruction"), row.get("input", ""), row.get("output"))
    if listed := next((key for key in _LISTS if key in row), ""):
        turns = _messages(_decoded(row[listed]), f"{origin}: `{fields.names.get('messages', listed)}`", fields, images)
    elif "prompt" in row:
        for key, role in (("prompt", "user"), ("completion", "assistant")):
            if isinstance(row.get(key), str):
                turns += (Message(role, row[key]),)
            elif key in row:
                turns += _messages(row[key], f"{origin}: the {key}", fields, images)
    elif "turns" in row:
        if not isinstance(row["turns"], list) or not row["turns"] or not isinstance(row["turns"][0], str):
            raise DataError(f"{origin}: `turns` must be a list of the user's texts, not {_show(row['turns'])}")
        turns = (Message("user", row["turns"][0]),)
    elif all(isinstance(text, str) for text in alpaca) and not row.get("history"):
        return parse_row({**row, "prompt": "\n\n".join(filter(None, alpaca[:2])), "completion": alpaca[2]}, origin)
    elif "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise DataError(f"{origin}: `text` must be a non-empty string, not {_show(row['text'])}")
        return Conversation(text=row["text"], origin=origin)
    else:
        raise DataError(
            f"{origin}: the row's keys ({_listed(row)}) have no known shape; name the fields with --map, such as "
            f"--map prompt=question,completion=answer, or convert the row to one of these:\n{SHAPES}"
        )
    system = row.get("system")
    if system and ("system" in fields.names or (isinstance(system, str) and turns[0].role != "system")):
        turns = (Message("system", _content(system, origin, images)), *turns)
    tools = tuple(_objects(row.get("tools") or [], f"{origin}: `tools`"))
    return Conversation(turns, tools=tools, images=tuple(images), origin=origin)


def _messages(value: Any, origin: str, fields: FieldMap, images: list[object]) -> tuple[Message, ...]:
    """Parse messages. Where their images come from is appended to `images`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{origin} must be a non-empty list of messages, not {_show(value)}")
    messages: list[Message] = []
    waiting: list[Mapping[str, Any]] = []
    for number, item in enumerate(value, 1):
        message = _message(item, f"{origin}, message {number}", fields, images)
        if message.role == "tool" and waiting and "tool_call_id" not in message.extra:  # templates match them by id
            call = waiting.pop(0)
            named = {"tool_call_id": call["id"], "name": call["function"]["name"]}
            message = replace(message, extra={**named, **message.extra})
        if message.role == "assistant":
            waiting = [call for call in message.extra.get("tool_calls", ()) if "id" in call and "function" in call]
        messages.append(message)
    return tuple(messages)


def _message(item: Any, origin: str, fields: FieldMap, images: list[object]) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{origin} must be an object, not {_show(item)}")
    fields.require(item, "role", origin, "message")
    ours = fields.ours(KEYS)
    values: dict[str, Any] = {ours.get(str(name), str(name)): v for name, v in item.items() if v is not None}
    from_sharegpt = "from" in values and "role" not in values
    role = values.pop("from" if from_sharegpt else "role", None)
    if not isinstance(role, str):
        raise DataError(
            f"{origin} has no `role` (or ShareGPT's `from`); its keys are: {_listed(values)}; name it with --map role=…"
        )
    content_key = next((key for key in ("content", "value") if key in values), "value" if from_sharegpt else "content")
    if "function_call" in values and "tool_calls" not in values:  # OpenAI's name before `tool_calls`
        values["tool_calls"] = [{"type": "function", "function": values.pop("function_call")}]
    if content_key not in values and not values.get("tool_calls"):
        fields.require(item, "content", origin, "message")
        keys = _listed(values)
        raise DataError(f"{origin} has no `{content_key}`; its keys are: {keys}; name it with --map content=…")
    content = _content(values.pop(content_key, ""), origin, images)
    if role in _CALLS:
        role, content, values["tool_calls"] = "assistant", *_calls_in(content, origin)
    if calls := _objects(values.pop("tool_calls", []), f"{origin}: `tool_calls`"):
        values["tool_calls"] = list(map(_call, calls))
    role = fields.ours(SPEAKERS).get(role, role.lower())
    return Message(_ROLES.get(role, role), content, values)


def _content(value: Any, origin: str, images: list[object]) -> str:
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, Sequence) else [value]
    if all(isinstance(p, Mapping) and (p.get("type") in TYPES or isinstance(p.get("text"), str)) for p in parts):
        return with_marks(parts, images)
    raise DataError(f"{origin}: the content must be text or images, not {_show(value)}")


def _objects(value: Any, what: str) -> list[Mapping[str, Any]]:
    objects = _decoded(value)
    if not isinstance(objects, list) or not all(isinstance(item, Mapping) for item in objects):
        raise DataError(f"{what} must be a list of objects, or a JSON string of one, not {_show(value)}")
    return objects


def _calls_in(text: str, origin: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the reasoning before calls that are given as JSON, one or a list, and the calls. Raises DataError."""
    thought, end, body = text.rpartition("</think>")
    calls = _decoded(body)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(f'{origin}: the calls must be JSON, {{"name": …, "arguments": …}}, not {_show(text)}')
    # Ids of nine characters, as Mistral's templates require.
    return thought + end, [
        {"type": "function", "id": f"call{number:05}", "function": call} for number, call in enumerate(calls)
    ]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as chat templates need it, even if it is a JSON string."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"])}
    arguments = _decoded(call.get("arguments"))
    return {**call, "arguments": arguments} if isinstance(arguments, Mapping) else dict(call)


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _show(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "…"
