"""Texts that an answer may be, written as grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .reasoning import ReasoningTags
from .tool_calls import ToolCallTags
from .tools import Tool

Schema = Mapping[str, Any]
TagWriter = Callable[[str], str]
"""A tag -> what stands for it in a grammar: its special tokens, else its text."""

_WHITE_SPACE = r"[ \n\r\t]{1,40}"
"""Between the parts of JSON: as much as people indent, and no more, so that no model fills its answer with blanks."""


def grammar_text(
    schema: Schema | None,
    tools: Sequence[Tool],
    calls: ToolCallTags | None,
    several: bool,
    thoughts: ReasoningTags,
    thinking: bool,
    tag: TagWriter,
) -> str:
    """The grammar of an answer that is JSON by the schema, or calls of the tools; where both are given, either.

    A model that thinks may do so first; where it is `thinking` already it must come to an end of it.
    """
    rules = ["start: before? answer"] if thoughts.think_start and not thinking else ["start: before answer"]
    rules += _thought(thoughts, thinking, tag)
    answers = []
    if schema is not None:
        answers.append("json")
        rules.append(f"json: {_json(schema)}")
    if tools:
        assert calls is not None
        answers.append("calls")
        rules += _calls(tools, calls, several, tag)
    return "\n".join([*rules, f"answer: {' | '.join(answers)}", ""])


def _json(schema: Schema) -> str:
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": False}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _calls(tools: Sequence[Tool], tags: ToolCallTags, several: bool, tag: TagWriter) -> list[str]:
    """A JSON object with name and arguments, on a line between the tags."""
    bodies, rules = [], []
    for index, tool in enumerate(tools):
        name = json.dumps(f'{{"name": {json.dumps(tool["function"]["name"])}, "arguments": ')
        bodies.append(f"{name} arguments_{index}")
        rules.append(f"arguments_{index}: {_json(parameters_of(tool))}")
    return [
        'calls: call ("\\n" call)*' if several else "calls: call",
        f'call: {tag(tags.start)} "\\n" body "}}\\n" {tag(tags.end)}',
        f"body: {' | '.join(bodies)}",
        *rules,
    ]


def parameters_of(tool: Tool) -> Schema:
    """The schema of a tool's arguments, which are an object even where that is not said."""
    parameters: Schema = tool["function"].get("parameters") or {}
    return parameters if "type" in parameters else {**parameters, "type": "object"}


def _thought(tags: ReasoningTags, thinking: bool, tag: TagWriter) -> list[str]:
    """The rule of what may come before an answer."""
    if not tags.think_start:
        return ['before: ""']
    end = tag(tags.think_end)
    opening = "" if thinking else f"{tag(tags.think_start)} "
    if end.startswith("<"):
        return [f"before: {opening}THOUGHT {end} BREAKS", "THOUGHT: /(.|\\n)*/", "BREAKS: /\\n{0,2}/"]
    return [f"before: {opening}thought BREAKS", f"thought[suffix={end}]: /(.|\\n)*/", "BREAKS: /\\n{0,2}/"]
