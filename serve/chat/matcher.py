"""llguidance's matcher as the grammar of a row: which tokens may come next, in a text that must follow a grammar."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import llguidance
import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import ConfigError

# About 20 ms of work for one mask at most, and some 100 MB; what needs more ends its own request.
_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, precompute_large_lexemes=False, verbose_errors=False
)


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


def compile_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at the beginning of a text, to be copied. Raises ConfigError with llguidance's reason."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.deep_copy().compute_bitmask()
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        matcher = matcher if not probe.is_error() else probe
    if matcher.is_error():
        raise ConfigError(_reason(matcher))
    return matcher


class MatcherGrammar:
    """A row's own matcher, as `eagle_mlx.params.Grammar` wants it."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, ends: frozenset[int]):
        self._matcher, self._vocab, self._ends = matcher, vocab_size, ends

    def mask(self) -> mx.array:
        """[V] bool. Raises ConfigError where the grammar has become too complex to follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ConfigError(f"the text's grammar cannot be followed further: {_reason(self._matcher)}")
        return mx.array(np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_))

    def advance(self, token: int) -> bool:
        return token not in self._ends and self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise ConfigError(f"the text's grammar cannot be undone: {_reason(self._matcher)}")


def _reason(matcher: llguidance.LLMatcher) -> str:
    return " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
