"""Which beginnings of texts the disk tier holds, found without opening a file."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from eagle_mlx.engine.prefix_tree import Keys, common

BLOCK = 256
"""Positions of a text in one file, counted from its start.

Of a model of 4B parameters that is 38 MB, which a disk reads at full speed; damage costs no more than so many. oMLX
and the caches that grow in steps of mlx-lm have blocks of this length too.
"""
ROOT = "0" * 32
"""The digest of no text, of requests without a namespace."""
_NAME = re.compile(r"(block|place)-(\d{8})-([0-9a-f]{32})\.safetensors")


@dataclass(frozen=True, eq=False)
class Entry:
    """A file: a block of positions, or what cannot be put together from blocks, at one place."""

    kind: str
    """`block` or `place`."""
    parent: str
    """The digest of all before `start`, which is made of whole blocks."""
    start: int
    keys: Keys
    """[N], N <= BLOCK: of a block its positions, of a place those from `start` up to it."""
    nbytes: int = 0
    shortest: int = 0
    """Of a place: from how many positions on it serves."""

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    @cached_property
    def digest(self) -> str:
        return digest(self.parent, self.keys)

    @cached_property
    def name(self) -> str:
        return f"{self.kind}-{self.start:08d}-{self.digest}.safetensors"

    def place(self, shortest: int) -> Entry:
        """Of the last block of a text, the place behind it."""
        if len(self.keys) < BLOCK:
            return Entry("place", self.parent, self.start, self.keys, shortest=shortest)
        return Entry("place", self.digest, self.end, self.keys[:0], shortest=shortest)


@dataclass(frozen=True)
class Match:
    """The beginning of a text, as files have it."""

    length: int
    blocks: list[Entry]
    """They hold these positions, and maybe some behind them."""
    place: Entry | None
    """None where every layer keeps every position."""

    @property
    def entries(self) -> list[Entry]:
        return [*self.blocks, *([self.place] if self.place is not None else [])]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def root_of(namespace: str) -> str:
    """Return the digest of no text in a namespace: what all files of its texts begin with, and no others."""
    return hashlib.blake2b(namespace.encode(), digest_size=16, person=b"namespace").hexdigest() if namespace else ROOT


def digest(parent: str, keys: Keys) -> str:
    return hashlib.blake2b(bytes.fromhex(parent) + keys.tobytes(), digest_size=16).hexdigest()


def start_of(name: str) -> int | None:
    """Where the positions of a file of this name begin; None for a name that the tier does not give."""
    found = _NAME.fullmatch(name)
    return int(found[2]) if found else None


def blocks_of(keys: Keys, namespace: str = "") -> Iterator[tuple[str, int, Keys]]:
    """The blocks of a text: what is before each as a digest, its start and its keys. The last may be short."""
    parent = root_of(namespace)
    for start in range(0, len(keys), BLOCK):
        own = keys[start : start + BLOCK]
        yield parent, start, own
        if len(own) == BLOCK:
            parent = digest(parent, own)


class Index:
    """The files of one folder, by what is before them and how they begin."""

    def __init__(self, positional: bool):
        """`positional`: every layer keeps every position, so that blocks are all that there is."""
        self.positional = positional
        self._entries: dict[str, Entry] = {}
        self._by_beginning: dict[tuple[str, str, int], list[Entry]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def add(self, entry: Entry) -> list[Entry]:
        """Have one more; the blocks that hold no more than the beginning of it, and are not here any longer."""
        same = self._by_beginning[_beginning(entry)]
        shorter = [x for x in same if entry.kind == "block" and common(x.keys, entry.keys) == len(x.keys)]
        for each in shorter:
            self.remove(each.name)
        self._by_beginning[_beginning(entry)].append(entry)
        self._entries[entry.name] = entry
        return shorter

    def remove(self, name: str) -> Entry | None:
        """Forget a file, if it is here."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            same = self._by_beginning[_beginning(entry)]
            same.remove(entry)
            if not same:
                del self._by_beginning[_beginning(entry)]
        return entry

    def covers(self, parent: str, keys: Keys) -> str | None:
        """The name of a block that holds these positions."""
        found, shared = self._closest(parent, keys)
        return found.name if found is not None and shared == len(keys) else None

    def find(self, keys: Keys, namespace: str = "") -> Match | None:
        """The longest beginning of a text that files have.

        A place a few positions behind where the texts part is not looked for in the next block.
        """
        best: Match | None = None
        path, parent, at = list[Entry](), root_of(namespace), 0
        while True:
            rest = keys[at : at + BLOCK]
            block, shared = self._closest(parent, rest)
            reach = [*path, block] if block is not None and shared else path
            for length, place in self._ends(parent, at, rest, shared):
                if length and (best is None or length >= best.length):
                    best = Match(length, reach if length > at else path, place)
            if block is None or shared < BLOCK:
                return best
            path, parent, at = reach, block.digest, at + BLOCK

    def _ends(self, parent: str, at: int, rest: Keys, shared: int) -> Iterator[tuple[int, Entry | None]]:
        """How far this block lets a text go on: the lengths, and the places that serve for them."""
        if self.positional:
            yield at + shared, None
            return
        beginnings = [-1, int(rest[0])] if len(rest) else [-1]
        for beginning in beginnings:
            for place in self._by_beginning.get(("place", parent, beginning), ()):
                length = at + min(shared, common(place.keys, rest))
                if length >= place.shortest:
                    yield length, place

    def _closest(self, parent: str, keys: Keys) -> tuple[Entry | None, int]:
        """The block that has the most positions in common with these, and how many."""
        if not len(keys):
            return None, 0
        same = self._by_beginning.get(("block", parent, int(keys[0])), ())
        shared = [(common(each.keys, keys), each) for each in same]
        count, block = max(shared, key=lambda x: x[0], default=(0, None))
        return block, count


def _beginning(entry: Entry) -> tuple[str, str, int]:
    return entry.kind, entry.parent, int(entry.keys[0]) if len(entry.keys) else -1
