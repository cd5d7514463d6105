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
"""Columns of a row, before the keys of a message. `tools` may be a list or its JSON."""
KEYS = ("role", "content", "tool_calls", "reasoning_content")
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
                hint = nearest(ours, known)
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
        columns = {ours: theirs for ours, theirs in self.names.items() if ours in COLUMNS}
        for ours in columns:
            self._require(row, ours, origin, "row")
        out = {ours: row[theirs] for ours, theirs in columns.items()}
        system = out.pop("system", None)
        if not out.keys() & {"prompt", "text", "messages"}:  # only other fields have unknown names
            found = next((name for name in _LISTS if row.get(name) is not None), None)
            if found is not None:
                out["messages"] = row[found]
            elif "prompt" in row and columns.keys() == self.names.keys():
                out = {**row, **out}
            else:
                raise DataError(
                    f"{origin}: --map names keys of messages, but there is no `messages` or `conversations`; "
                    f"the row's fields are: {_listed(row)}; name the field of the list too, as messages=NAME"
                )
        if "messages" in out and "prompt" not in out:
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
        if "content" in self.names and "content" not in out and not out.get("tool_calls"):
            self._require(message, "content", origin, "message")
        role = "role" if "role" in out else "from"
        speaker = {self.names[ours]: ours for ours in SPEAKERS if ours in self.names}
        return {**out, role: speaker[out[role]]} if out.get(role) in speaker else out

    def _require(self, row: Mapping[str, Any], ours: str, origin: str, what: str) -> None:
        theirs = self.names[ours]
        if theirs not in row or (row[theirs] is None and ours not in _OPTIONAL and what == "row"):
            raise DataError(
                f"{origin}: no field `{theirs}`, which --map names as the {ours}; "
                f"the {what}'s fields are: {_listed(row)}; fix the row or --map, or skip such rows with --skip-bad"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "none"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an error message, `did you mean X? `, or "" if no known name is similar."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}? " if near else ""


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
        turns = _turns(row["prompt"], "user", origin)
        turns += _turns(row["completion"], "assistant", origin) if "completion" in row else ()
        return Conversation(turns, tools=_tools(row, origin), origin=origin)
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise DataError(f"{origin}: `text` must be a non-empty string, not {_show(row['text'])}")
        return Conversation(text=row["text"], origin=origin)
    raise DataError(
        f"{origin}: the row's keys ({_listed(row)}) have no known shape; name the fields with --map, such as "
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
    role_key, content_key = ("from", "value") if "from" in item and "role" not in item else ("role", "content")
    content_key = next((key for key in ("content", "value") if key in item), content_key)
    role = item.pop(role_key, None)
    if not isinstance(role, str):
        raise DataError(
            f"{origin} has no `role` (or ShareGPT's `from`); its keys are: {_listed(item)}; name it with --map role=…"
        )
    if content_key not in item and not item.get("tool_calls"):
        raise DataError(f"{origin} has no `{content_key}`; its keys are: {_listed(item)}; name it with --map content=…")
    content = _content(item.pop(content_key, ""), origin)
    if calls := _objects(item.pop("tool_calls", []), f"{origin}: `tool_calls`"):
        item["tool_calls"] = list(map(_call, calls))
    return Message(_ROLES.get(role, role), content, item)


def _content(value: Any, origin: str) -> str:
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, Sequence) else [value]
    if all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
        return "".join(p["text"] for p in parts)
    raise DataError(f"{origin}: the content must be text, not {_show(value)}")


def _objects(value: Any, what: str) -> list[Mapping[str, Any]]:
    """Return a list of objects, which may be given as a JSON string."""
    found = _decoded(value)
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise DataError(f"{what} must be a list of objects, or a JSON string of one, not {_show(value)}")
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as chat templates need it, even if it is a JSON string."""
    out = dict(call)
    if isinstance(out.get("function"), Mapping):
        return {**out, "function": _call(out["function"])}
    if isinstance(out.get("arguments"), str):
        decoded = _decoded(out["arguments"])
        out["arguments"] = decoded if isinstance(decoded, Mapping) else out["arguments"]
    return out


def _tools(row: Mapping[str, Any], origin: str) -> tuple[Mapping[str, Any], ...]:
    return tuple(_objects(row.get("tools") or [], f"{origin}: `tools`"))


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
