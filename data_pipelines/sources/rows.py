"""Parse rows of any known shape, or with the field names from `--map`, into conversations."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_mlx.errors import ConfigError, DataError

from ..conversation import Conversation, Message

SHAPES = """\
  {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
  {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
  {"prompt": "…", "completion": "…"}   (or a prompt alone, for regenerating)
  {"text": "…"}
A message may also have `tool_calls` and `reasoning_content`, and a row `tools`. For other names, use --map."""
_ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "bot", "model")
_ROLES = {"human": "user", **dict.fromkeys(_ASSISTANTS, "assistant"), "function": "tool", "observation": "tool"}


COLUMNS = ("messages", "prompt", "completion", "system", "text", "tools")
"""Columns of a row. `tools` may be a list or its JSON."""
KEYS = ("role", "content", "tool_calls", "reasoning_content")
"""Keys of a message."""
SPEAKERS = ("user", "assistant")
"""Roles that a data set may call otherwise."""
_OPTIONAL = ("system", "tools", "completion")
"""Columns that may be null."""
_LISTS = ("messages", "conversations")


@dataclass(frozen=True)
class FieldMap:
    """Field names in a data set. If empty, rows are not changed."""

    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Maps this project's field names to the data set's."""

    @classmethod
    def parse(cls, text: str) -> FieldMap:
        """Parse `role=from,content=value`. Raises ConfigError for an unknown field or names that clash."""
        known = [*COLUMNS, *KEYS, *SPEAKERS]
        names: dict[str, str] = {}
        for part in text.split(","):
            ours, equals, theirs = (piece.strip() for piece in part.partition("="))
            if not equals or not ours or not theirs:
                raise ConfigError(f"--map {text}: {part!r} is not of the form FIELD=NAME, such as role=from")
            if ours not in known:
                near = difflib.get_close_matches(ours, known, 1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(f"--map {text}: there is no field {ours!r}; {hint}the fields are {', '.join(known)}")
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
        """Return the row with the field names of `SHAPES`. Raises DataError, with the name, if a field is missing."""
        if not self.names:
            return row
        for ours in COLUMNS:
            if ours in self.names:
                self._require(row, ours, origin, "row")
        out = {ours: row[theirs] for ours, theirs in self.names.items() if ours in COLUMNS}
        system = out.pop("system", None)
        if "prompt" in out or "text" in out:
            return _with_system(out, system)
        if "messages" not in out:
            found = next((name for name in _LISTS if row.get(name) is not None), None)
            if found is None and "prompt" in row and self.names.keys().isdisjoint((*KEYS, *SPEAKERS)):
                return _with_system({**row, **out}, system)
            if found is None:
                raise DataError(
                    f"{origin}: --map names keys of messages, but there is no `messages` or `conversations`; "
                    f"{_fields(row)}; name the field of the list too, as messages=NAME"
                )
            out["messages"] = row[found]
        out.setdefault("tools", row.get("tools"))
        where = f"{origin}: `{self.names.get('messages', 'messages')}`"
        if isinstance(out["messages"], Sequence) and not isinstance(out["messages"], str):
            out["messages"] = [self._message(m, f"{where}, message {n}") for n, m in enumerate(out["messages"], 1)]
        return _with_system(out, system)

    def _message(self, message: Any, origin: str) -> Any:
        if not isinstance(message, Mapping):
            return message  # the caller reports the error
        if "role" in self.names:
            self._require(message, "role", origin, "message")
        renamed = {self.names[ours]: ours for ours in KEYS if ours in self.names}
        out = {renamed.get(key, key): value for key, value in message.items()}
        role = "role" if "role" in out else "from"
        speaker = {self.names[ours]: ours for ours in SPEAKERS if ours in self.names}
        if out.get(role) in speaker:
            out[role] = speaker[out[role]]
        if "content" in self.names and "content" not in out and not out.get("tool_calls"):
            self._require(message, "content", origin, "message")
        if role == "from" and "content" in out:  # only the content was mapped
            out["role"] = out.pop("from", None)
        if role == "role" and "value" in out and "content" not in out:
            out["content"] = out.pop("value")
        return out

    def _require(self, row: Mapping[str, Any], ours: str, origin: str, what: str) -> None:
        theirs = self.names[ours]
        if theirs not in row or (row[theirs] is None and ours not in _OPTIONAL and what == "row"):
            raise DataError(
                f"{origin}: no field `{theirs}`, which --map names as the {ours}; "
                f"{_fields(row, what)}; fix the row or --map, or skip such rows with --skip-bad"
            )


def _fields(row: Mapping[str, Any], what: str = "row") -> str:
    return f"the {what}'s fields are: {', '.join(map(str, row)) or 'none'}"


def _with_system(row: dict[str, Any], system: Any) -> dict[str, Any]:
    """Return the row with its system prompt, if any, as the first message."""
    if not system or "text" in row:
        return row
    first = [{"role": "system", "content": system}]
    if "messages" in row:
        return {**row, "messages": [*first, *row["messages"]]}
    prompt = row["prompt"]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {**row, "prompt": [*first, *turns]}


def choose(maps: Iterable[str], source: str) -> FieldMap | None:
    """Return the source's own map (`SOURCE:FIELD=NAME,…`), else the map for all sources, else None."""
    found: dict[str, FieldMap] = {}
    for text in maps:
        place = place_of(text)
        parsed = FieldMap.parse(text[len(place) + 1 :] if place else text)
        if place in found and place in ("", source):
            raise ConfigError(f"--map {text}: there is another map for this; put all fields into one, with commas")
        found[place] = parsed
    return found.get(source, found.get(""))


def place_of(text: str) -> str:
    """Return the source that a map is for, or "" if it is for all."""
    return text.partition("=")[0].rpartition(":")[0]


def parse_row(row: Mapping[str, Any], origin: str, fields: FieldMap | None = None) -> Conversation:
    """Parse one row in any of `SHAPES`, or with the names of `fields`.

    Raises DataError with the row's origin, its keys and the known shapes if it cannot be parsed.
    """
    if fields is not None:
        row = fields.apply(row, origin)
    row = {k: v for k, v in row.items() if v is not None}
    for key in ("messages", "conversations"):
        if key in row:
            messages = _messages(row[key], f"{origin}: `{key}`")
            return Conversation(messages, tools=_tools(row, origin), origin=origin)
    if "prompt" in row:
        turns = [*_turns(row["prompt"], "user", origin)]
        if "completion" in row:
            turns += _turns(row["completion"], "assistant", origin)
        return Conversation(tuple(turns), tools=_tools(row, origin), origin=origin)
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise DataError(f"{origin}: `text` must be a non-empty string, not {_show(row['text'])}")
        return Conversation(text=row["text"], origin=origin)
    keys = ", ".join(map(str, row)) or "none"
    raise DataError(
        f"{origin}: the row's keys ({keys}) have no known shape; name the fields with --map, such as "
        f"--map prompt=question,completion=answer, or convert the row to one of these:\n{SHAPES}"
    )


def _turns(value: Any, role: str, origin: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role, value),)
    return _messages(value, f"{origin}: the {'prompt' if role == 'user' else 'completion'}")


def _messages(value: Any, origin: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{origin} must be a non-empty list of messages, not {_show(value)}")
    return tuple(_message(item, f"{origin}, message {n}") for n, item in enumerate(value, 1))


def _message(item: Any, origin: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{origin} must be an object, not {_show(item)}")
    item = {k: v for k, v in item.items() if v is not None}
    role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
    role = item.pop(role_key, None)
    if not isinstance(role, str):
        keys = ", ".join(map(str, item)) or "none"
        raise DataError(
            f"{origin} has no `role` (or ShareGPT's `from`); its keys are: {keys}; name it with --map role=…"
        )
    if content_key not in item and not item.get("tool_calls"):
        keys = ", ".join(map(str, item)) or "none"
        raise DataError(f"{origin} has no `{content_key}`; its keys are: {keys}; name it with --map content=…")
    content = _content(item.pop(content_key, ""), origin)
    if "tool_calls" in item:
        item["tool_calls"] = _calls(item["tool_calls"], origin)
    if not item.get("tool_calls", True):
        del item["tool_calls"]
    return Message(_ROLES.get(role, role), content, item)


def _content(value: Any, origin: str) -> str:
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, Sequence) else [value]
    if all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
        return "".join(p["text"] for p in parts)
    raise DataError(f"{origin}: the content must be text, not {_show(value)}")


def _calls(value: Any, origin: str) -> list[dict[str, Any]]:
    """Return tool calls with arguments as objects, as chat templates need them. Some data sets store JSON strings."""
    calls = _decoded(value)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{origin}: `tool_calls` must be a list of objects, not {_show(value)}")
    return [_call(call) for call in calls]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(call)
    if isinstance(out.get("function"), Mapping):
        return {**out, "function": _call(out["function"])}
    if isinstance(out.get("arguments"), str):
        decoded = _decoded(out["arguments"])
        out["arguments"] = decoded if isinstance(decoded, Mapping) else out["arguments"]
    return out


def _tools(row: Mapping[str, Any], origin: str) -> tuple[Mapping[str, Any], ...]:
    value = row.get("tools")
    tools = _decoded(value) if value else []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{origin}: `tools` must be a list of objects, or a JSON string of one, not {_show(value)}")
    return tuple(tools)


def _decoded(value: Any) -> Any:
    """Decode a JSON string; return other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _show(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "…"
