"""Shorten recorded requests: keep all fields and types, but few words of their texts and nothing personal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.clients.recorder import Exchange

PROSE = {"text", "content", "description", "instructions", "definition", "output"}
"""Fields with texts."""
SHORT_TEXT = 40
"""Texts of up to this many characters stay, such as the question and tool results."""
PERSONAL = {"metadata", "client_metadata", "prompt_cache_key"}
"""Fields with ids of people, machines and sessions."""
HEADERS = ("user-agent", "anthropic-", "x-stainless-", "x-app", "accept", "content-type", "originator")
KNOWN = "x-anthropic-billing-header:"
"""The start of a text that the server removes."""


def trimmed(exchanges: Sequence[Exchange], called: str | None) -> list[dict[str, Any]]:
    """Return requests as the tests replay them. called: a tool that must stay."""
    return [
        {
            "method": each.method,
            "path": each.path,
            "headers": {name.lower(): text for name, text in each.headers.items() if name.lower().startswith(HEADERS)},
            "body": _body(each.body, called) if each.body else None,
        }
        for each in exchanges
    ]


def _body(body: Any, called: str | None) -> Any:
    tools = body.get("tools")
    short = {name: _short(value, name) for name, value in body.items() if name != "tools"}
    known: set[str] = set()
    return short if tools is None else short | {"tools": [t for t in (_tool(t, known, called) for t in tools) if t]}


def _short(value: Any, field: str) -> Any:
    if isinstance(value, str):
        return "0" if field in PERSONAL else _text(value) if field in PROSE else value
    if isinstance(value, list):
        return [_short(each, field) for each in value]
    if isinstance(value, dict):
        return dict.fromkeys(value, "0") if field in PERSONAL else {name: _short(value[name], name) for name in value}
    return value


def _text(text: str) -> str:
    return text if len(text) <= SHORT_TEXT or text.startswith(KNOWN) else text.split()[0]


def _tool(tool: dict[str, Any], known: set[str], called: str | None) -> dict[str, Any] | None:
    """Return a tool without parts that repeat known fields and JSON Schema words; None if nothing is left."""
    name = tool.get("name") or tool.get("function", {}).get("name")
    if name != called and not set(_words(tool)) - known:
        return None
    return _kept(tool, known, name == called)


def _kept(value: Any, known: set[str], whole: bool) -> Any:
    if isinstance(value, list):
        return [_kept(each, known, whole) for each in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for name, each in value.items():
        known.update(_word(name, each))
        if name == "properties":
            needed = value.get("required", ())
            kept[name] = {
                own: _kept(schema, known, whole)
                for own, schema in each.items()
                if whole or own in needed or set(_words(schema)) - known
            }
        else:
            prose = name in PROSE and isinstance(each, str)
            kept[name] = each[:SHORT_TEXT].split(" ")[0] if prose else _kept(each, known, whole)
    return kept


def _word(name: str, value: Any) -> Iterator[str]:
    yield f"{name}={value}" if name in ("type", "format") and isinstance(value, str) else name


def _words(value: Any) -> Iterator[str]:
    """Yield names of fields and types, except a tool's own parameters."""
    if isinstance(value, list):
        for each in value:
            yield from _words(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _word(name, each)
            yield from _words(list(each.values()) if name == "properties" else each)
