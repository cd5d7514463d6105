"""The database of the disk tier: which files there are, for all models and all servers that share a folder.

One sqlite3 file lies next to the files. A file counts only if it has a row, and gets its row after it is on the disk.
Servers write one at a time, in a transaction each; they read at any time.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eagle_mlx.engine.prefix_tree import Keys, common
from eagle_mlx.files import sync, sync_folder
from eagle_mlx.memory import gb

NAME = "prefixes.sqlite3"
BLOCK = 256
"""Positions of a text in one file, counted from its start.

Of a model of 4B parameters that is 38 MB, which a disk reads at full speed; damage costs no more than so many. oMLX
and the caches of mlx-lm that grow in steps have blocks of this length too.
"""
_VERSION = 1
"""Of the tables. A database of another version starts over."""
_WAIT_SECONDS = 30.0
"""How long to wait for another server, which writes one file meanwhile."""
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
_FILE = re.compile(r"(block|state|place)-\d{8}-[0-9a-f]{32}\.safetensors")
"""Names of our files; `place` is that of an earlier layout, whose files are removed."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One file and its row: a block of positions, or the boundary state at one position.

    A boundary state is what cannot be cut: windows of sliding attention and states of recurrent layers.
    """

    model: str
    """The digest of all that the numbers depend on. It names the folder."""
    kind: str
    """`block` or `state`."""
    parent: str
    """The digest of all whole blocks before `start`, of the model and of the namespace."""
    start: int
    keys: Keys
    """[N], N <= BLOCK: the positions of a block, or those from `start` up to a state."""
    shortest: int = 0
    """Of a state: from how many positions on it serves."""
    nbytes: int = 0
    checksum: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    @property
    def first(self) -> int:
        """The first key; -1 if there is none."""
        return int(self.keys[0]) if len(self.keys) else -1

    @cached_property
    def digest(self) -> str:
        return _digest(self.parent, self.keys)

    @cached_property
    def path(self) -> str:
        """Below the folder of all models."""
        return f"{self.model}/{self.kind}-{self.start:08d}-{self.digest}.safetensors"

    def covers(self, other: Entry) -> bool:
        """Whether this file holds what another one with the same beginning does."""
        longer = self.kind == "block" and common(self.keys, other.keys) == len(other.keys)
        return longer or self.path == other.path

    def checksum_of(self, content: bytes) -> int:
        """Return the CRC-32 of a file's content, and of what its row says of it."""
        return zlib.crc32(content, zlib.crc32(f"{self.path} {self.parent} {self.shortest}".encode()))


