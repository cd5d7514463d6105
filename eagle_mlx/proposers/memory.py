"""A memory of texts: what was written before drafts for later requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from eagle_mlx.errors import ConfigError
from eagle_mlx.proposers.suffixes import REACH, Texts, last_of

MEMORY_BYTES = 64 << 20
"""Eight million tokens, or 40,000 answers of 200 tokens."""


class Memory:
    """Texts of ended requests, by namespace. A namespace never sees the texts of another.

    If they take more than `nbytes`, the namespace with the most bytes forgets its oldest texts, so that one client's
    texts do not drive out another's.
    """

    def __init__(self, nbytes: int = MEMORY_BYTES):
        """Raises ConfigError if `nbytes` is not positive."""
        if nbytes <= 0:
            raise ConfigError(f"a memory of {nbytes} bytes holds nothing; give at least 1, or no memory")
        self.limit = nbytes
        self.nbytes = 0
        """Bytes of all texts."""
        self._texts: dict[str | None, Texts] = {}

    def of(self, namespace: str) -> list[Texts]:
        """Return the texts that may draft for a namespace: its own, and those that belong to none."""
        return [self._texts[name] for name in (namespace, None) if name in self._texts]

    def add(self, text: Sequence[int], namespace: str | None = "") -> None:
        """Keep a text, but not a beginning that is kept already, such as the earlier turns of a chat.

        namespace: None for a text that may draft for every namespace.
        """
        texts = self._texts.setdefault(namespace, Texts())
        before = texts.nbytes
        pieces = range(REACH, len(text) + 1, REACH)
        count = bisect_left(pieces, True, key=lambda end: texts.longest(last_of(text[:end])) < REACH)
        texts.add(text[max(count - 1, 0) * REACH :])
        texts.end()
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
