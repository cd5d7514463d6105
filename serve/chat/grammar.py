"""The grammar of an answer, in llguidance's dialect of Lark, and the matcher that makes a request follow it.

The matchers run in separate processes (`process_work.py`), one for each grammar and one for each request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError

from ..processes import Process, ProcessEnded
from .parser import ReasoningTags
from .tools import CallForm, Tool, ToolCallTags

Schema = Mapping[str, Any]
TagWriter = Callable[[str], str]
"""Maps a tag to its form in a grammar: its special tokens if it has any, else its text."""

_WHITE_SPACE = r"[ \n\r\t]{1,40}"
"""White space between parts of JSON. The limit keeps a model from filling its answer with blanks."""


def grammar_text(
    schema: Schema | None,
    tools: Sequence[Tool],
    calls: ToolCallTags | None,
    several: bool,
    thoughts: ReasoningTags,
    thinking: bool,
    tag: TagWriter,
) -> str:
    """Return the grammar of an answer: JSON that fits the schema, or calls of the tools; either one if both are given.

    A model that can think may do so first; if it is already `thinking`, it must end its reasoning first.
    """
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
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient}
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
    """Return the schema of a tool's arguments. They are always an object, even if the schema does not say so."""
    parameters: Schema = tool["function"].get("parameters") or {}
    parameters = _enforceable(parameters) if is_loose(tool) else parameters
    return parameters if "type" in parameters else {**parameters, "type": "object"}


def is_loose(tool: Tool) -> bool:
    """Return whether what a grammar cannot enforce in a tool's schema is ignored: a client asks by `strict` for all."""
    return tool["function"].get("strict") is not True


_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_MOST_BOUND = 2**53
"""Bounds beyond it say only that a number has 64 bits; llguidance cannot write them as expressions."""
_BEYOND_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9]")
"""Look-around and backreferences in patterns."""


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


def _thought(tags: ReasoningTags, thinking: bool, tag: TagWriter) -> list[str]:
    if not tags.think_start:
        return ['before: ""']
    end, resume = tag(tags.think_end), tag(tags.resume)
    opening = "" if thinking else f"{tag(tags.think_start)} "
    if end.startswith("<"):
        return [f"before: {opening}THOUGHT {end} BREAKS {resume}", "THOUGHT: /(.|\\n)*/", "BREAKS: /\\n{0,2}/"]
    return [f"before: {opening}thought BREAKS {resume}", f"thought[suffix={end}]: /(.|\\n)*/", "BREAKS: /\\n{0,2}/"]


MASK_SECONDS = 10.0
"""The limit for the masks of one round. Beyond it, the request ends. Ordinary masks take less than 10 ms."""
MOST_MEMORY = 256 << 20
"""Bytes for compiling or following a grammar: about twice as much as llguidance's own limits allow."""
_LONGEST_REASON = 400


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar at the beginning of a text, in its own process."""

    process: Process
    first: NDArray[np.bool_]
    """[V], the mask of the first token."""
    vocab_size: int
    ends: frozenset[int]


class MatcherGrammar:
    """A request's own matcher. Implements `eagle_mlx.sampling_params.AsyncGrammar`.

    Raises ConfigError if the grammar becomes too complex to follow. Accepted tokens are sent with the next request for
    masks; until then, the known masks say which tokens are allowed.
    """

    def __init__(self, compiled: CompiledGrammar):
        self.compiled = compiled
        self.process: Process | None = None
        """Forked on first use, because many requests wait in a queue."""
        self._undo = 0
        self._taken: list[int] = []
        """Changes not yet sent to the process: it must undo `_undo` tokens, then accept these."""
        self._masks = [compiled.first]
        """The known masks; the first is the next token's."""
        self._draft: list[int] = []
        """The draft tokens between the masks."""
        self._asked: float | None = None
        """When the pending masks were requested."""

    def ask(self, draft: Sequence[int]) -> None:
        if self._masks and not draft:
            return
        try:
            if self.process is None:
                self.process = self.compiled.process.fork()
            self.process.ask("masks", self._undo, self._taken, list(draft))
        except ProcessEnded as e:
            raise ConfigError(_TOO_MUCH) from e
        self._undo, self._taken, self._masks, self._draft = 0, [], [], list(draft)
        self._asked = monotonic()

    def answer(self, seconds: float) -> list[mx.array] | None:
        if self._asked is not None and not self._receive(seconds):
            return None
        return [mx.array(mask) for mask in self._masks]

    def _receive(self, seconds: float) -> bool:
        assert self.process is not None
        assert self._asked is not None
        left = self._asked + MASK_SECONDS - monotonic()
        try:
            answer = self.process.answer(max(0.0, min(seconds, left)))
        except ProcessEnded as e:
            raise ConfigError(_TOO_MUCH) from e
        if answer is None:
            if seconds < left:
                return False
            self.process.end()
            raise ConfigError(f"{_FAILED}: computing the allowed tokens takes more than {MASK_SECONDS:g} s")
        masks, reason = answer
        if reason:
            raise ConfigError(f"{_FAILED}: {on_one_line(reason)}")
        self._asked, self._masks = None, [unpacked(mask, self.compiled.vocab_size) for mask in masks]
        return True

    def _known(self) -> NDArray[np.bool_]:
        if not self._masks:
            if self._asked is None:
                self.ask([])
            self._receive(MASK_SECONDS)
        if not self._masks[0].any():
            raise ConfigError(f"{_FAILED}: no token is allowed, and the text may not end here")
        return self._masks[0]

    def mask(self) -> mx.array:
        """Return the next token's mask, [V] bool."""
        return mx.array(self._known())

    def advance(self, token: int) -> bool:
        if token in self.compiled.ends or not self._known()[token]:
            return False
        self._taken.append(token)
        foreseen = len(self._masks) > 1 and self._draft[0] == token
        self._masks, self._draft = (self._masks[1:], self._draft[1:]) if foreseen else ([], [])
        return True

    def rollback(self, count: int) -> None:
        if count:
            kept = max(0, len(self._taken) - count)
            self._undo += count - (len(self._taken) - kept)
            del self._taken[kept:]
            self._masks, self._draft = [], []


_FAILED = "the text cannot follow it any further"
_TOO_MUCH = f"{_FAILED}: it takes more than {MOST_MEMORY >> 20} MB of memory"


def unpacked(bits: bytes, count: int) -> NDArray[np.bool_]:
    """Unpack a bit mask to [count] bool."""
    packed = np.frombuffer(bits, np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)


def on_one_line(reason: str) -> str:
    """Return llguidance's reason as one line for an error message."""
    return " ".join(reason.replace("<non-verbose/>", "").split())[:_LONGEST_REASON]
