"""The grammar of an answer, in llguidance's dialect of Lark, and the matcher that makes a request follow it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from eagle_mlx.errors import ConfigError

from .template import ChatFormat
from .tools import AnswerStates, CallForm, Tool, ToolCallTags

Schema = Mapping[str, Any]
TagWriter = Callable[[str], str]  # maps a tag to its form in a grammar: its special tokens if it has any, else its text

_WHITE_SPACE = r"[ \n\r\t]{1,40}"
"""White space between parts of JSON. The limit keeps a model from filling its answer with blanks."""


def grammar_text(
    schema: Schema | None, tools: Sequence[Tool], format: ChatFormat, several: bool, thinking: bool, tag: TagWriter
) -> str:
    """Return the grammar of an answer: JSON that fits the schema, or calls of the tools; either one if both are given.

    A model that can think may do so first; if it is already `thinking`, it must end its reasoning first.
    """
    calls, thoughts = format.calls, format.thoughts
    rules = ["start: before? answer"] if thoughts.think_start and not thinking else ["start: before answer"]
    rules += _thought(thoughts, thinking, tag)
    answers = []
    if schema is not None:
        answers.append(f"{tag(thoughts.answer)} json")
        rules.append(f"json: {_json(schema)}")
    if tools:
        assert calls is not None
        assert calls.form is not None
        answers.append("calls")
        more = f" ({tag(calls.form.outer)} call)*" if several and calls.form.outer is not None else ""
        rules.append(f"calls: call{more}")
        rules += _calls(tools, calls.form, tag(calls.form.start), several, tag)
    return "\n".join([*rules, f"answer: {' | '.join(answers)}", ""])


def free_text_grammar(tools: Sequence[Tool], calls: ToolCallTags, free_tokens: str, tag: TagWriter) -> str:
    """Return the grammar of free text in which every call is a call of one of the tools, by its schema.

    The opening tag begins a call anywhere, even in a thought, because the parser reads it like that. Text cannot spell
    the tag in other tokens. free_tokens: a token set of the grammar: tokens that are allowed but are not text.
    """
    start = tag(calls.start)
    spelled = json.dumps(calls.start, ensure_ascii=False)
    other = "TEXT? other | " if free_tokens else ""
    rules = [
        f"start: ({other}call)* TEXT?",
        f"TEXT: /(.|\\n)+/ & ~(ANY {spelled} ANY)",  # two TEXTs in a row could spell the tag together
        "ANY: /(.|\\n)*/",
        f"other: {free_tokens}" if free_tokens else "",
        # A lazy rule ends with the first tag.
        f"open[lazy]: ANY {start}" if start == spelled else f"open: TEXT? {start}",
    ]
    assert calls.form is not None
    return "\n".join([*rules, *_calls(tools, calls.form, "open", True, tag), ""])


def _json(schema: Schema, lenient: bool = False) -> str:
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient, "json_allow_general_unicode_escapes": True}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _calls(tools: Sequence[Tool], form: CallForm, opening: str, several: bool, tag: TagWriter) -> list[str]:
    """Return the rules of a call, or of several in the same tags. opening: the grammar of the opening tag."""
    bodies, rules = [], []
    for index, tool in enumerate(tools):
        bodies.append(f"{tag(form.name + tool['function']['name'] + form.arguments)} arguments_{index}")
        rules.append(f"arguments_{index}: {_json(parameters_of(tool), is_loose(tool))}")
    more = f" ({tag(form.inner)} one)*" if several and form.inner is not None else ""
    first = [f"call: {opening} one{more} {tag(form.last)}", f"one: body {tag(form.end)}"]
    return [*first, f"body: {' | '.join(bodies)}", *rules]


def parameters_of(tool: Tool) -> Schema:
    """Return the schema of a tool's arguments. They are always an object, whatever type the schema has."""
    parameters: Schema = tool["function"].get("parameters") or {}
    parameters = _enforceable(parameters) if is_loose(tool) else parameters
    return {**parameters, "type": "object"}


