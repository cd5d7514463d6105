"""Compile JSON schemas and tool calls to grammars that the answers of requests must follow."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

from eagle_mlx.errors import ConfigError
from eagle_mlx.sampling_params import Grammar
from eagle_mlx.target import Target

from ..log_once import log_once
from ..processes import Process, ProcessEnded
from . import grammar as lark
from .process_work import MatcherProcess, Places
from .template import ChatFormat
from .tools import Tool, ToolOffer, tool_names, without

COMPILE_SECONDS = 5.0
"""The limit for compiling. Ordinary schemas take less than 0.1 s and those of 256 KiB up to 2 s, on an idle machine."""
_TOKENIZER_SECONDS = 60.0
"""The limit for reading the tokenizer. It takes 1 s for 49,152 tokens."""
MOST_SCHEMA_BYTES = 256 * 1024
"""The limit for all schemas of one request, as JSON text. Agents offer 45 tools of 75 KB."""
_MOST_KEPT = 16


class TooComplex(ConfigError):
    """Raised for schemas that take too much text, time or memory."""


class Grammars:
    """Compiles grammars for one target in separate processes, which are started once.

    May be used from any thread while the target decodes in its own.
    """

    def __init__(self, format: ChatFormat, vocab_size: int, eos_token_ids: Iterable[int]):
        self._format, self._vocab, self._ends = format, vocab_size, frozenset(eos_token_ids)
        self._tokenizer: Any = format.tokenizer
        self._starting = Lock()
        self._process: Process | None = None
        """The first process, which holds the tokenizer. It is forked for each grammar."""
        self._special: frozenset[int] = frozenset()
        """Special tokens. No text allows them; grammars name them by their ids."""
        self._partial: frozenset[int] = frozenset()
        """Tokens with parts of non-ASCII characters. A grammar's text allows them only as parts of whole characters."""
        self._compiled = lru_cache(_MOST_KEPT)(self._compile)

    @classmethod
    def of(cls, target: Target, format: ChatFormat | None = None) -> Grammars:
        return cls(format or ChatFormat.of(target), target.vocab_size, target.eos_token_ids)

    def grammar(
        self,
        response_format: Mapping[str, Any] | None = None,
        offer: ToolOffer | None = None,
        starts_in_reasoning: bool = False,
        namespace: str = "",
    ) -> Callable[[], Grammar] | None:
        """Return a factory for one request's grammar (`SamplingParams.grammar`), or None if the answer is free.

        response_format: as in OpenAI's API, `text`, `json_object` or `json_schema`. offer: the request's tools. If the
        model must call one, the answer consists of calls only. If it may call one and there is a response format, the
        answer is either calls or that format. If it may call one and a tool is strict, the text is free until a call
        begins. The model may think first; the grammar begins after the thought. namespace: only requests of the same
        one share a compiled grammar, because the time of an answer tells whether it was compiled before.

        Tools that are not strict follow their schemas as far as a grammar can enforce them, in its limits. If the
        model does not write calls as JSON, optional strict tools do not follow theirs.

        Compiling takes up to `COMPILE_SECONDS`. Raises ConfigError, with the reason, if a schema is malformed, if
        another one is too large, too complex, or has unsupported keywords, and if this model cannot be forced to call.
        """
        schema, offer = read_response_format(response_format), offer or ToolOffer()
        tools = offer.forced or (offer.tools if schema is not None or offer.strict else ())
        if offer.forced:
            schema = None
        if schema is None and not tools:
            return None
        calls, thoughts = self._format.calls, self._format.thoughts
        is_free = schema is None and not offer.forced
        if tools and (calls is None or calls.form is None or (is_free and not calls.form.start)):
            if is_free:
                log_once("strict tools are not held to their schemas: this model does not write calls as JSON in tags")
                return None
            raise ConfigError(_why_not_calls(calls.parser if calls else "", offer))
        if is_free:
            tools = _without_loose_schemas(tools)

        def compile_with(tools: tuple[Tool, ...]) -> lark.CompiledGrammar:
            places = _places(schema, response_format, tools, offer)
            if is_free:
                assert calls is not None
                text = lark.free_text_grammar(tools, calls, self._free_tokens(calls.start), self._tag)
            else:
                text = lark.grammar_text(schema, tools, calls, offer.several, thoughts, starts_in_reasoning, self._tag)
            return self._running(text, places, namespace)

        try:
            compiled = compile_with(tools)
        except TooComplex as e:
            if (bare := _without_loose_schemas(tools)) == tools:
                raise
            log_once(f"tools are not held to their schemas: {e}")
            compiled = compile_with(bare)
        return lambda: lark.MatcherGrammar(compiled)

    def _running(self, grammar: str, schemas: Places, namespace: str) -> lark.CompiledGrammar:
        """Return a compiled grammar, again if its process was killed."""
        compiled = self._compiled(grammar, schemas, namespace)
        if not compiled.process.alive:
            self._compiled.cache_clear()
            compiled = self._compiled(grammar, schemas, namespace)
        return compiled

    def start(self) -> Process:
        """Return the first process. Starting it takes a second.

        Raises ConfigError if there is no tokenizer of the `tokenizers` library, llguidance cannot read it, or no token
        ends a text.
        """
        with self._starting:
            if self._process is None or not self._process.alive:  # or it was killed
                process = Process.start(MatcherProcess, lark.MOST_MEMORY)
                process.ask("open", *_opening_arguments(self._tokenizer, self._vocab, self._ends))
                answer = process.answer(_TOKENIZER_SECONDS)
                if answer is None or answer[1]:
                    slow = f"reading it takes more than {_TOKENIZER_SECONDS:g} s"
                    reason = lark.on_one_line(answer[1]) if answer else slow
                    raise ConfigError(f"grammars are not possible with this model's tokenizer: {reason}")
                self._special, self._partial = map(frozenset, answer[0])
                self._process = process
            return self._process

    def end(self) -> None:
        """Kill the processes; requests that follow a grammar end with an error."""
        with self._starting:
            if self._process is not None:
                self._process.end()
            self._compiled.cache_clear()

    def _compile(self, grammar: str, schemas: Places, _: str) -> lark.CompiledGrammar:
        """Compile a grammar. schemas: the grammar's schemas. Raises ConfigError with the place and the reason."""
        where = _named(schemas)
        try:
            process = self.start().fork()
            process.ask("compile", grammar, schemas)
            answer = process.answer(COMPILE_SECONDS)
        except ProcessEnded as e:
            raise TooComplex(
                f"{where}: too complex: compiling it needs more than {lark.MOST_MEMORY >> 20} MB of memory; simplify it"
            ) from e
        if answer is None:
            process.end()
            raise TooComplex(f"{where}: too complex: compiling it takes more than {COMPILE_SECONDS:g} s; simplify it")
        first, reason = answer
        if reason:
            raise ConfigError(lark.on_one_line(reason))
        return lark.CompiledGrammar(process, lark.unpacked(first, self._vocab), self._vocab, self._ends)

    def _tag(self, tag: str) -> str:
        """Return a text for a grammar: special tokens as ids, other text as it is."""
        self.start()
        parts, rest = [], tag
        for token in self._tokenizer.encode(tag, add_special_tokens=False):
            if token in self._special:
                before, _, rest = rest.partition(self._tokenizer.convert_ids_to_tokens(token))
                parts += [*([json.dumps(before, ensure_ascii=False)] if before else []), f"<[{token}]>"]
        if rest or not parts:
            parts.append(json.dumps(rest, ensure_ascii=False))
        return " ".join(parts)

    def _free_tokens(self, start: str) -> str:
        """Return a set of tokens that a grammar's text does not allow, and that neither end a text nor begin a call.

        None of them holds a character of a tag, so they cannot spell one.
        """
        self.start()
        opening = self._tokenizer.encode(start, add_special_tokens=False)
        return _token_set((self._special | self._partial) - self._ends - {opening[0]})


