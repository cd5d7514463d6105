"""A memory of texts: earlier texts draft for later requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from eagle_mlx.errors import require
from eagle_mlx.proposers.suffixes import REACH, TOKEN_BYTES, Texts, last_of

MEMORY_BYTES = 64 << 20
"""Eight million tokens, or 40,000 answers of 200 tokens."""
Remembered = Mapping[str, NDArray[np.uint32]]
"""Texts by the hash of their namespace: numbers of tokens plus one, and 0 at the end of each text."""


class Memory:
    """Texts of ended requests, by namespace. A namespace never sees the texts of another.

    If they take more than `nbytes`, the namespace with the most bytes forgets its oldest texts, so that one client's
    texts do not drive out another's.
    """

    def __init__(self, nbytes: int = MEMORY_BYTES):
        require("nbytes", nbytes, float, "a number of bytes, at least 1", 1)
        self.limit = nbytes
        self.nbytes = 0
        """Bytes of all texts."""
        self.added = 0  # how many texts
        self._texts: dict[str | None, Texts] = {}
        """By the hash of the namespace, whose name may contain what a client keeps secret."""
        self._lock = Lock()

    def of(self, namespace: str) -> list[Texts]:
        """Return the texts that may draft for a namespace: its own, and those that belong to none."""
        return [self._texts[name] for name in (_hashed(namespace), None) if name in self._texts]

    def texts(self) -> dict[str, NDArray[np.uint32]]:
        """Return the texts of all namespaces (`Remembered`). Any thread may call this."""
        with self._lock:
            copies = {name: texts.copy() for name, texts in self._texts.items() if name is not None}
        return {name: texts.tokens for name, texts in copies.items()}

    def restore(self, texts: Remembered) -> None:
        """Begin with texts that another memory had; the oldest are left out if they do not fit."""
        for name, tokens in fitted(texts, self.limit - self.nbytes).items():
            self._texts[name] = Texts.of(tokens)
            self.nbytes += self._texts[name].nbytes

    def add(self, text: Sequence[int], namespace: str | None = "") -> None:
        """Keep a text, but not a beginning that is kept already, such as the earlier turns of a chat.

        namespace: None for a text that may draft for every namespace.
        """
        with self._lock:
            texts = self._texts.setdefault(None if namespace is None else _hashed(namespace), Texts())
            before = texts.nbytes
            pieces = range(REACH, len(text) + 1, REACH)
            count = bisect_left(pieces, True, key=lambda end: texts.longest(last_of(text[:end])) < REACH)
            texts.add(text[max(count - 1, 0) * REACH :])
            texts.end()
            self.added += namespace is not None
            self.nbytes += texts.nbytes - before
            while self.nbytes > self.limit:
                self._forget()

    def _forget(self) -> None:
        namespace, largest = max(self._texts.items(), key=lambda item: item[1].nbytes)
        self.nbytes -= largest.nbytes
        largest.forget()
        self.nbytes += largest.nbytes
        if not largest.nbytes:
            del self._texts[namespace]


def _hashed(namespace: str) -> str:
    return blake2b(namespace.encode(), digest_size=16, person=b"memory").hexdigest()


def fitted(texts: Remembered, nbytes: int) -> Remembered:
    """Return the newest texts that fit into a memory of so many bytes; the namespaces with the most lose first."""
    kept, left = dict[str, NDArray[np.uint32]](), nbytes // TOKEN_BYTES
    by_size = sorted(texts.items(), key=lambda item: len(item[1]))
    for at, (name, tokens) in enumerate(by_size):
        if (over := len(tokens) - left // (len(by_size) - at)) > 0:
            ends = np.flatnonzero(tokens == 0) + 1
            tokens = tokens[ends[np.searchsorted(ends, over)] :]
        if tokens.size:
            kept[name] = tokens
        left -= len(tokens)
    return kept
