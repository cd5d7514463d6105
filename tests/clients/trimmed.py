"""Shorten recorded requests: keep all fields and types, but few words of their texts and nothing personal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
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
    """Return requests that were answered, as the tests replay them. called: a tool that must stay."""
    return [
        {
            "method": exchange.method,
            "path": exchange.path,
            "headers": {
                name.lower(): text for name, text in exchange.headers.items() if name.lower().startswith(HEADERS)
            },
            "body": _body(exchange.body, called) if exchange.body else None,
        }
        for exchange in exchanges
        if exchange.status == HTTPStatus.OK
    ]


def _body(body: Any, called: str | None) -> Any:
    tools = body.get("tools")
    short = {name: _short(value, name) for name, value in body.items() if name != "tools"}
    words: set[str] = set()
    return short if tools is None else short | {"tools": [t for t in (_tool(t, words, called) for t in tools) if t]}


def _short(value: Any, field: str) -> Any:
    if isinstance(value, str):
        return "0" if field in PERSONAL else _text(value) if field in PROSE else value
    if isinstance(value, list):
        return [_short(item, field) for item in value]
    if isinstance(value, dict):
        return dict.fromkeys(value, "0") if field in PERSONAL else {name: _short(value[name], name) for name in value}
    return value


def _text(text: str) -> str:
    return text if len(text) <= SHORT_TEXT or text.startswith(KNOWN) else text.split()[0]


def _tool(tool: dict[str, Any], words: set[str], called: str | None) -> dict[str, Any] | None:
    """Return a tool without parts that repeat known fields and JSON Schema words; None if nothing is left."""
    name = tool.get("name") or tool.get("function", {}).get("name")
    if name != called and not set(_words(tool)) - words:
        return None
    return _kept(tool, words, name == called)


def _kept(value: Any, words: set[str], whole: bool) -> Any:
    if isinstance(value, list):
        return [_kept(part, words, whole) for part in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for name, part in value.items():
        words.update(_word(name, part))
        if name == "properties":
            needed = value.get("required", ())
            kept[name] = {
                own: _kept(schema, words, whole)
                for own, schema in part.items()
                if whole or own in needed or set(_words(schema)) - words
            }
        else:
            prose = name in PROSE and isinstance(part, str)
            kept[name] = part[:SHORT_TEXT].split(" ")[0] if prose else _kept(part, words, whole)
    return kept


def _word(name: str, value: Any) -> Iterator[str]:
    yield f"{name}={value}" if name in ("type", "format") and isinstance(value, str) else name


def _words(value: Any) -> Iterator[str]:
    """Yield names of fields and types, except a tool's own parameters."""
    if isinstance(value, list):
        for part in value:
            yield from _words(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _word(name, part)
            yield from _words(list(part.values()) if name == "properties" else part)
