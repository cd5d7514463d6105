"""Formats of calls and reasoning that mlx-lm has no parser for, and messages for templates that take no such calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from .parser import ReasoningTags, parse_bare_call
from .tools import CallForm, Tool, ToolCallTags

JSON_TOOLS = CallForm('\n{"name": "', '", "arguments": ', "}\n", "<tool_call>", "</tool_call>", outer="\n")
"""The form of mlx-lm's parser `json_tools`."""

# https://github.com/openai/openai-cookbook/blob/main/articles/openai-harmony.md
_START, _ANALYSIS, _JSON = "<|start|>assistant", "<|channel|>analysis", " <|constrain|>json"
_TO_CONTENT = (_START, "<|channel|>final", "<|channel|>commentary", "<|end|>", "<|return|>", "<|call|>")
_STAY = (_JSON, "<|message|>")
_HARMONY_THOUGHTS = ReasoningTags(
    f"{_ANALYSIS}<|message|>",
    "<|end|>",
    {
        state: [(_ANALYSIS, "reasoning"), *((tag, "content") for tag in _TO_CONTENT), *((tag, state) for tag in _STAY)]
        for state in ("content", "reasoning")
    },
    resume=_START,
    answer=f"<|channel|>final{_JSON}<|message|>",
)
"""gpt-oss's channels: `analysis` is reasoning, the others are content. A `commentary` with a recipient is a call."""
_HARMONY_HEADER = re.compile(r"([\w.-]{1,128})[^{]{0,200}?<\|message\|>")


def parse_harmony_call(body: str, tools: Any) -> dict[str, Any]:
    """Parse a call after ` to=functions.`: a name, perhaps a channel and a content type, and JSON arguments."""
    header = _HARMONY_HEADER.match(body)
    if header is None:
        raise ValueError("the call has no message")
    return {"name": header[1], "arguments": json.loads(body[header.end() :] or "{}")}


_HARMONY = ToolCallTags(
    " to=functions.",
    "<|call|>",
    parse_harmony_call,
    "harmony",
    CallForm("<|channel|>commentary to=functions.", f"{_JSON}<|message|>", ""),
    one_by_one=True,
)


def _deepseek_tag(name: str) -> str:
    return f"<\uff5ctool▁{name}\uff5c>"


_CALL, _SEP, _CALL_END = map(_deepseek_tag, ("call▁begin", "sep", "call▁end"))
_CALLS, _CALLS_END = map(_deepseek_tag, ("calls▁begin", "calls▁end"))
_V3 = CallForm(f"{_CALL}function{_SEP}", "\n```json\n", f"\n```{_CALL_END}", _CALLS, _CALLS_END, "\n")
_V31 = CallForm(_CALL, _SEP, _CALL_END, _CALLS, _CALLS_END, "")


def parse_deepseek_calls(body: str, tools: Any) -> list[dict[str, Any]]:
    """Parse calls of V3 and R1, `function<sep>name`, then a block of JSON, and of V3.1, `name<sep>JSON`."""
    calls = []
    for part in body.strip().removesuffix(_CALL_END).split(_CALL_END):
        if not part.lstrip().startswith(_CALL):
            raise ValueError("text between calls")
        first, _, rest = part.lstrip().removeprefix(_CALL).partition(_SEP)
        name, _, block = rest.partition("\n```json\n")
        is_block = first == "function" and bool(block)
        arguments = block.rstrip().removesuffix("```") if is_block else rest
        calls.append({"name": name.strip() if is_block else first.strip(), "arguments": json.loads(arguments)})
    return calls


_BARE = CallForm('{"name": "', '", "parameters": ', "}", outer="; ")


def _deepseek(form: CallForm) -> ToolCallTags:
    return ToolCallTags(_CALLS, _CALLS_END, parse_deepseek_calls, "deepseek", form, rewrites=True)


def _bare(name: str) -> ToolCallTags:
    return ToolCallTags("", "", parse_bare_call, name, _BARE, one_by_one=True, rewrites=True)


_MARKS: Mapping[tuple[str, ...], ToolCallTags] = {
    ("<|channel|>commentary",): _HARMONY,
    (_CALLS, "```json"): _deepseek(_V3),
    (_CALLS,): _deepseek(_V31),
    ('"parameters": dictionary',): _bare("llama"),
    ("<start_of_turn>",): _bare("gemma"),
}
"""For each family, the parts that its chat templates have. The first that fits counts."""


def call_tags(template: Any) -> ToolCallTags | None:
    """Return how a model with this chat template, or these named ones, writes calls, or None if it is unknown."""
    if isinstance(template, Mapping):
        template = "\n".join(template.values())
    if not isinstance(template, str):
        return None
    return next((tags for marks, tags in _MARKS.items() if all(mark in template for mark in marks)), None)


def reasoning_tags(template: Any) -> ReasoningTags | None:
    """Return how a model with this chat template writes reasoning, or None if its tokenizer says it."""
    return _HARMONY_THOUGHTS if call_tags(template) is _HARMONY else None


_INSTRUCTIONS = """You have access to these functions:
{tools}

To call a function, write only this, and end your answer:
{form}

The next message has the result. If no function helps, answer without a call."""

Way = tuple[list[dict[str, Any]], Mapping[str, Any]]
"""Messages and the template's other arguments."""


def ways_to_render(
    messages: list[dict[str, Any]], arguments: Mapping[str, Any], calls: ToolCallTags | None
) -> Iterator[Way]:
    """Yield messages and arguments in the template's own way, then in others that may help.

    Some templates cannot take call arguments as objects, some refuse system messages after the first turn, and some
    take no tools or calls. Text describes these in the system message, or in the user's if there is none.
    """
    if calls is not None and calls.one_by_one:
        messages = one_call_each(messages, with_thinking=not calls.rewrites)
    late = with_late_instructions_from_user(messages)
    for changed in [messages] if late == messages else [messages, late]:
        yield changed, arguments
        yield with_argument_texts(changed), arguments
    tools = arguments["tools"] or ()
    if calls is not None and calls.form and calls.rewrites and (tools or any("tool_calls" in m for m in messages)):
        for place in ("system", "user"):
            yield as_text(messages, tools, calls.form, place), {**arguments, "tools": None}


def with_late_instructions_from_user(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Change late system messages to user messages, for templates that allow none after the first turn."""
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    late = ({**message, "role": "user"} if message["role"] == "system" else message for message in messages[first:])
    return [dict(message) for message in (*messages[:first], *late)]


def with_argument_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with call arguments as JSON text, for templates that concatenate them."""
    changed = deepcopy(list(map(dict, messages)))
    for function in (call["function"] for message in changed for call in message.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return changed


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
