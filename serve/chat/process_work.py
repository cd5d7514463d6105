"""What processes do that can be killed: encode long texts, and follow grammars with llguidance (`processes.py`).

For grammars, the first process holds the tokenizer. It is forked for each grammar, which is compiled in the fork, and
that is forked for each request that follows the grammar. A fork shares the tokenizer's and the grammar's memory until
it writes to it. So a request costs a few milliseconds and what it changes.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
from tokenizers import Tokenizer

# About 20 ms of work for one mask at most, and some 100 MB; what needs more ends its own request.
_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, precompute_large_lexemes=False, verbose_errors=False
)
_DEEP_STACK = 64 << 20
"""Bytes; a schema of 64 KiB that is nothing but references takes half."""

Places = tuple[tuple[str, str], ...]
"""Schemas as JSON texts, each behind its place in the request."""


class Refused(ValueError):
    """A grammar, or a token, that cannot be taken; the message is llguidance's reason."""


class MatcherProcess:
    """What one process holds, and the questions that it answers (`processes.py`)."""

    def __init__(self) -> None:
        self.tokenizer: llguidance.LLTokenizer | None = None
        self.matcher: llguidance.LLMatcher | None = None
        self._grammar = ""
        self._text: list[int] = []
        """What the matcher has taken."""

    def open(self, tokenizer: str, vocab: int, ends: list[int]) -> tuple[list[int], list[int]]:
        """Read the tokenizer. Return its special tokens, and those that are parts of characters that are not ASCII."""
        known = self.tokenizer = llguidance.LLTokenizer(literal(tokenizer), n_vocab=vocab, eos_token=ends)
        special = [token for token in range(vocab) if known.is_special_token(token)]
        texts = {token: known.decode_bytes([token]) for token in set(range(vocab)).difference(special)}
        return special, [token for token, text in texts.items() if text and min(text) >= 0x80]

    def compile(self, grammar: str, schemas: Places) -> bytes:
        """The mask of the first token."""
        # llguidance follows a schema's references by recursion: a long chain would overflow an ordinary stack.
        threading.stack_size(_DEEP_STACK)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._compile, grammar, schemas).result()

    def _compile(self, grammar: str, schemas: Places) -> bytes:
        assert self.tokenizer is not None
        for where, schema in schemas:
            alone = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": False})
            if reason := llguidance.LLMatcher.validate_grammar(alone, limits=_LIMITS):
                raise Refused(f"{where}: {reason}")
        self._grammar = llguidance.LLMatcher.grammar_from_lark(grammar)
        self.matcher = self._at([])
        first = self.matcher.compute_bitmask()  # some schemas turn out to allow nothing, or too much, only here
        if self.matcher.is_error():
            where = ", ".join(where for where, _ in schemas)
            raise Refused(f"{where}: no text can follow this ({self.matcher.get_error()})")
        return first

    def _at(self, text: list[int]) -> llguidance.LLMatcher:
        """A matcher behind a text."""
        assert self.tokenizer is not None
        matcher = llguidance.LLMatcher(self.tokenizer, self._grammar, log_level=0, limits=_LIMITS)
        _take(matcher, text)
        return matcher

    def masks(self, undo: int, taken: list[int], draft: list[int]) -> list[bytes]:
        """Go back, then on, and give the masks along a draft up to its first illegal token.

        Behind a draft token that cannot be followed nothing is allowed: that ends a text only if it takes the token.
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
            if matcher.is_error():  # from which a matcher does not come back
                self.matcher = self._at(self._text)
                return [*masks[:-1], bytes(len(masks[0]))]
        matcher.rollback(len(masks) - 1)
        return masks


def _take(matcher: llguidance.LLMatcher, tokens: list[int]) -> None:
    if (count := matcher.try_consume_tokens(tokens)) < len(tokens) and not matcher.is_error():
        raise Refused(f"token {tokens[count]} was allowed and then refused")


def literal(tokenizer: str) -> str:
    """A tokenizer.json that encodes every text as it is written: no special token is found in it, no letter changed.

    Where a grammar leaves no choice, llguidance encodes the text to come, and allows the token that this begins with.
    A special token would be refused then, because it stands for no text, or would end the answer in its middle.
    """
    content = json.loads(tokenizer)
    added, model = content["added_tokens"], content["model"]
    # Those that llguidance takes for special; no JSON holds the character 0, so no grammar forces these names.
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
    """What of a normalizer is how the vocabulary spells a text, and not another text."""
    if normalizer is None or normalizer["type"] in ("ByteLevel", "Prepend"):
        return normalizer
    if normalizer["type"] == "Sequence":
        parts = [part for part in map(_spelling, normalizer["normalizers"]) if part]
        return {"type": "Sequence", "normalizers": parts}
    return normalizer if normalizer.get("pattern") == {"String": " "} else None  # a space as a letter of its own


class EncoderProcess:
    """The questions that such a process answers (`processes.py`)."""

    def __init__(self) -> None:
        self.tokenizer: Tokenizer | None = None

    def open(self, tokenizer: str, split_special_tokens: bool) -> None:
        """Read the backend, which transformers tells before each text neither to pad nor to cut it."""
        self.tokenizer = Tokenizer.from_str(tokenizer)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = split_special_tokens

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        assert self.tokenizer is not None
        # The fast way leaves out where in the text each token stands, which nobody asks for: half the work.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)
