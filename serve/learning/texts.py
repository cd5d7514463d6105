"""Collected texts with hidden states, each in a file; the oldest leave first."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from eagle_mlx.files import write_whole
from eagle_mlx.hidden_states import Example
from eagle_mlx.shards import SUFFIX, ShardMeta, bytes_per_token, decode, encode

log = logging.getLogger("eagle_mlx.serve")
HELD_OUT = 5
"""One in this many conversations is never learned from: it judges."""
_OF_ONE = 8
"""Texts of a conversation, so that one prompt again and again does not push out all others."""


@dataclass(frozen=True)
class Text:
    """A text in its file: its conversation, and how many tokens it has."""

    path: Path
    time: int
    """Nanoseconds from 1970 to the moment when it was added; no two texts have the same."""
    key: int
    tokens: int
    nbytes: int

    @property
    def is_held_out(self) -> bool:
        return self.key % HELD_OUT == 0


class Texts:
    """The texts of one target, of which files in a folder hold at most a limit."""

    def __init__(self, folder: Path, limit: int, meta: ShardMeta):
        """folder: is created, readable by its owner alone. limit: bytes of all files. Damaged files are deleted."""
        self._folder, self._limit = folder, limit
        self._meta, self.token_bytes = meta, bytes_per_token(meta)
        self.all: list[Text] = []
        """All texts, oldest first."""
        self._has_space = True  # whether the last text could be written
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(filter(Path.is_file, folder.iterdir())):  # a disk has a folder of its own, lost+found
            try:
                self.all.append(_indexed(path))
            except (SafetensorError, OSError, ValueError) as e:
                log.warning("%s is deleted, because it is damaged: %s", path, e)
                path.unlink()
        self._make_room(0)

    @property
    def disk_bytes(self) -> int:
        return sum(text.nbytes for text in self.all)

    def add(self, example: Example) -> Text | None:
        """Write a text to a file, for its owner alone, unless there are enough of its conversation, or it alone is
        larger than the limit, or it cannot be written: a full disk may have space for the next ones."""
        if sum(text.key == example.key for text in self.all) >= _OF_ONE:
            return None
        if len(content := encode([example], self._meta)) > self._limit:
            return None
        self._make_room(len(content))
        now = max(time.time_ns(), self.all[-1].time + 1 if self.all else 0)
        path = self._folder / f"{now}{SUFFIX}"
        had_space, self._has_space = self._has_space, True
        try:
            write_whole(path, content, mode=0o600)
        except OSError as e:
            self._has_space = False
            if had_space:
                log.warning("%s cannot be written (%s); the head learns from no new texts", self._folder, e.strerror)
            return None
        self.all.append(Text(path, now, example.key, len(example), len(content)))
        return self.all[-1]

    def read(self, text: Text) -> Example:
        """Return a text with its states. Raises OSError or SafetensorError if its file is gone or damaged."""
        return decode(text.path, slice(text.tokens), self._meta)

    def forget_deleted(self) -> None:
        """Forget the texts of files that the user has deleted."""
        self.all = [text for text in self.all if text.path.exists()]

    def _make_room(self, nbytes: int) -> None:
        """Delete the oldest texts until this many bytes fit."""
        excess = self.disk_bytes + nbytes - self._limit
        while excess > 0 and self.all:
            oldest = self.all.pop(0)
            oldest.path.unlink(missing_ok=True)
            excess -= oldest.nbytes


def _indexed(path: Path) -> Text:
    if path.suffix != SUFFIX:
        raise ValueError("it is not complete")
    with safe_open(str(path), "numpy") as file:
        [key], [tokens] = (file.get_tensor(name).tolist() for name in ("keys", "lengths"))
    return Text(path, int(path.stem), key, tokens, path.stat().st_size)
