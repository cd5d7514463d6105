"""Compile JSON schemas and tool calls to grammars that the answers of requests must follow."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import llguidance

from eagle_mlx.errors import ConfigError
from eagle_mlx.sampling_params import Grammar
from eagle_mlx.target import Target

from .. import log_once
from . import grammar as lark
from . import vetting
from .template import ChatFormat
from .tools import Tool, ToolOffer, tool_names, without

COMPILE_SECONDS = 5.0
"""The limit for compiling. Ordinary schemas take less than 0.1 s and those of 256 KiB up to 2 s, on an idle machine."""
MOST_MEMORY = 256 << 20  # bytes for compiling a grammar: about twice as much as llguidance's own limits allow
MOST_SCHEMA_BYTES = 256 * 1024
"""The limit for all schemas of one request, as JSON text. Agents offer 45 tools of 75 KB."""
_MOST_KEPT = 16


class TooComplex(ConfigError):
    """Raised for schemas that take too much text, time or memory."""


class Grammars:
    """Compiles grammars for one target, after a process that can be killed has tried them (`vetting.py`).

    May be used from any thread while the target decodes in its own.
    """

    def __init__(self, format: ChatFormat, vocab_size: int, eos_token_ids: Iterable[int]):
        self._format, self._vocab = format, vocab_size
        self._ends = frozenset(eos_token_ids)
        self._tokenizer: Any = format.tokenizer
        self.tokenizer = cache(self._read_tokenizer)
        self._vetted = lru_cache(_MOST_KEPT)(self._vet)

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

        response_format: as in OpenAI's API. offer: the request's tools. If the model must call one, the answer consists
        of calls only. If it may call one and there is a response format, the answer is either calls or that format. If
        it may call one and a tool is strict, the text is free until a call begins. A thought comes before the grammar.
        Tools that are not strict follow their schemas as far as a grammar can enforce them, in its limits. namespace:
        only its requests share a vetted grammar, because the time of an answer tells whether it was vetted before.

        Takes up to `COMPILE_SECONDS`. Raises ConfigError, with the reason, if a schema is malformed, if another one is
        too large, too complex, or has unsupported keywords, and if this model cannot be forced to call.
        """
        schema, offer = read_response_format(response_format), offer or ToolOffer()
        tools = offer.forced or (offer.tools if schema is not None or offer.strict else ())
        if offer.forced:
            schema = None
        if schema is None and not tools:
            return None
        format, calls = self._format, self._format.calls
        is_free = schema is None and not offer.forced
        if tools and (calls is None or calls.form is None or (is_free and not calls.form.start)):
            if is_free:
                log_once("strict tools are not held to their schemas: this model does not write calls as JSON in tags")
                return None
            raise _no_grammar_of_calls(calls.parser if calls else "", offer)
        if is_free:
            tools = _without_loose_schemas(tools)

        def vetted(tools: tuple[Tool, ...]) -> str:
            places = _places(schema, response_format, tools, offer)
            if is_free:
                assert calls is not None
                text = lark.free_text_grammar(tools, calls, self._free_tokens(calls.start), self._tag)
            else:
                text = lark.grammar_text(schema, tools, format, offer.several, starts_in_reasoning, self._tag)
            self._vetted(text, places, namespace)
            return text

        try:
            text = vetted(tools)
        except TooComplex as e:
            if (bare := _without_loose_schemas(tools)) == tools:
                raise
            log_once(f"tools are not held to their schemas: {e}")
            text = vetted(bare)

        def grammar() -> Grammar:
            tokenizer = self.tokenizer()
            return lark.MatcherGrammar(vetting.matcher(tokenizer, text), tokenizer, self._vocab, self._ends)

        return grammar

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        """Return the tokenizer for llguidance. This takes a second. Raises ConfigError if grammars cannot use it."""
        backend = copy.copy(getattr(self._tokenizer, "backend_tokenizer", None))
        if backend is None:
            raise ConfigError("grammars need a fast tokenizer (tokenizer.json); this model has a slow one")
        backend.no_padding()
        backend.no_truncation()
        ends = sorted(token for token in self._ends if 0 <= token < self._vocab)
        if not ends:
            raise ConfigError("grammars need a token that ends the text, and this model has none")
        size = max(self._vocab, backend.get_vocab_size(with_added_tokens=True))
        try:
            return llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
        except ValueError as e:
            reason = lark.on_one_line(str(e))
            raise ConfigError(f"grammars are not possible with this model's tokenizer: {reason}") from e

    def _vet(self, grammar: str, schemas: vetting.Places, _: str) -> None:
        """Raise ConfigError, with the place and the reason, if a grammar cannot be compiled within the limits."""
        work = json.dumps([grammar, schemas, self.tokenizer().vocab_size, COMPILE_SECONDS, MOST_MEMORY])
        # -P: import nothing from the program's folder. -S: import no startup files of other packages, which take 20 ms.
        program = [sys.executable, "-S", "-P", vetting.__file__]
        paths = {**os.environ, "PYTHONPATH": str(Path(llguidance.__file__).parents[1])}
        done = subprocess.run(program, input=work, capture_output=True, text=True, env=paths)
        if done.returncode:
            limit = f"takes more than {COMPILE_SECONDS:g} s"
            if done.returncode != -signal.SIGALRM:
                limit = f"needs more than {MOST_MEMORY >> 20} MB of memory"
            places = [where for where, *_ in schemas]
            raise _refused(TooComplex, places, f"too complex: compiling it {limit}; simplify it")
        if refusal := json.loads(done.stdout) or vetting.refusal(vetting.matcher(self.tokenizer(), grammar), schemas):
            raise _refused(ConfigError, *refusal)

    def _tag(self, tag: str) -> str:
        """Return a text for a grammar: special tokens as ids, other text as it is."""
        tokenizer, parts, rest = self.tokenizer(), [], tag
        for token in self._tokenizer.encode(tag, add_special_tokens=False):
            if tokenizer.is_special_token(token):
                before, _, rest = rest.partition(self._tokenizer.convert_ids_to_tokens(token))
                parts += [*([json.dumps(before, ensure_ascii=False)] if before else []), f"<[{token}]>"]
        if rest or not parts:
            parts.append(json.dumps(rest, ensure_ascii=False))
        return " ".join(parts)

    def _free_tokens(self, start: str) -> str:
        """Return a set of tokens that a grammar's text does not allow, and that neither end a text nor begin a call."""
        opening = self._tokenizer.encode(start, add_special_tokens=False)
        return _token_set(self._not_text - self._ends - {opening[0]})

    @cached_property
    def _not_text(self) -> frozenset[int]:
        """Special tokens, and parts of non-ASCII characters, which a grammar's text allows only in whole characters.

        None of them holds a character of a tag, so they cannot spell one.
        """
        tokenizer = self.tokenizer()
        texts = {token: tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)}
        return frozenset(
            token for token, text in texts.items() if tokenizer.is_special_token(token) or (text and min(text) >= 0x80)
        )


