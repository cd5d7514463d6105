"""How many tokens a text has at least, told from its size: what is far too long is refused without being encoded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram

_CODE_POINT = 4
"""Bytes of a character that the vocabulary lacks, at most."""
_SHRINKS = {"NFC": 3, "Prepend": 1, "ByteLevel": 1}
"""Normalizers, and how many bytes of text they write as one at most: NFC makes one Hangul syllable of three letters."""
_KEEPS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}
"""Ways to cut a text into words that leave nothing of it out, unless they are told to."""


@dataclass(frozen=True)
class TokenSize:
    """What a token stands for at most."""

    most_bytes: int
    loses_space: bool = False
    """Whether white space may be left out of the tokens altogether."""

    def least_tokens(self, text: str) -> int:
        """Tokens that a text is made into, or fewer, never more."""
        kept = "".join(text.split()) if self.loses_space else text
        return -(-len(kept.encode()) // self.most_bytes)


def token_size(tokenizer: TokenizerWrapper) -> TokenSize | None:
    """How much of a text one token can stand for; None where that has no bound, or none that is known.

    A normalizer may shorten a text, and an unknown token or a space may stand for any length of it. Known are
    vocabularies that have every byte, or a token for each character that they lack.
    """
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    letters = any("'ByteLevel'" in str(part) for part in (normalizer, pre_tokenizer))
    shrinks = _shrinks(normalizer)
    if shrinks is None or not _keeps(pre_tokenizer) or not _knows_all(backend.model, vocabulary, letters):
        return None
    added = list(backend.get_added_tokens_decoder().values())
    # Byte-level vocabularies write each byte as one letter.
    longest = max(len(text) if letters else len(text.encode()) for text in vocabulary)
    longest = max(longest, _CODE_POINT, *(len(token.content.encode()) for token in added), 0)
    return TokenSize(longest * shrinks, any(token.lstrip or token.rstrip for token in added))


def _knows_all(model: Any, vocabulary: Mapping[str, int], letters: bool) -> bool:
    """Whether no token stands for a whole run of what is not in the vocabulary, and nothing of it is dropped."""
    if not isinstance(model, BPE | Unigram) or not vocabulary:
        return False
    if letters:
        return isinstance(model, BPE) and all(letter in vocabulary for letter in BYTE_LETTERS)
    if getattr(model, "byte_fallback", False):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return isinstance(model, BPE) and model.unk_token in vocabulary and not model.fuse_unk


def _state(part: Any) -> dict[str, Any]:
    """A normalizer or a pre-tokenizer, as tokenizer.json has it."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    if not normalizer:
        return 1
    if normalizer["type"] == "Sequence":
        product = 1
        for part in normalizer["normalizers"]:
            factor = _shrinks(part)
            if factor is None:
                return None
            product *= factor
        return product
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(old.encode()) // len(new.encode())) if old and new else None
    return _SHRINKS.get(normalizer["type"])


def _keeps(pre_tokenizer: Mapping[str, Any]) -> bool:
    if not pre_tokenizer:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] in _KEEPS and pre_tokenizer.get("behavior") != "Removed"


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"
"""Text in front of a token, so that its leading space is not taken for the beginning of a text."""


def _byte_letters() -> dict[str, int]:
    """The letters with which byte-level vocabularies write bytes: printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_LETTERS = _byte_letters()
"""Each of the 256 bytes by its letter."""


class TokenTexts:
    """The text and the bytes of each token of a vocabulary, worked out once."""

    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer: Any = tokenizer
        self._anchor: list[int] = list(tokenizer.encode(_ANCHOR, add_special_tokens=False))
        self._before: str = tokenizer.decode(self._anchor)
        self._known: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token: int) -> tuple[str, bytes]:
        """A token that is only a part of a character reads `bytes:\\xe2\\x82`, so that no two have the same text."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def _find(self, token: int) -> tuple[str, bytes]:
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