def is_loose(tool: Tool) -> bool:
    """Return whether what a grammar cannot enforce in a tool's schema is ignored: a client asks by `strict` for all."""
    return tool["function"].get("strict") is not True


_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_MOST_BOUND = 2**53  # bounds beyond it say only that a number has 64 bits; llguidance cannot write them as expressions
_BEYOND_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9]")  # look-around and backreferences in patterns


def _enforceable(schema: Any) -> Any:
    """Return a schema without the values that llguidance refuses even if it is lenient about keywords and formats."""
    if isinstance(schema, list):
        return list(map(_enforceable, schema))
    if not isinstance(schema, dict):
        return schema
    return {key: _enforceable(value) for key, value in schema.items() if not _is_beyond(key, value)}


def _is_beyond(key: str, value: Any) -> bool:
    if isinstance(value, str):
        return (key == "pattern" and bool(_BEYOND_REGULAR.search(value))) or (key == "$ref" and value[:1] != "#")
    return key in _BOUNDS and isinstance(value, int | float) and abs(value) >= _MOST_BOUND


def _thought(tags: AnswerStates, thinking: bool, tag: TagWriter) -> list[str]:
    if not tags.think_start:
        return ['before: ""']
    end, resume = tag(tags.think_end), tag(tags.resume)
    opening = "" if thinking else f"{tag(tags.think_start)} "
    if end.startswith("<"):
        return [f"before: {opening}THOUGHT {end} BREAKS {resume}", "THOUGHT: /(.|\\n)*/", "BREAKS: /\\n{0,2}/"]
    return [f"before: {opening}thought BREAKS {resume}", f"thought[suffix={end}]: /(.|\\n)*/", "BREAKS: /\\n{0,2}/"]


class MatcherGrammar:
    """A request's own matcher. Implements `eagle_mlx.sampling_params.Grammar`.

    Raises ConfigError if the text cannot follow the grammar any further.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int, ends: frozenset[int]):
        self._matcher, self._tokenizer = matcher, tokenizer
        self._vocab, self._ends = vocab_size, ends

    def mask(self) -> mx.array:
        return mx.array(self._allowed(self._matcher.deep_copy()))

    def _allowed(self, ahead: LLMatcher) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return the mask of a copy: after an error, a matcher cannot be rolled back. A copy takes 1 us."""
        bits = np.frombuffer(ahead.compute_bitmask(), np.uint8)
        _check(ahead)
        return np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)

    def forced(self, most: int) -> list[int]:
        """Return the longest tokens that spell what must follow. Masks have limits, unlike `compute_ff_tokens`, which
        took 22 s for a pattern of a million letters."""
        ahead, tokens = self._matcher.deep_copy(), list[int]()
        while len(tokens) < most:
            allowed = np.flatnonzero(self._allowed(ahead.deep_copy()))
            if not 0 < allowed.size <= _SPELLINGS or not self._ends.isdisjoint(allowed.tolist()):
                break
            texts = {token: self._tokenizer.decode_bytes([token]) for token in allowed.tolist()}
            longest = max(texts, key=lambda token: len(texts[token]))
            if not all(map(texts[longest].startswith, texts.values())) or not ahead.try_consume_tokens([longest]):
                break
            tokens.append(longest)
        return tokens

    def advance(self, token: int) -> bool:
        if token in self._ends:
            return False
        taken = self._matcher.try_consume_tokens([token]) == 1
        _check(self._matcher)
        return taken

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)


def _check(matcher: LLMatcher) -> None:
    """Raise ConfigError if a matcher is in an error state: the text is at a dead end, or exceeds a limit."""
    if matcher.is_error():
        reason = on_one_line(matcher.get_error())
        dead_end = "no token is allowed, and the text may not end here"
        reason = dead_end if reason.startswith("NoExtension") else reason
        raise ConfigError(f"the text cannot follow it any further: {reason}")


_SPELLINGS = 64  # tokens that may begin a text that must follow: at most one for each of its beginnings
_LONGEST_REASON = 400


def on_one_line(reason: str) -> str:
    return " ".join(reason.replace("<non-verbose/>", "").split())[:_LONGEST_REASON]