@dataclass(frozen=True)
class Match:
    """The beginning of a text, as files have it."""

    length: int
    blocks: list[Entry]
    """They hold these positions, and maybe some after them."""
    state: Entry | None
    """None if every layer keeps every position."""

    @property
    def entries(self) -> list[Entry]:
        return [*self.blocks, *([self.state] if self.state is not None else [])]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def entries_of(keys: Keys, model: str, namespace: str = "", shortest: int | None = None) -> list[Entry]:
    """Return the files of a text: its blocks, the last of which may be short, and the state at its end.

    `shortest`: from how many positions on that state serves; None if blocks are all.
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
    """Which files there are below a folder, of all models, and the limit of their bytes. Any thread may call it."""

    def __init__(self, root: Path, limit: int, say: Callable[[str], None]):
        """`limit`: bytes of all files together. `say`: told what goes wrong, once each."""
        self.root, self.limit, self._say = root, limit, say
        self._ignored: set[str] = set()
        """Files that are of no use to this process, though they may have rows."""
        self._said = False
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        """None if nothing can be written now. Apart from the reader, which never waits for it."""
        self._inode = 0
        """The database's, which somebody may delete with the folder at any time."""
        self._reading, self._writing = threading.Lock(), threading.Lock()
        try:
            with self._transaction():
                odd = self._remove_orphans()
                self._make_room(0)
        except OSError as e:
            self.report(e)
        else:
            if odd:
                more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
                say(f"{min(odd)}{more} in the prefix cache {root} are no regular files; they are skipped: delete them")

    def report(self, e: OSError) -> None:
        """Say once that nothing can be written."""
        if self._said:
            return
        self._said = True
        used = self.nbytes()
        self._say(
            f"the prefix cache cannot {'delete files in' if used > self.limit else 'write to'} {self.root} "
            f"({e.strerror or e}): {gb(used)} are there, of {gb(self.limit)}. The server reads them, and tries again "
            "every minute to write: see to the permissions and the space, or name another --prefix-cache-dir"
        )

    def nbytes(self, model: str = "%") -> int:
        """Return the bytes of the files of a model, or of all."""
        rows = self._rows("SELECT TOTAL(nbytes) FROM files WHERE model LIKE ?", model)
        return int(rows[0][0]) if rows else 0

    def find(self, keys: Keys, model: str, namespace: str, positional: bool) -> Match | None:
        """Return the longest beginning of a text that files have.

        `positional`: every layer keeps every position, so that there are no states. A state a few positions after the
        one where the texts part is not looked for in the next block.
        """
        best: Match | None = None
        path, parent, at = list[Entry](), _root(model, namespace), 0
        while True:
            rest = keys[at : at + BLOCK]
            block, shared = self._closest(parent, rest)
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
        """Return those files of a text that are missing, and those that are here or that longer ones stand for."""
        missing, here = list[Entry](), list[Entry]()
        for entry in text:
            same = self._beginning(entry.kind, entry.parent, entry.first)
            found = next((each for each in same if each.covers(entry)), None)
            (missing if found is None else here).append(found or entry)
        return missing, here

    def _closest(self, parent: str, keys: Keys) -> tuple[Entry | None, int]:
        """Return the block that has the most positions in common with these, and how many."""
        blocks = self._beginning("block", parent, int(keys[0]) if len(keys) else -1)
        shared = [(common(block.keys, keys), block) for block in blocks]
        count, block = max(shared, key=lambda x: x[0], default=(0, None))
        return block, count

    def _beginning(self, kind: str, parent: str, first: int) -> list[Entry]:
        """Return the files after `parent` that begin with a key; -1 for those without one."""
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
        """Write a file and its row, and remove the files that were not used for longest if there is no room.

        `now`: when it was of use, in nanoseconds. Returns the bytes written: 0 if it is there by now, or does not fit.
        Raises OSError.
        """
        path, room = self.root / entry.path, len(content)
        if room > self.limit or path.is_dir():
            return 0
        with self._transaction() as database:
            same = self._beginning(entry.kind, entry.parent, entry.first)
            if any(each.covers(entry) for each in same):
                return 0
            self._delete([entry.path, *(each.path for each in same if entry.covers(each))])
            self._make_room(room)
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
        """Note that files were of use, now in nanoseconds; together, so that of a text the end goes first."""
        paths = [(now, entry.path) for entry in entries]
        if paths and self._writer is not None:
            with self._transaction() as database:
                database.executemany("UPDATE files SET used = ? WHERE path = ?", paths)

    def drop(self, entry: Entry, delete: bool) -> None:
        """Use a file no longer. `delete`: it is damaged, for all servers."""
        self._ignored.add(entry.path)
        if delete:
            with suppress(OSError), self._transaction():
                self._delete([entry.path])

    def drop_missing(self) -> None:
        """Remove the rows of all files that somebody has deleted: such files are rarely deleted one by one."""
        with suppress(OSError), self._transaction():
            self._remove_orphans()

    def close(self) -> None:
        """Nothing is found afterward."""
        with self._reading, self._writing:
            for each in (self._reader, self._writer):
                if each is not None:
                    each.close()
            self._reader = self._writer = None

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._reading:
            try:
                return self._reader.execute(query, values).fetchall() if self._reader is not None else []
            except sqlite3.Error:  # what cannot be read is not there
                return []

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Keep other servers from writing, and do all of the block or nothing. Raises OSError."""
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
        """Open the database, or make it. Raises OSError and sqlite3.Error; it may be there to be read then."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError(f"{NAME} is no regular file; delete it")
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

    def _make_room(self, nbytes: int) -> None:
        """In a transaction: remove what was not used for longest until so many more bytes fit. Raises OSError."""
        assert self._writer is not None
        [(used,)] = self._writer.execute("SELECT TOTAL(nbytes) FROM files").fetchall()
        over, failed = int(used) + nbytes - self.limit, None
        if over <= 0:
            return
        for path, size in self._writer.execute("SELECT path, nbytes FROM files ORDER BY used, start DESC").fetchall():
            try:
                self._delete([path])
                over -= size
            except OSError as e:
                failed = e
            if over <= 0:
                return
        raise failed or OSError("there is no room")

    def _delete(self, paths: Iterable[str]) -> None:
        """In a transaction: remove files and their rows. Raises OSError."""
        assert self._writer is not None
        for path in paths:
            (self.root / path).unlink(missing_ok=True)
            self._writer.execute("DELETE FROM files WHERE path = ?", (path,))

    def _remove_orphans(self) -> list[str]:
        """In a transaction: remove files without rows, which a process that was killed has left, and rows without
        files. Returns the FIFOs and folders with names of files, which are left alone."""
        assert self._writer is not None
        rows = {path for (path,) in self._writer.execute("SELECT path FROM files").fetchall()}
        there, odd = set[str](), list[str]()
        for path in self.root.glob("*/*.safetensors"):
            name = f"{path.parent.name}/{path.name}"
            if not _FILE.fullmatch(path.name):
                continue
            if not path.is_file():
                odd.append(name)
            elif name in rows:
                there.add(name)
            else:
                path.unlink(missing_ok=True)
        self._writer.executemany("DELETE FROM files WHERE path = ?", [(path,) for path in rows - there])
        return odd


def _connected(path: Path) -> sqlite3.Connection:
    """Open the database, or make it. Raises sqlite3.OperationalError if it cannot be written, sqlite3.DatabaseError if
    it is damaged or of another version."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # it tells what somebody wrote
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
    """Write a file that only its owner can read, and have it on the disk. Raises OSError."""
    path.unlink(missing_ok=True)  # a FIFO, or what a process that was killed has left
    with closing(os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        sync(file.fileno())
    sync_folder(path.parent)


def _root(model: str, namespace: str) -> str:
    """Return the digest of no text: what all texts of a namespace begin with, and no others."""
    return hashlib.blake2b(f"{model}/{namespace}".encode(), digest_size=16, person=b"namespace").hexdigest()


def _digest(parent: str, keys: Keys) -> str:
    return hashlib.blake2b(bytes.fromhex(parent) + keys.tobytes(), digest_size=16).hexdigest()
