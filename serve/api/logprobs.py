"""Log probabilities in the two shapes that OpenAI's routes give them; they are the target's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.request import TokenLogprob
from eagle_mlx.text import TextStream

from .tokens import TokenTexts

_LEAST = -9999.0
"""In place of minus infinity, which JSON does not have."""


def chat_logprobs(texts: TokenTexts, found: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = []
    for each in found:
        entry = _entry(texts, each.token, each.logprob)
        entry["top_logprobs"] = [_entry(texts, token, logprob) for token, logprob in each.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text, raw = texts[token]
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(raw)}


class CompletionLogprobs:
    """The lists of a completion, which tell where in the text each token begins."""

    def __init__(self, texts: TokenTexts, tokenizer: TokenizerWrapper, offset: int = 0):
        """offset: where the first token begins."""
        self._texts, self._offset = texts, offset
        self._stream = TextStream(tokenizer)

    def take(self, found: Iterable[TokenLogprob], first_unknown: int | None = None) -> dict[str, Any]:
        """The lists for the tokens that come next, and before them for one of which nothing can be known."""
        lists: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if first_unknown is not None:
            self._add(lists, first_unknown, None, None)
        for each in found:
            # The token itself is listed with the likeliest, also where it is not one of them.
            top = {self._texts[token][0]: max(logprob, _LEAST) for token, logprob in each.top}
            top.setdefault(self._texts[each.token][0], max(each.logprob, _LEAST))
            self._add(lists, each.token, max(each.logprob, _LEAST), top)
        return lists

    def _add(self, lists: dict[str, Any], token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        lists["tokens"].append(self._texts[token][0])
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(self._offset)
        self._offset += len(self._stream.push([token]))


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two sets of lists as one."""
    return {name: first[name] + second[name] for name in first}
