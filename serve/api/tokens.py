"""Single tokens as text and bytes, as log probabilities are listed with them."""

from __future__ import annotations

import re
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

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
