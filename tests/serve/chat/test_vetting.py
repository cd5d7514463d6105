"""Matchers at dead ends, which a vocabulary may have though the grammar has none; the process that tries grammars."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

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


def followed(grammar: str) -> MatcherGrammar:
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(SPARSE)}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<end>")])
    made = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=len(SPARSE), eos_token=[END])
    return MatcherGrammar(matcher(made, grammar), len(SPARSE), frozenset({END}))


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
