"""Files of the disk tier: what each covers, and its name."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from eagle_mlx.engine.prefix_tree import Keys, common

BLOCK = 256
"""Positions per file, counted from the start of a text: 38 MB for a 4B model, which disks read at full speed. oMLX and
mlx-lm's growing caches use this length too."""
COLUMNS = "path, model, kind, parent, start, least, more, shortest, nbytes, checksum"
"""The columns of a row that `entry_of` reads."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One file and its row: a block of positions, or the boundary state at one position.

    A boundary state is what cannot be cut: sliding windows and recurrent states.
    """

    model: str  # the digest of everything that the content depends on (`identity`), and the name of the folder
    kind: str  # `block` or `state`
    parent: str  # the digest of the model, the namespace and all whole blocks before `start`
    start: int
    keys: Keys  # [N], N <= BLOCK: the keys of a block, or the keys from `start` to a state
    shortest: int = 0  # for a state: the shortest prefix, in positions, that it can be used for
    nbytes: int = 0
    checksum: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    @property
    def least(self) -> Keys:
        """The keys that a text must have to use this file; nothing for a block, which can be cut anywhere."""
        return self.keys[: max(0, self.shortest - self.start)]

    @property
    def more(self) -> Keys:
        return self.keys[len(self.least) :]

    @cached_property
    def digest(self) -> str:
        return digest_of(self.parent, self.keys)

    @cached_property
    def path(self) -> str:
        """The path relative to the folder of all models."""
        return f"{self.model}/{self.kind}-{self.start:08d}-{self.digest}.safetensors"

    def covers(self, other: Entry) -> bool:
        """Return whether this file makes another one with the same parent unnecessary."""
        longer = self.kind == "block" and common(self.keys, other.keys) == len(other.keys)
        return longer or self.path == other.path

    def checksum_of(self, content: bytes) -> int:
        """Return the CRC-32 of a file's content and its row."""
        return zlib.crc32(content, zlib.crc32(f"{self.path} {self.parent} {self.shortest}".encode()))


@dataclass(frozen=True)
class Match:
    """The longest prefix of a text that the files have."""

    length: int
    blocks: list[Entry]  # they cover these positions, and maybe some after them
    state: Entry | None  # None if every layer keeps every position

    @property
    def entries(self) -> list[Entry]:
        return [*self.blocks, *([self.state] if self.state is not None else [])]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def entries_of(keys: Keys, model: str, namespace: str = "", shortest: int | None = None) -> list[Entry]:
    """Return the files of a text: its blocks, the last of which may be short, and the state at its end.

    `shortest`: the shortest prefix that the state can be used for; None if blocks are enough.
    """
    entries, parent = list[Entry](), root_of(model, namespace)
    for start in range(0, len(keys), BLOCK):
        entries.append(Entry(model, "block", parent, start, keys[start : start + BLOCK]))
        parent = entries[-1].digest
    if entries and shortest is not None:
        last = entries[-1]
        if len(last.keys) == BLOCK:
            last = Entry(model, "block", last.digest, last.end, keys[:0])
        entries.append(replace(last, kind="state", shortest=shortest))
    return entries


def entry_of(path: object, fields: Sequence[Any]) -> Entry | None:
    """Return the file of a row; None if the row is damaged."""
    try:
        model, kind, parent, start, least, more, shortest, nbytes, checksum = fields
        entry = Entry(model, kind, parent, start, np.frombuffer(least + more, np.int64), shortest, nbytes, checksum)
        numbers = all(isinstance(value, int) and value >= 0 for value in (start, shortest, nbytes, checksum))
        return entry if numbers and entry.path == path and entry.least.tobytes() == least else None
    except (TypeError, ValueError):
        return None


def root_of(model: str, namespace: str) -> str:
    """Return the digest of an empty text in a namespace, the parent of its first blocks."""
    names = json.dumps([model, namespace])
    return hashlib.blake2b(names.encode(), digest_size=16, person=b"namespace").hexdigest()


def digest_of(parent: str, keys: Keys) -> str:
    return hashlib.blake2b(bytes.fromhex(parent) + keys.tobytes(), digest_size=16).hexdigest()
