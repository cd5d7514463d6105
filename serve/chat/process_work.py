"""The work of processes that can be killed: following grammars (`processes.py`).

The first process for grammars holds the tokenizer. It is forked for each grammar, and the fork compiles the grammar.
That process is forked again for each request that follows the grammar. Forks share memory until they write to it, so a
request costs a few milliseconds and only the memory that it changes.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance

# At most about 20 ms of work for one mask, and about 100 MB; a request that needs more ends.
_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, precompute_large_lexemes=False, verbose_errors=False
)
_DEEP_STACK = 64 << 20
"""Bytes; a schema of 64 KiB that has only references takes half."""

Places = tuple[tuple[str, str, bool], ...]
"""For each schema: its place in the request, its JSON text, and whether keywords that are not supported are ignored."""


class Refused(ValueError):
    """Raised if a grammar or token is refused. The message is llguidance's reason."""


class MatcherProcess:
    """The state of one process, and the questions that it answers (`processes.py`)."""

    def __init__(self) -> None:
        self.tokenizer: llguidance.LLTokenizer | None = None
        self.matcher: llguidance.LLMatcher | None = None
        self._grammar = ""
        self._text: list[int] = []
        """The tokens that the matcher has accepted."""

    def open(self, tokenizer: str, vocab: int, ends: list[int]) -> tuple[list[int], list[int]]:
        """Read the tokenizer. Return its special tokens, and its tokens that hold parts of non-ASCII characters."""
        known = self.tokenizer = llguidance.LLTokenizer(literal(tokenizer), n_vocab=vocab, eos_token=ends)
        special = [token for token in range(vocab) if known.is_special_token(token)]
        texts = {token: known.decode_bytes([token]) for token in set(range(vocab)).difference(special)}
        return special, [token for token, text in texts.items() if text and min(text) >= 0x80]

    def compile(self, grammar: str, schemas: Places) -> bytes:
        """Compile a grammar and return the first token's mask."""
        # llguidance follows a schema's references by recursion: a long chain would overflow an ordinary stack.
        threading.stack_size(_DEEP_STACK)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._compile, grammar, schemas).result()

    def _compile(self, grammar: str, schemas: Places) -> bytes:
        assert self.tokenizer is not None
        for where, schema, lenient in schemas:
            try:
                alone = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": lenient})
            except ValueError as e:
                raise Refused(f"{where}: {e}") from e
            if reason := llguidance.LLMatcher.validate_grammar(alone, limits=_LIMITS):
                raise Refused(f"{where}: {reason}")
        self._grammar = llguidance.LLMatcher.grammar_from_lark(grammar)
        self.matcher = self._at([])
        first = self.matcher.compute_bitmask()  # some schemas fail only here, because they allow nothing or too much
        if self.matcher.is_error():
            where = ", ".join(where for where, *_ in schemas)
            raise Refused(f"{where}: no text fits this ({self.matcher.get_error()})")
        return first

    def _at(self, text: list[int]) -> llguidance.LLMatcher:
        """Return a matcher that has accepted a text."""
        assert self.tokenizer is not None
        matcher = llguidance.LLMatcher(self.tokenizer, self._grammar, log_level=0, limits=_LIMITS)
        _take(matcher, text)
        return matcher

    def masks(self, undo: int, taken: list[int], draft: list[int]) -> list[bytes]:
        """Undo tokens, accept others, and return the masks along a draft up to its first illegal token.

        After a draft token that the grammar cannot follow, no token is allowed. A text ends there only if it accepts
        that token.
        """
        matcher = self.matcher
        assert matcher is not None
        if undo:
            matcher.rollback(undo)
            del self._text[-undo:]
        _take(matcher, taken)
        self._text += taken
        masks = [matcher.compute_bitmask()]
        if matcher.is_error():
            raise Refused(matcher.get_error())
        for token in draft:
            if matcher.try_consume_tokens([token]) != 1 and not matcher.is_error():
                break
            masks.append(matcher.compute_bitmask())
            if matcher.is_error():  # a matcher cannot recover from an error
                self.matcher = self._at(self._text)
                return [*masks[:-1], bytes(len(masks[0]))]
        matcher.rollback(len(masks) - 1)
        return masks


def _take(matcher: llguidance.LLMatcher, tokens: list[int]) -> None:
    if (count := matcher.try_consume_tokens(tokens)) < len(tokens) and not matcher.is_error():
        raise Refused(f"token {tokens[count]} was allowed and then refused")


def literal(tokenizer: str) -> str:
    """Return a tokenizer.json that encodes text literally: without special tokens, and without changing letters.

    If a grammar leaves no choice, llguidance encodes the forced text and allows its first token. A special token would
    then be refused, because it stands for no text, or it would end the answer too early.
    """
    content = json.loads(tokenizer)
    added, model = content["added_tokens"], content["model"]
    # The tokens that llguidance treats as special. JSON cannot hold the character 0, so no grammar forces these names.
    names = {
        token["content"]: f"<\0{token['id']}>"
        for token in added
        if token["special"] or (token["content"].startswith("<") and token["content"].endswith(">"))
    }
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token for text, token in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [[a, b] for a, b in model["merges"] if names.keys().isdisjoint((a, b, a + b))]
    content["normalizer"] = _spelling(content["normalizer"])
    return json.dumps(content)


def _spelling(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the parts of a normalizer that define how the vocabulary spells a text but do not change it."""
    if normalizer is None or normalizer["type"] in ("ByteLevel", "Prepend"):
        return normalizer
    if normalizer["type"] == "Sequence":
        parts = [part for part in map(_spelling, normalizer["normalizers"]) if part]
        return {"type": "Sequence", "normalizers": parts}
    return normalizer if normalizer.get("pattern") == {"String": " "} else None  # a space spelled as another character
