"""Log probabilities in the shapes of OpenAI's two routes, those of a prompt, and the texts of single tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.cache import RaggedCache
from eagle_mlx.decoding.sampling import listed, logprobs_of
from eagle_mlx.request import TokenLogprob
from eagle_mlx.target import Target

_PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""The byte for each of the 256 letters of byte-level vocabularies: printable bytes are their own letters, and the
others count up from 256 (Radford et al. 2019, GPT-2)."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"  # text before a token, so that its leading space is kept
_LEAST = -9999.0  # replaces minus infinity, which JSON lacks


class TokenTexts(dict[int, tuple[str, bytes]]):
    """The text and bytes of each token of a vocabulary, computed when they are first asked for.

    The text of a part of a character reads `bytes:\\xe2\\x82`, so that texts are unique.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer: Any = tokenizer
        self._anchor: list[int] = list(tokenizer.encode(_ANCHOR, add_special_tokens=False))
        self._before: str = tokenizer.decode(self._anchor)

    def __missing__(self, token: int) -> tuple[str, bytes]:
        self[token] = self._decoded(token)
        return self[token]

    def _decoded(self, token: int) -> tuple[str, bytes]:
        text: str = self._tokenizer.decode([*self._anchor, token])[len(self._before) :]
        if "\ufffd" not in text:
            return text, text.encode()
        written = self._tokenizer.convert_ids_to_tokens(token) or ""
        raw = text.encode()
        if match := _BYTE.fullmatch(written):
            raw = bytes([int(match[1], 16)])
        elif all(letter in BYTE_LETTERS for letter in written):
            raw = bytes(BYTE_LETTERS[letter] for letter in written)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def chat_logprobs(texts: TokenTexts, scores: Iterable[TokenLogprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = texts[token]
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(raw)}

    content = [{**entry(s.token, s.logprob), "top_logprobs": [entry(*top) for top in s.top]} for s in scores]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The log probability lists of a completion, with the text offset of each token."""

    def __init__(self, texts: TokenTexts):
        self._texts, self._offset = texts, 0

    def take(self, scores: Iterable[TokenLogprob], texts: Iterable[str], first: int | None = None) -> dict[str, Any]:
        """Return the lists for the tokens that add these texts. `first` is a token without a log probability."""
        added = iter(texts)
        lists: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if first is not None:
            self._add(lists, first, next(added), None, None)
        for score, text in zip(scores, added, strict=True):
            logprob = max(score.logprob, _LEAST)
            top = {self._texts[token][0]: max(other, _LEAST) for token, other in score.top}
            top.setdefault(self._texts[score.token][0], logprob)  # listed even if it is not among the top ones
            self._add(lists, score.token, text, logprob, top)
        return lists

    def _add(self, lists: dict[str, Any], token: int, text: str, logprob: float | None, top: Any) -> None:
        lists["tokens"].append(self._texts[token][0])
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(self._offset)
        self._offset += len(text)


def score_prompt(target: Target, tokens: Sequence[int], top: int, chunk: int = 256) -> Iterator[list[TokenLogprob]]:
    """Yield the log probabilities of each token but the first, `chunk` tokens at a time, so that others get turns.

    top: how many of the likeliest tokens to report at each position. Must run in the thread that owns the target.
    """
    cache = RaggedCache.of(target.model, 1)
    for start in range(0, len(tokens) - 1, chunk):
        following = list(tokens[start + 1 : start + 1 + chunk])
        read = mx.array([tokens[start : start + len(following)]], mx.int32)
        logits = target.forward(read, cache).logits[0]
        cache.advance(len(following))
        cache.sync([start + len(following)])
        scores = [part.tolist() for part in logprobs_of(logits, mx.array(following, mx.int32), top)]
        del logits
        mx.clear_cache()
        yield listed(following, scores, top)
