"""A memory of texts on disk: one file for each tokenizer, next to the files of prefixes."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle_mlx.files import locked, write_whole
from eagle_mlx.proposers.memory import Memory, Remembered, fitted
from eagle_mlx.target import Target

log = logging.getLogger("eagle_mlx.prefixes")
_SAVE_SECONDS = 300.0
"""Interval between writes. A full default memory is 32 MB, so an SSD gets at most 9 GB a day."""


class MemoryFile:
    """Reads a memory at the start of an engine and writes it every five minutes, and when closed, in its own thread.

    Servers may share a folder: each keeps the texts that another wrote in the meantime, and reads them when it starts.
    """

    def __init__(self, folder: Path, memory: Memory, target: Target, say: Callable[[str], None] = log.warning):
        """folder: also of the prefix files. say: receives each kind of problem once. The target needs a tokenizer."""
        self._memory, self._say = memory, say
        self._identity = identity(target)
        self.path = folder / f"memory-{self._identity}.npz"
        self._saved, self._failed = memory.added, False
        memory.restore(self._read())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._save_until_closed, name="memory-writer", daemon=True)
        self._thread.start()

    def save(self) -> None:
        """Write the texts, unless none are new. Any thread may call this; the engine waits for microseconds."""
        if (added := self._memory.added) == self._saved:
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self.path.parent, wait=True):
                texts = fitted(_united(self._read(), self._memory.texts()), self._memory.limit)
                np.savez(content := io.BytesIO(), allow_pickle=False, identity=np.array(self._identity), **texts)
                write_whole(self.path, content.getvalue(), mode=0o600)
            self._saved, self._failed = added, False
        except OSError as e:
            if not self._failed:
                self._say(f"{self.path} cannot be written ({e.strerror or e}), so a restart forgets the newest texts")
            self._failed = True

    def close(self, seconds: float) -> bool:
        """Write the texts, waiting at most `seconds`; return whether it is done."""
        self._closing.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _save_until_closed(self) -> None:
        while not self._closing.wait(_SAVE_SECONDS):
            self.save()
        self.save()

    def _read(self) -> Remembered:
        """Return the texts of the file, and none if it does not exist or must not be used, which is reported."""
        if not self.path.exists():
            return {}
        try:
            if not self.path.is_file():
                raise OSError("it is not a regular file")
            with np.load(self.path) as file:  # a zip file, which has checksums
                texts = dict(file)
            if texts.pop("identity", None) != self._identity:
                raise ValueError("its tokens are of another tokenizer, or of another version of EAGLE-MLX")
            return texts
        except Exception as e:  # of a damaged file; numpy and zipfile raise many kinds
            self._say(f"{self.path} is not used, and replaced when there are new texts: {e}")
            return {}


def identity(target: Target) -> str:
    """Return a hash, as 32 hexadecimal digits, of the format and the numbers of all tokens."""
    assert target.tokenizer is not None
    facts = ["eagle-mlx-memory-1", sorted(target.tokenizer.get_vocab().items())]
    return hashlib.blake2s(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _united(older: Remembered, newer: Remembered) -> Remembered:
    """Return the texts of both, those that only the older has first."""
    united = {**older, **newer}
    for name in older.keys() & newer.keys():
        here = {text.tobytes() for text in _split(newer[name])}
        missing = [text for text in _split(older[name]) if text.tobytes() not in here]
        united[name] = np.concatenate([*missing, newer[name]])
    return united


def _split(tokens: NDArray[np.uint32]) -> list[NDArray[np.uint32]]:
    return np.split(tokens, np.flatnonzero(tokens == 0) + 1)
