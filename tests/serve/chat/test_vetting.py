"""Matchers at dead ends, which a vocabulary may have though the grammar has none; the process that tries grammars."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any, cast

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from eagle_mlx.decoding.processors import walk
from eagle_mlx.errors import ConfigError
from eagle_mlx.serve.chat import vetting
from eagle_mlx.serve.chat.grammar import MatcherGrammar
from eagle_mlx.serve.chat.vetting import matcher

SPARSE = ["<end>", "a", "b"]
"""There is no x, so a grammar that requires one is a dead end."""
END, A, B = range(3)


def _tokenizer() -> llguidance.LLTokenizer:
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(SPARSE)}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<end>")])
    return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=len(SPARSE), eos_token=[END])


def followed(grammar: str) -> MatcherGrammar:
    made = _tokenizer()
    return MatcherGrammar(matcher(made, grammar), made, len(SPARSE), frozenset({END}))


def tokens_of(grammar: MatcherGrammar, draft: list[int]) -> list[list[int]]:
    return [np.flatnonzero(np.array(mask)).tolist() for mask in walk(grammar, draft)]


def test_a_dead_end_in_a_draft_does_not_end_the_text() -> None:
    """A dead end in a draft does not affect a text that continues differently."""
    grammar = followed('start: "a" ("b" "x" | "a" "b" "x"?)')
    assert grammar.advance(A)
    assert tokens_of(grammar, [B, A]) == [[A, B], []]
    assert tokens_of(grammar, [A, B]) == [[A, B], [B], [END]]
    assert grammar.advance(A)
    assert tokens_of(grammar, []) == [[B]]
    grammar.rollback(1)
    assert grammar.advance(A)
    assert grammar.advance(B)
    assert tokens_of(grammar, []) == [[END]]


def test_what_must_follow_is_found_by_masks_and_changes_nothing() -> None:
    """Of tokens that begin the same text, the longest is taken. A choice or the end of the text ends it."""
    grammar = followed('start: "abab" ("a" | "b")')
    for most, tokens in ((16, [A, B, A, B]), (3, [A, B, A]), (0, [])):
        assert grammar.forced(most) == tokens
    assert grammar.advance(A)
    assert grammar.forced(16) == [B, A, B]
    assert tokens_of(grammar, [B]) == [[B], [A]]
    assert followed('start: "ab"').forced(16) == [A, B]
    assert followed('start: "a"?').forced(16) == []


def test_a_text_that_leaves_no_choice_for_long_is_not_computed_at_once() -> None:
    """llguidance's own `compute_ff_tokens` has no limit: it would compute a million tokens."""
    masks = 0

    class Counting:
        def __init__(self, matcher: Any):
            self.matcher = matcher

        def __getattr__(self, name: str) -> Any:
            nonlocal masks
            assert not name.startswith("compute_ff")
            masks += name == "compute_bitmask"
            method = getattr(self.matcher, name)
            return (lambda: Counting(method())) if name == "deep_copy" else method

    made = vetting.matcher(_tokenizer(), "start: /(ab){500000}/")
    grammar = MatcherGrammar(cast(Any, Counting(made)), _tokenizer(), len(SPARSE), frozenset({END}))
    assert grammar.forced(16) == [A, B] * 8
    assert masks == 16


def test_a_text_in_a_dead_end_is_not_complete() -> None:
    grammar = followed('start: "a" ("b" "x" | "a" "b")')
    assert grammar.advance(A)
    assert grammar.advance(B)
    with pytest.raises(ConfigError, match="no token is allowed, and the text may not end here"):
        grammar.mask()


def test_a_process_that_tries_an_endless_grammar_ends_by_itself() -> None:
    """The server may be gone by then."""
    work = json.dumps(['start: %json {"type": "integer", "multipleOf": 99999999}', [], 300, 0.5, 1 << 30])
    done = subprocess.run([sys.executable, "-P", vetting.__file__], input=work, text=True)
    assert done.returncode == -signal.SIGALRM
