"""Rows whose fields have other names: which column or key holds what, as `--map` says it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_mlx.errors import ConfigError, DataError

COLUMNS = {
    "messages": "the list of messages",
    "prompt": "what the user says, where a row is one question and one answer",
    "completion": "what the assistant answers",
    "system": "the system prompt; may be null",
    "text": "plain text",
    "tools": "definitions of tools, a list or its JSON; may be null",
}
"""What a column of a row can be."""
KEYS = {
    "role": "who speaks",
    "content": "what is said",
    "tool_calls": "calls of tools",
    "reasoning_content": "thoughts before the answer",
}
"""What a key of a message can be."""
SPEAKERS = {"user": "the user's name among the roles", "assistant": "the assistant's name among the roles"}

_OPTIONAL = ("system", "tools", "completion")
"""Columns that may be null in a row."""
_LISTS = ("messages", "conversations")


@dataclass(frozen=True)
class FieldMap:
    """Names of fields; with no names, rows are taken as they are."""

    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What this project calls a field -> what the rows call it."""

    @classmethod
    def parse(cls, text: str) -> FieldMap:
        """Read `role=from,content=value`. Raises ConfigError for a field that there is not, or names that clash."""
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
                raise ConfigError(f"--map {text}: {ours} is named twice")
            names[ours] = theirs
        shapes = [
            shape
            for shape, members in (("messages", ("messages", *KEYS, *SPEAKERS)), ("prompt", ("prompt", "completion")))
            if any(member in names for member in members)
        ]
        shapes += ["text"] if "text" in names else []
        if len(shapes) > 1:
            raise ConfigError(f"--map {text}: a row is either {' or '.join(shapes)}; name the fields of one of them")
        if "completion" in names and "prompt" not in names:
            raise ConfigError(f"--map {text}: a completion needs a prompt; name its field too, as prompt=NAME")
        return cls(names)

    def apply(self, row: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
        """The row with the names of `conversation.SHAPES`. Raises DataError, naming the field, where one is missing."""
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
            if found is None and "prompt" in row and not self._in_messages:
                return _with_system({**row, **out}, system)
            if found is None:
                raise DataError(
                    f"{origin}: no `messages` or `conversations`, whose keys --map names; "
                    f"{_fields(row)}; name the list's own field too, as messages=NAME"
                )
            out["messages"] = row[found]
        out.setdefault("tools", row.get("tools"))
        where = f"{origin}: `{self.names.get('messages', 'messages')}`"
        if isinstance(out["messages"], Sequence) and not isinstance(out["messages"], str):
            out["messages"] = [self._message(m, f"{where}, message {n}") for n, m in enumerate(out["messages"], 1)]
        return _with_system(out, system)

    @property
    def _in_messages(self) -> bool:
        return any(name in self.names for name in (*KEYS, *SPEAKERS))

    def _message(self, message: Any, origin: str) -> Any:
        if not isinstance(message, Mapping):
            return message  # the reader says what is wrong with it
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
        if role == "from" and "content" in out:  # only the content was named
            out["role"] = out.pop("from", None)
        if role == "role" and "value" in out and "content" not in out:
            out["content"] = out.pop("value")
        return out

    def _require(self, row: Mapping[str, Any], ours: str, origin: str, what: str) -> None:
        theirs = self.names[ours]
        if theirs not in row or (row[theirs] is None and ours not in _OPTIONAL and what == "row"):
            raise DataError(
                f"{origin}: no field `{theirs}`, which --map names as the {ours}; "
                f"{_fields(row, what)}; fix the row or --map, or leave such rows out with --skip-bad"
            )


def _fields(row: Mapping[str, Any], what: str = "row") -> str:
    return f"the {what}'s fields are: {', '.join(map(str, row)) or 'none'}"


def _with_system(row: dict[str, Any], system: Any) -> dict[str, Any]:
    """The row with its system prompt as the first message, where it has one."""
    if not system or "text" in row:
        return row
    first = [{"role": "system", "content": system}]
    if "messages" in row:
        return {**row, "messages": [*first, *row["messages"]]}
    prompt = row["prompt"]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {**row, "prompt": [*first, *turns]}


def choose(maps: Iterable[str], source: str) -> FieldMap | None:
    """The map for a source: of `SOURCE:FIELD=NAME,…` its own, else the one that names no source, else None."""
    common: FieldMap | None = None
    own: FieldMap | None = None
    for text in maps:
        place = place_of(text)
        parsed = FieldMap.parse(text[len(place) + 1 :] if place else text)
        if not place:
            common = _once(common, parsed, text)
        elif place == source:
            own = _once(own, parsed, text)
    return own or common


def place_of(text: str) -> str:
    """The source that a map is for, empty where it names none."""
    return text.partition("=")[0].rpartition(":")[0]


def _once(before: FieldMap | None, now: FieldMap, text: str) -> FieldMap:
    if before is not None:
        raise ConfigError(f"--map {text}: there is a map for that already; put all of its fields into one, with commas")
    return now
