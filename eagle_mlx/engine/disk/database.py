"""The database of the disk tier's files, for all models and all servers that share a folder.

It is one sqlite3 file in that folder. A file is used only if it has a row, and its row is added after the file is on
disk. Servers write one at a time, in transactions; they can read at any time.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eagle_mlx.engine.prefix_tree import Keys, common
from eagle_mlx.files import sync_folder
from eagle_mlx.memory import gb

NAME = "prefixes.sqlite3"
BLOCK = 256
"""Positions per file, counted from the start of a text: 38 MB for a 4B model, which disks read at full speed. oMLX and
mlx-lm's growing caches use this length too."""
_VERSION = 1
"""Version of the tables. A database of another version is replaced."""
_WAIT_SECONDS = 30.0
"""How long to wait for other servers. Each holds the database while it writes one file."""
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, parent TEXT NOT NULL, start INTEGER NOT NULL,
    keys BLOB NOT NULL, shortest INTEGER NOT NULL, nbytes INTEGER NOT NULL, checksum INTEGER NOT NULL,
    first INTEGER NOT NULL, used INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS beginnings ON files (parent, kind, first);
CREATE INDEX IF NOT EXISTS oldest ON files (used, start DESC, nbytes);
CREATE INDEX IF NOT EXISTS sizes ON files (model, nbytes);
PRAGMA user_version = {_VERSION};
"""
_FILE = re.compile(r"(block|state)-\d{8}-[0-9a-f]{32}\.safetensors")
"""Names of our files."""


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
    def first(self) -> int:
        """The first key; -1 if there are no keys."""
        return int(self.keys[0]) if len(self.keys) else -1

    @cached_property
    def digest(self) -> str:
        return _digest(self.parent, self.keys)

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
    entries, parent = list[Entry](), _root(model, namespace)
    for start in range(0, len(keys), BLOCK):
        entries.append(Entry(model, "block", parent, start, keys[start : start + BLOCK]))
        parent = entries[-1].digest
    if entries and shortest is not None:
        last = entries[-1]
        if len(last.keys) == BLOCK:
            last = Entry(model, "block", last.digest, last.end, keys[:0])
        entries.append(replace(last, kind="state", shortest=shortest))
    return entries


class Database:
    """The files of all models in a folder, and the limit on their total size. Any thread may call it."""

    def __init__(self, root: Path, limit: int, say: Callable[[str], None]):
        """`limit`: total bytes of all files. `say`: receives each kind of problem once."""
        self.root, self.limit, self._say = root, limit, say
        self._ignored: set[str] = set()
        """Files that this process does not use, although they may have rows."""
        self._reported = False
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        """None if nothing can be written now. The reader is separate, so that reads never wait for writes."""
        self._inode = 0
        """The inode of the database, which may be deleted with its folder at any time."""
        self._reading, self._writing = threading.Lock(), threading.Lock()
        try:
            with self._transaction() as database:
                self._remove_orphans(database)
                self._make_room(database, 0)
        except OSError as e:
            self.report(e)

    def report(self, e: OSError) -> None:
        """Report once that nothing can be written."""
        if not self._reported:
            self._reported = True
            self._say(
                f"the prefix cache cannot write to or delete files in {self.root} ({e.strerror or e}). It has "
                f"{gb(self.nbytes())} of {gb(self.limit)}, which the server still reads. It tries to write again every "
                "minute. Check the folder's permissions and free space, or choose another --prefix-cache-dir"
            )

    def nbytes(self, model: str = "%") -> int:
        """Return the total size of a model's files, or of all files."""
        rows = self._rows("SELECT TOTAL(nbytes) FROM files WHERE model LIKE ?", model)
        return int(rows[0][0]) if rows else 0

    def find(self, keys: Keys, model: str, namespace: str, positional: bool) -> Match | None:
        """Return the longest prefix of a text that the files have. `positional`: there are no states.

        A state also serves a slightly shorter prefix, but we look for it only in the block where the texts differ.
        """
        best: Match | None = None
        path, parent, at = list[Entry](), _root(model, namespace), 0
        while True:
            rest = keys[at : at + BLOCK]
            blocks = self._beginning("block", parent, int(rest[0]) if len(rest) else -1)
            matches = [(common(each.keys, rest), each) for each in blocks]
            shared, block = max(matches, key=lambda match: match[0], default=(0, None))
            reach = [*path, block] if block is not None else path
            ends: list[tuple[int, Entry | None]] = [(at + shared, None)]
            if not positional:
                states = [
                    state for first in {-1, *rest[:1].tolist()} for state in self._beginning("state", parent, first)
                ]
                ends = [(at + min(shared, common(state.keys, rest)), state) for state in states]
            for length, state in ends:
                if length and length >= (state.shortest if state else 0) and (best is None or length >= best.length):
                    best = Match(length, reach if length > at else path, state)
            if block is None or shared < BLOCK:
                return best
            path, parent, at = reach, _digest(parent, rest), at + BLOCK

    def lacks(self, text: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Return the files of a text that are missing, and those that are there or are covered by longer ones."""
        missing, here = list[Entry](), list[Entry]()
        for entry in text:
            same = self._beginning(entry.kind, entry.parent, entry.first)
            found = next((each for each in same if each.covers(entry)), None)
            (missing if found is None else here).append(found or entry)
        return missing, here

    def _beginning(self, kind: str, parent: str, first: int) -> list[Entry]:
        """Return the files after `parent` whose first key is `first`; -1 for files without keys."""
        found = self._rows(
            "SELECT model, start, keys, shortest, nbytes, checksum FROM files"
            " WHERE kind = ? AND parent = ? AND first = ?",
            *(kind, parent, first),
        )
        entries = [
            Entry(model, kind, parent, start, np.frombuffer(keys, np.int64), shortest, nbytes, checksum)
            for model, start, keys, shortest, nbytes, checksum in found
        ]
        return [entry for entry in entries if entry.path not in self._ignored]

    def write(self, entry: Entry, content: bytes, now: int) -> int:
        """Write a file and its row; if necessary, remove the least recently used files. Raises OSError.

        `now`: the time of its last use, in ns. Returns the bytes written: 0 if the file exists or does not fit.
        """
        path, room = self.root / entry.path, len(content)
        if room > self.limit or path.is_dir():
            return 0
        with self._transaction() as database:
            same = self._beginning(entry.kind, entry.parent, entry.first)
            if any(each.covers(entry) for each in same):
                return 0
            self._delete(database, [entry.path, *(each.path for each in same if entry.covers(each))])
            self._make_room(database, room)
            place = entry.path, entry.model, entry.kind, entry.parent, entry.start, entry.keys.tobytes()
            row = (*place, entry.shortest, room, entry.checksum_of(content), entry.first, now)
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                _write_synced(path, content)
                database.execute(f"INSERT INTO files VALUES ({', '.join('?' * len(row))})", row)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        self._ignored.discard(entry.path)
        return room

    def touch(self, entries: Iterable[Entry], now: int) -> None:
        """Set the last use of files to `now`, in nanoseconds; with equal times, a text's end is removed first."""
        if self._writer is not None:
            with self._transaction() as database:
                paths = [(now, entry.path) for entry in entries]
                database.executemany("UPDATE files SET used = ? WHERE path = ?", paths)

    def drop(self, entry: Entry, damaged: bool) -> None:
        """Stop using a file. If it is `damaged`, delete it; otherwise remove the rows of all files that are gone."""
        self._ignored.add(entry.path)
        with suppress(OSError), self._transaction() as database:
            if damaged:
                self._delete(database, [entry.path])
            else:
                self._remove_orphans(database)

    def close(self) -> None:
        """Close the database; nothing is found afterward."""
        with self._reading, self._writing:
            for each in (self._reader, self._writer):
                if each is not None:
                    each.close()
            self._reader = self._writer = None

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._reading:
            try:
                return self._reader.execute(query, values).fetchall() if self._reader is not None else []
            except sqlite3.Error:  # a database that cannot be read counts as empty
                return []

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction, while no other server writes. Raises OSError."""
        with self._writing:
            try:
                path = self.root / NAME
                if self._writer is None or not path.exists() or path.stat().st_ino != self._inode:
                    self._open(path)
                assert self._writer is not None
                self._writer.execute("BEGIN IMMEDIATE")
                with self._writer:
                    yield self._writer
            except sqlite3.Error as e:
                raise OSError(str(e)) from e

    def _open(self, path: Path) -> None:
        """Open or create the database. Raises OSError or sqlite3.Error; it may still be readable then."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError(f"{NAME} is not a regular file; delete it")
        try:
            self._writer = _connected(path)
        except (OSError, sqlite3.OperationalError):
            if self._reader is None and path.exists():
                self._reader = _reader(path, "?immutable=1")
            raise
        except sqlite3.DatabaseError as e:
            self._say(f"the database of the prefix cache in {self.root} is damaged ({e}); its files are deleted")
            for each in self.root.glob(f"{NAME}*"):
                each.unlink()
            self._writer = _connected(path)
        with self._reading:
            if self._reader is not None:
                self._reader.close()
            self._reader, self._inode = _reader(path), path.stat().st_ino

    def _make_room(self, database: sqlite3.Connection, nbytes: int) -> None:
        """Remove the least recently used files until `nbytes` more bytes fit. Raises OSError."""
        [(used,)] = database.execute("SELECT TOTAL(nbytes) FROM files").fetchall()
        over = int(used) + nbytes - self.limit
        if over <= 0:
            return
        for path, size in database.execute("SELECT path, nbytes FROM files ORDER BY used, start DESC").fetchall():
            self._delete(database, [path])
            over -= size
            if over <= 0:
                return

    def _delete(self, database: sqlite3.Connection, paths: Iterable[str]) -> None:
        for path in paths:
            (self.root / path).unlink(missing_ok=True)
            database.execute("DELETE FROM files WHERE path = ?", (path,))

    def _remove_orphans(self, database: sqlite3.Connection) -> None:
        """Remove files without rows (from a killed process) and rows without files."""
        rows = {path for (path,) in database.execute("SELECT path FROM files").fetchall()}
        files = [path for path in self.root.glob("*/*.safetensors") if _FILE.fullmatch(path.name) and path.is_file()]
        found = {f"{path.parent.name}/{path.name}" for path in files}
        for name in found - rows:
            (self.root / name).unlink(missing_ok=True)
        database.executemany("DELETE FROM files WHERE path = ?", [(path,) for path in rows - found])


def _connected(path: Path) -> sqlite3.Connection:
    """Open or create the database. Raises sqlite3.OperationalError if it is not writable, sqlite3.DatabaseError if it
    is damaged or of another version."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # only its owner may read it: it reveals what was written
    connection = sqlite3.connect(path, _WAIT_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        [(version,)] = connection.execute("PRAGMA user_version").fetchall()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"version {version}")
        if version:
            [(found,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _reader(path: Path, how: str = "") -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}{how}", uri=True, check_same_thread=False)


def _write_synced(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, and sync it to disk. Raises OSError."""
    path.unlink(missing_ok=True)  # a leftover of a killed process
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _root(model: str, namespace: str) -> str:
    """Return the digest of an empty text in a namespace, the parent of its first blocks."""
    return hashlib.blake2b(f"{model}/{namespace}".encode(), digest_size=16, person=b"namespace").hexdigest()


def _digest(parent: str, keys: Keys) -> str:
    return hashlib.blake2b(bytes.fromhex(parent) + keys.tobytes(), digest_size=16).hexdigest()
