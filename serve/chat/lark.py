"""Texts that an answer may be, written as grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .reasoning import ReasoningTags
from .tools import Tool, ToolCallTags

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
        rules.append('calls: call ("\\n" call)*' if several else "calls: call")
        rules += _calls(tools, calls, tag(calls.start), tag)
    return "\n".join([*rules, f"answer: {' | '.join(answers)}", ""])


def free_text_grammar(tools: Sequence[Tool], calls: ToolCallTags, free_tokens: str, tag: TagWriter) -> str:
    """The grammar of any text in which each call that begins is a call of one of the tools, by its schema.

    The opening tag begins a call wherever it stands, in a thought too, because that is how answers are read. Text
    cannot spell it otherwise. free_tokens: those that may come and that no text allows, as a token set of the grammar.
    """
    start = tag(calls.start)
    spelled = json.dumps(calls.start, ensure_ascii=False)
    other = "TEXT? other | " if free_tokens else ""
    rules = [
        f"start: ({other}call)* TEXT?",
        f"TEXT: /(.|\\n)+/ & ~(ANY {spelled} ANY)",  # two TEXTs in a row could spell the tag together
        "ANY: /(.|\\n)*/",
    ]
    if free_tokens:
        rules.append(f"other: {free_tokens}")
    if start == spelled:  # a lazy rule ends with the first tag
        return "\n".join([*rules, f"open[lazy]: ANY {start}", *_calls(tools, calls, "open", tag), ""])
    return "\n".join([*rules, *_calls(tools, calls, f"TEXT? {start}", tag), ""])


def _json(schema: Schema) -> str:
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": False}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _calls(tools: Sequence[Tool], tags: ToolCallTags, opening: str, tag: TagWriter) -> list[str]:
    """The rules of a call: a JSON object with name and arguments, on a line between the opening and the end tag."""
    bodies, rules = [], []
    for index, tool in enumerate(tools):
        name = json.dumps(f'{{"name": {json.dumps(tool["function"]["name"])}, "arguments": ')
        bodies.append(f"{name} arguments_{index}")
        rules.append(f"arguments_{index}: {_json(parameters_of(tool))}")
    return [
        f'call: {opening} "\\n" body "}}\\n" {tag(tags.end)}',
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
