"""The grammar of an answer: its text in llguidance's dialect of Lark, and the matcher of a request that must follow it.

The matchers live in processes of their own (`process_work.py`), one for each grammar and one for each request.
"""

from __future__ import annotations

import json
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
        f"other: {free_tokens}" if free_tokens else "",
        # A lazy rule ends with the first tag.
        f"open[lazy]: ANY {start}" if start == spelled else f"open: TEXT? {start}",
    ]
    return "\n".join([*rules, *_calls(tools, calls, "open", tag), ""])


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


MASK_SECONDS = 10.0
"""Of the masks of one round; beyond them the request ends. Ordinary masks take under 10 ms."""
MOST_MEMORY = 256 << 20
"""Bytes that compiling a grammar, or following it, may take: about twice what llguidance's own limits lead to."""
_LONGEST_REASON = 400


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar in a process of its own, at the beginning of a text."""

    process: Process
    first: NDArray[np.bool_]
    """[V], the first token's mask."""
    vocab_size: int
    ends: frozenset[int]


class MatcherGrammar:
    """A request's own matcher, as `eagle_mlx.sampling_params.AsyncGrammar` wants it.

    Raises ConfigError where the grammar has become too complex to follow. Tokens that it has taken are sent with the
    next question for masks; until then the known masks say which tokens are allowed.
    """

    def __init__(self, compiled: CompiledGrammar):
        self.compiled = compiled
        self.process: Process | None = None
        """Forked when it is needed: many requests wait in a queue."""
        self._undo = 0
        self._taken: list[int] = []
        """What the process does not know yet: tokens to undo, then those to take."""
        self._masks = [compiled.first]
        """Those that are known, the next token's first."""
        self._draft: list[int] = []
        """The tokens that lie between the masks."""
        self._asked: float | None = None
        """When the masks were asked for that have not come."""

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
            raise ConfigError(f"{_FAILED}: to find what may come next takes more than {MASK_SECONDS:g} s")
        masks, reason = answer
        if reason:
            raise ConfigError(f"{_FAILED}: {on_one_line(reason)}")
        self._asked, self._masks = None, [unpacked(mask, self.compiled.vocab_size) for mask in masks]
        return True

    def _known(self) -> NDArray[np.bool_]:
        """The next token's mask."""
        if not self._masks:
            if self._asked is None:
                self.ask([])
            self._receive(MASK_SECONDS)
        if not self._masks[0].any():
            raise ConfigError(f"{_FAILED}: nothing may come next, and the text may not end")
        return self._masks[0]

    def mask(self) -> mx.array:
        """[V] bool."""
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


_FAILED = "it cannot be followed any further"


_TOO_MUCH = f"{_FAILED}: it takes more than {MOST_MEMORY >> 20} MB of memory"


def unpacked(bits: bytes, count: int) -> NDArray[np.bool_]:
    """Return a mask [count] of packed bits."""
    packed = np.frombuffer(bits, np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)


def on_one_line(reason: str) -> str:
    """Return llguidance's reason as errors say it."""
    return " ".join(reason.replace("<non-verbose/>", "").split())[:_LONGEST_REASON]