def _token_set(tokens: Iterable[int]) -> str:
    """Format tokens as a token set of llguidance, such as `<[0-1,7]>`; empty if there are none."""
    ranked = groupby(enumerate(sorted(tokens)), key=lambda pair: pair[1] - pair[0])  # consecutive tokens have one key
    ranges = [[token for _, token in group] for _, group in ranked]
    return f"<[{','.join(f'{tokens[0]}-{tokens[-1]}' for tokens in ranges)}]>" if ranges else ""


def read_response_format(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the schema that an answer must follow, or None for any text. The fields are those of `schema.py`.

    Raises ConfigError if a field does not belong to the type.
    """
    if response_format is None:
        return None
    kind = response_format["type"]
    own = {"json_schema": "json_schema", "json_object": "schema"}.get(kind, "type")
    if unknown := sorted(response_format.keys() - {"type", own}):
        raise ConfigError.at("response_format", f"unknown key {unknown[0]!r} with type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp and older versions of instructor use `schema`
        return {"type": "object", **response_format.get("schema", {})}
    if "json_schema" not in response_format:
        raise ConfigError.at("response_format.json_schema", "must be an object with name and schema")
    return dict(response_format["json_schema"]["schema"])


def _without_loose_schemas(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    return tuple(without(tool, "parameters") if lark.is_loose(tool) else tool for tool in tools)


def _refused(kind: type[ConfigError], places: Sequence[str], problem: str) -> ConfigError:
    """Return the error of schemas, with the places of the first ones, and with a field if there is only one."""
    named = ", ".join(places[:3]) + (" and others" if len(places) > 3 else "")
    return kind(lark.on_one_line(f"{named}: {problem}"), places[0] if len(places) == 1 else None)


def _places(
    schema: lark.Schema | None, response_format: Mapping[str, Any] | None, tools: Sequence[Tool], offer: ToolOffer
) -> vetting.Places:
    """Return the schemas of a request. Raises ConfigError that names the place."""
    places: list[tuple[str, str, bool]] = []

    def add(where: str, read: Callable[[], lark.Schema], is_loose: bool) -> None:
        try:
            text = json.dumps(content := read())
        except RecursionError as e:
            raise ConfigError.at(where, "nested too deeply") from e
        if "x-guidance" in content:
            raise ConfigError.at(where, "unknown key 'x-guidance'")
        places.append((where, text, is_loose))

    if schema is not None and response_format is not None:
        field = "schema" if response_format["type"] == "json_object" else "json_schema.schema"
        add(f"response_format.{field}", lambda: schema, False)
    for tool in tools:
        where = f"tools[{tool_names(offer.tools).index(tool['function']['name'])}].function.parameters"
        add(where, partial(lark.parameters_of, tool), lark.is_loose(tool))
    size = sum(len(text) for _, text, _ in places)
    if size > MOST_SCHEMA_BYTES:
        problem = f"too large: {size} bytes of JSON; the limit for a request is {MOST_SCHEMA_BYTES}"
        raise _refused(TooComplex, [where for where, *_ in places], problem)
    return tuple(places)


def _no_grammar_of_calls(parser: str, offer: ToolOffer) -> ConfigError:
    """Return the error for calls that no grammar describes, with the field that asks for one and a remedy."""
    field, problem, remedy = "response_format", "cannot be combined with tools", 'use tool_choice "none"'
    if offer.forced:
        field, problem, remedy = "tool_choice", "tools cannot be forced", 'use tool_choice "auto"'
    other = f"writes its calls in the format {parser!r}, not as JSON between tags"
    reason = other if parser else "has tool calls that no parser reads"
    return ConfigError.at(field, f"{problem} on this model, which {reason}; {remedy}")