def _opening_arguments(tokenizer: Any, vocab_size: int, ends: Iterable[int]) -> tuple[str, int, list[int]]:
    """Return the arguments of `MatcherProcess.open`. Raises ConfigError if grammars cannot use the tokenizer."""
    if tokenizer is None:
        raise ConfigError("grammars need a tokenizer, and this model has none")
    backend = copy.copy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise ConfigError("grammars need a fast tokenizer (tokenizer.json); this model has a slow one")
    backend.no_padding()
    backend.no_truncation()
    known = sorted(token for token in ends if 0 <= token < vocab_size)
    if not known:
        raise ConfigError("grammars need a token that ends the text, and this model has none")
    return backend.to_str(), max(vocab_size, backend.get_vocab_size(with_added_tokens=True)), known


def _token_set(tokens: Iterable[int]) -> str:
    """Format tokens as a token set of llguidance, such as `<[0-1,7]>`; empty if there are none."""
    ranges: list[list[int]] = []
    for token in sorted(tokens):
        if ranges and ranges[-1][1] == token - 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return f"<[{','.join(f'{first}-{last}' for first, last in ranges)}]>" if ranges else ""


def read_response_format(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the schema that an answer must follow, or None for any text. The fields are those of `schema.py`.

    Raises ConfigError if a field does not belong to the type.
    """
    if response_format is None:
        return None
    kind = response_format["type"]
    known = {"type", {"json_schema": "json_schema", "json_object": "schema"}.get(kind, "type")}
    if unknown := sorted(response_format.keys() - known):
        raise ConfigError(f"response_format: unknown key {unknown[0]!r} with type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp and older versions of instructor use `schema`
        return {"type": "object", **response_format.get("schema", {})}
    if "json_schema" not in response_format:
        raise ConfigError("response_format.json_schema: must be an object with name and schema")
    return dict(response_format["json_schema"]["schema"])


def _without_loose_schemas(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    return tuple(without(tool, "parameters") if lark.is_loose(tool) else tool for tool in tools)


def _named(schemas: Sequence[tuple[str, str, bool]]) -> str:
    """Return the places of the first schemas."""
    return ", ".join(where for where, *_ in schemas[:3]) + (" and others" if len(schemas) > 3 else "")


def _places(
    schema: lark.Schema | None, response_format: Mapping[str, Any] | None, tools: Sequence[Tool], offer: ToolOffer
) -> Places:
    """Return the schemas of a request. Raises ConfigError that names the place."""
    sources: list[tuple[str, Tool | None]] = []
    if schema is not None and response_format is not None:
        older = response_format["type"] == "json_object"
        sources.append(("response_format.schema" if older else "response_format.json_schema.schema", None))
    for tool in tools:
        sources.append((f"tools[{tool_names(offer.tools).index(tool['function']['name'])}].function.parameters", tool))
    places = []
    for where, source in sources:
        try:
            text = json.dumps(found := schema or {} if source is None else lark.parameters_of(source))
        except RecursionError as e:
            raise ConfigError(f"{where}: nested too deeply") from e
        if "x-guidance" in found:
            raise ConfigError(f"{where}: unknown key 'x-guidance'")
        places.append((where, text, source is not None and lark.is_loose(source)))
    size = sum(len(text) for _, text, _ in places)
    if size > MOST_SCHEMA_BYTES:
        raise TooComplex(
            f"{_named(places)}: too large: {size} bytes of JSON; the limit for a request is {MOST_SCHEMA_BYTES}"
        )
    return tuple(places)


def _why_not_calls(parser: str, offer: ToolOffer) -> str:
    """Return why calls cannot follow a grammar, with the field that asks for it and a remedy."""
    if offer.forced:
        what, how = "tool_choice: tools cannot be forced", 'use tool_choice "auto"'
    else:
        what, how = "response_format: cannot be combined with tools", 'use tool_choice "none"'
    other = f"writes its calls in the format {parser!r}, not as JSON between tags"
    return f"{what} on this model, which {other if parser else 'has tool calls that no parser reads'}; {how}"
