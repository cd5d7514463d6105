"""Collected texts with hidden states: the newest in memory, all of them in files; the oldest leave first."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from eagle_mlx.files import write_whole
from eagle_mlx.hidden_states import Example
from eagle_mlx.shards import SUFFIX, ShardMeta, bytes_per_token, decode, encode, shard_name

log = logging.getLogger("eagle_mlx.serve")
HELD_OUT = 5
"""One in this many conversations is never learned from: it judges."""
_FILE_BYTES = 64 << 20
"""Bytes that wait in memory for the next file. A server that is killed loses them."""
_FILES = 16
"""At least so many files fit into the limit, so that little leaves with the oldest one."""
_OF_ONE = 8
"""Texts of a conversation, so that one prompt again and again does not push out all others."""


@dataclass(frozen=True)
class Text:
    """A text that can be read: its conversation, and how many of its tokens are learned."""

    serial: int
    """Counts up from text to text."""
    key: int
    tokens: int
    place: Example | tuple[Path, int, int]
    """The example, or its file, its number there, and where its tokens begin."""

    @property
    def is_held_out(self) -> bool:
        return self.key % HELD_OUT == 0


class Texts:
    """The texts of one target, of which files in a folder hold at most a limit."""

    def __init__(self, folder: Path, limit: int, meta: ShardMeta):
        """folder: is created, readable by its owner alone. limit: bytes of all files. Damaged files are deleted."""
        self._folder, self._limit = folder, limit
        self._meta, self.token_bytes = meta, bytes_per_token(meta)
        self._serial = 0
        self._files: dict[Path, list[Text]] = {}
        self._new: list[Text] = []
        self.disk_bytes = 0
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(folder.iterdir()):
            try:
                self._files[path] = list(self._indexed(path))
            except (SafetensorError, OSError, ValueError) as e:
                log.warning("%s is deleted, because it is damaged: %s", path, e)
                path.unlink()
        self._make_room(0)

    def _indexed(self, path: Path) -> Iterator[Text]:
        if path.suffix != SUFFIX:
            raise ValueError("it is not complete")
        with safe_open(str(path), "numpy") as file:
            lengths, keys = file.get_tensor("lengths").tolist(), file.get_tensor("keys").tolist()
        starts = np.cumsum([0, *lengths]).tolist()
        for number, (start, tokens, key) in enumerate(zip(starts, lengths, keys, strict=False)):
            yield Text(self._next(), key, tokens, (path, number, start))

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    @property
    def all(self) -> list[Text]:
        """All texts, oldest first."""
        return [*chain(*self._files.values()), *self._new]

    def written_after(self, time: float) -> list[Text]:
        """Return the texts of files that were written after a time, in seconds since 1970."""
        return [text for path, texts in self._files.items() if path.stat().st_mtime > time for text in texts]

    def add(self, example: Example) -> Text | None:
        """Add a text, unless there are enough of its conversation. Files are written as they fill up."""
        if sum(text.key == example.key for text in self.all) >= _OF_ONE:
            return None
        text = Text(self._next(), example.key, len(example), example)
        self._new.append(text)
        if sum(text.tokens for text in self._new) * self.token_bytes >= min(_FILE_BYTES, self._limit // _FILES):
            self.flush()
        return text

    def read(self, text: Text) -> Example:
        """Return a text with its states. Raises OSError or SafetensorError if its file is gone or damaged."""
        if isinstance(text.place, Example):
            return text.place
        path, number, start = text.place
        return decode(path, slice(start, start + text.tokens), self._meta, number)

    def flush(self) -> None:
        """Write the new texts to a file, for its owner alone. Raises OSError; they are forgotten then."""
        new, self._new = self._new, []
        examples = [text.place for text in new if isinstance(text.place, Example)]
        if not examples:
            return
        content = encode(examples, self._meta)
        if len(content) > self._limit:
            return
        self._make_room(len(content))
        last = max((int(path.stem.removeprefix("shard-")) for path in self._files), default=-1)
        path = self._folder / shard_name(last + 1)
        write_whole(path, content, mode=0o600)
        starts = np.cumsum([0, *(text.tokens for text in new)]).tolist()
        pairs = enumerate(zip(new, starts, strict=False))
        self._files[path] = [Text(old.serial, old.key, old.tokens, (path, at, start)) for at, (old, start) in pairs]
        self._make_room(0)

    def forget_deleted(self) -> None:
        """Forget the texts of files that the user has deleted."""
        self._files = {path: texts for path, texts in self._files.items() if path.exists()}

    def _make_room(self, nbytes: int) -> None:
        """Delete the oldest files until this many bytes fit."""
        self.forget_deleted()
        sizes = {path: path.stat().st_size for path in self._files}
        while self._files and sum(sizes.values()) + nbytes > self._limit:
            oldest = next(iter(self._files))
            oldest.unlink()
            del self._files[oldest], sizes[oldest]
        self.disk_bytes = sum(sizes.values())
