"""Rewrite messages with calls for chat templates that take one call per message, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .tools import CallForm, Tool, ToolCallTags

_INSTRUCTIONS = """You have access to these functions:
{tools}

To call a function, write only this, and end your answer:
{form}

The next message has the result. If no function helps, answer without a call."""

Way = tuple[list[dict[str, Any]], Mapping[str, Any]]
"""Messages and the template's other arguments."""


def ways_to_render(
    messages: list[dict[str, Any]], arguments: Mapping[str, Any], calls: ToolCallTags | None
) -> list[Way]:
    """Return messages and arguments in the template's own way, then with tools and calls as text, if that may help.

    Text describes the tools in the system message, or in the user's if the template takes no system messages.
    """
    if calls is not None and calls.one_by_one:
        messages = one_call_each(messages, with_thinking=not calls.rewrites)
    tools, ways = arguments["tools"] or (), [(messages, arguments)]
    if calls is None or not calls.form or not calls.rewrites or not (tools or any("tool_calls" in m for m in messages)):
        return ways
    texts = (as_text(messages, tools, calls.form, place) for place in ("system", "user"))
    return ways + [(text, {**arguments, "tools": None}) for text in texts]


def one_call_each(messages: Sequence[Mapping[str, Any]], with_thinking: bool) -> list[dict[str, Any]]:
    """Return messages with at most one call each. The other calls go before their results.

    with_thinking: reasoning and content before a call become `thinking`, as gpt-oss's template takes them.
    """
    changed: list[dict[str, Any]] = []
    waiting: dict[str, dict[str, Any]] = {}
    for message in map(dict, messages):
        if calls := message.get("tool_calls"):
            message["tool_calls"] = calls[:1]
            waiting = {call["id"]: call for call in calls[1:] if "id" in call}
            if with_thinking and (thought := message.get("reasoning_content")):
                message |= {"thinking": "\n\n".join(filter(None, (thought, message["content"]))), "content": ""}
        elif call := waiting.pop(message.get("tool_call_id", ""), None):
            changed.append({"role": "assistant", "content": "", "tool_calls": [call]})
        changed.append(message)
    return changed


def as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], form: CallForm, place: str
) -> list[dict[str, Any]]:
    """Return messages with tools, calls and results in their contents. Roles alternate.

    place: the role that describes the tools, `system` or `user`; with `user`, there are no system messages.
    """
    each = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = _INSTRUCTIONS.format(tools=each, form=form.write([("FUNCTION_NAME", '{"ARGUMENT_NAME": VALUE}')]))
    names: dict[Any, str] = {}
    changed: list[dict[str, Any]] = [{"role": place, "content": told}] if tools else []
    for message in messages:
        role, content = message["role"], message["content"]
        calls = message.get("tool_calls", ())
        names |= {call.get("id"): call["function"]["name"] for call in calls}
        if calls:
            made = [(call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in calls]
            content = "\n".join(filter(None, (content, form.write(made))))
        elif role == "tool":
            role, content = "user", f"Result of {names.get(message['tool_call_id'], 'the call')}:\n{content}"
        elif role == "system":
            role = place
        if changed and changed[-1]["role"] == role:
            changed[-1]["content"] += f"\n\n{content}"
        else:
            changed.append({"role": role, "content": content})
    return changed
