"""Formats of calls and reasoning that mlx-lm has no parser for: gpt-oss, DeepSeek, Llama and Gemma."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .bare_calls import parse_bare_call
from .parser import ReasoningTags
from .tools import CallForm, ToolCallTags

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
    """Return how a model with this chat template writes calls, or None if it is unknown."""
    if not isinstance(template, str):
        return None
    return next((tags for marks, tags in _MARKS.items() if all(mark in template for mark in marks)), None)


def reasoning_tags(template: Any) -> ReasoningTags | None:
    """Return how a model with this chat template writes reasoning, or None if its tokenizer says it."""
    return _HARMONY_THOUGHTS if call_tags(template) is _HARMONY else None
