"""llguidance's matcher as the grammar of a row: which tokens may come next, in a text that must follow a grammar."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import llguidance
import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import ConfigError

# About 20 ms of work for one mask at most, and some 100 MB; what needs more ends its own request.
_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, precompute_large_lexemes=False, verbose_errors=False
)
_DEEP_STACK = 64 << 20
"""Bytes; a schema of 64 KiB that is nothing but references takes half."""
_STARTING = threading.Lock()
_LONGEST_REASON = 400

Places = tuple[tuple[str, str], ...]
"""Schemas as JSON texts, each behind its place in the request."""
Made = TypeVar("Made")


def make_tokenizer(tokenizer: TokenizerWrapper, vocab_size: int, ends: Iterable[int]) -> llguidance.LLTokenizer:
    """llguidance's view of a tokenizer, which costs a second for a large vocabulary.

    Raises ConfigError for a tokenizer that is not of the `tokenizers` library, and where no token ends a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError("grammars need a fast tokenizer (tokenizer.json); this model's tokenizer is a slow one")
    backend = copy.copy(backend)
    backend.no_padding()
    backend.no_truncation()
    size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
    known = sorted(token for token in set(ends) if 0 <= token < vocab_size)
    if not known:
        raise ConfigError("grammars need a token that ends the text, and this model has none")
    try:
        return llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=known)
    except (ValueError, RuntimeError) as e:
        raise ConfigError(f"grammars cannot be had with this model's tokenizer: {e}") from e


def compile_matcher(tokenizer: llguidance.LLTokenizer, grammar: str, schemas: Places) -> llguidance.LLMatcher:
    """A matcher at the beginning of a text, to be copied for each row.

    schemas: those in the grammar. Raises ConfigError with the place and llguidance's reason.
    """
    return _on_deep_stack(lambda: _compile(tokenizer, grammar, schemas))


def _compile(tokenizer: llguidance.LLTokenizer, grammar: str, schemas: Places) -> llguidance.LLMatcher:
    for where, schema in schemas:
        alone = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": False})
        if reason := llguidance.LLMatcher.validate_grammar(alone, limits=_LIMITS):
            raise ConfigError(f"{where}: {_on_one_line(reason)}")
    matcher = llguidance.LLMatcher(
        tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS
    )
    begun = matcher.deep_copy()  # some schemas turn out to allow nothing, or too much, when the first mask is made
    begun.compute_bitmask()
    if begun.is_error():
        raise ConfigError(
            f"{', '.join(where for where, _ in schemas)}: no text can follow this ({_on_one_line(begun.get_error())})"
        )
    return matcher


def _on_deep_stack(work: Callable[[], Made]) -> Made:
    """llguidance follows a schema's references by recursion: a long chain would overflow an ordinary thread's stack."""
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as e:  # it is raised where the result is waited for
            made.set_exception(e)

    with _STARTING:
        before = threading.stack_size(_DEEP_STACK)
        try:
            threading.Thread(target=run, name="grammar").start()
        finally:
            threading.stack_size(before)
    return made.result()


class MatcherGrammar:
    """A row's own matcher, as `eagle_mlx.params.Grammar` wants it."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, ends: frozenset[int]):
        self._matcher, self._vocab, self._ends = matcher, vocab_size, ends

    def mask(self) -> mx.array:
        """[V] bool. Raises ConfigError where the grammar has become too complex to follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ConfigError(self._failed())
        return mx.array(np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_))

    def advance(self, token: int) -> bool:
        """Raises ConfigError where the grammar has become too complex to follow."""
        if token in self._ends:
            return False
        taken = self._matcher.try_consume_tokens([token]) == 1
        if self._matcher.is_error():
            raise ConfigError(self._failed())
        return taken

    def rollback(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise ConfigError(self._failed())

    def _failed(self) -> str:
        return f"the grammar cannot be followed any further: {_on_one_line(self._matcher.get_error())}"


def _on_one_line(reason: str) -> str:
    return " ".join(reason.replace("<non-verbose/>", "").split())[:_LONGEST_REASON]
