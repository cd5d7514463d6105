"""The database of the disk tier's files, for all models and all servers that share a folder.

It is one sqlite3 file in that folder. A file is used only if it has a row, and its row is added after the file is on
disk. Servers write one at a time, in transactions; they can read at any time.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle_mlx.engine.disk import snapshot_file
from eagle_mlx.engine.disk.snapshot_file import COLUMNS, Entry, Match, digest_of, entry_of, root_of
from eagle_mlx.engine.prefix_tree import Keys, common
from eagle_mlx.files import sync_folder
from eagle_mlx.memory import gb

NAME = "prefixes.sqlite3"
_VERSION = 2
"""Version of the tables. A database of another version is replaced."""
_WAIT_SECONDS = 30.0
"""How long to wait for other servers. Each holds the database while it writes one file."""
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, parent TEXT NOT NULL, start INTEGER NOT NULL,
    least BLOB NOT NULL, more BLOB NOT NULL, shortest INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL, used INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS texts ON files (parent, kind, least, more);
CREATE INDEX IF NOT EXISTS oldest ON files (used, start DESC, nbytes);
CREATE INDEX IF NOT EXISTS sizes ON files (model, nbytes);
PRAGMA user_version = {_VERSION};
"""
_PATH = re.compile(r"[0-9a-f]{32}/(block|state)-\d{8}-[0-9a-f]{32}\.safetensors")  # paths of our files
_LAST_USE = 1 << 62  # the number of uses is below this, unless it is damaged


class Database:
    """The files of all models in a folder, and the limit on their total size. Any thread may call it."""

    def __init__(self, root: Path, limit: int, say: Callable[[str], None]):
        """`limit`: total bytes of all files. `say`: receives each kind of problem once."""
        self.root, self.limit = root, limit
        self._say = say
        self._ignored: set[str] = set()  # files that this process does not use, although they may have rows
        self._unreadable: set[str] = set()  # kinds of reading errors that were reported
        self._damaged: set[int] = set()  # damaged rows, which the next transaction deletes
        self._reported = False
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        """None if nothing can be written now. The reader is separate, so that reads never wait for writes."""
        self._inode = 0  # of the database, which may be deleted with its folder at any time
        self._reading, self._writing = threading.Lock(), threading.Lock()
        try:
            with self._transaction() as database:
                self._remove_orphans(database)
                self._make_room(database, 0)
        except OSError as e:
            self.report(e)

    def report(self, e: OSError) -> None:
        """Report that nothing can be written, once until something is."""
        if not self._reported:
            self._reported = True
            self._say(
                f"the prefix cache cannot write to or delete files in {self.root} ({e.strerror or e}). It has "
                f"{gb(self.nbytes())} of {gb(self.limit)}, which the server still reads. It tries to write again every "
                "minute. Check the folder's permissions and free space, or choose another --prefix-cache-dir"
            )

    def nbytes(self, model: str = "%") -> int:
        rows = self._rows("SELECT TOTAL(nbytes) FROM files WHERE model LIKE ?", model)
        return int(rows[0][0]) if rows else 0

    def find(self, keys: Keys, model: str, namespace: str, positional: bool) -> Match | None:
        """Return the longest prefix of a text that the files have. `positional`: there are no states. A state also
        serves a slightly shorter prefix, but we look for it only in the block where the texts differ."""
        best: Match | None = None
        path, parent, at = list[Entry](), root_of(model, namespace), 0
        while True:
            rest = keys[at : at + snapshot_file.BLOCK]
            matches = [(common(block.keys, rest), block) for block in self._closest("block", parent, rest)]
            shared, block = max(matches, key=lambda match: match[0], default=(0, None))
            reach = [*path, block] if block is not None else path
            ends: list[tuple[int, Entry | None]] = [(at + shared, None)]
            if not positional:
                states = self._closest("state", parent, rest[:shared])
                ends = [(at + common(state.keys, rest[:shared]), state) for state in states]
            for length, state in ends:
                if length >= max(1, state.shortest if state else 0, best.length if best else 0):
                    best = Match(length, reach if length > at else path, state)
            if block is None or shared < snapshot_file.BLOCK:
                return best
            path, parent, at = reach, digest_of(parent, rest), at + snapshot_file.BLOCK

    def lacks(self, text: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Return the files of a text that are missing, and those that are there or are covered by longer ones."""
        missing, here = list[Entry](), list[Entry]()
        for entry in text:
            match = next((other for other in self._around(entry) if other.covers(entry)), None)
            (missing if match is None else here).append(match or entry)
        return missing, here

    def _closest(self, kind: str, parent: str, keys: Keys) -> Iterator[Entry]:
        """Yield the files after `parent` that serve the most of `keys`, for each `least` that `keys` begin with.

        In the order of keys, those with the longest common prefix are neighbors. So the rows read do not depend on the
        number of files.
        """
        length = len(keys)
        while (below := self._first(kind, parent, "least <= ? ORDER BY least DESC", keys[:length])) is not None:
            length = common(below.least, keys[:length])
            if length == len(below.least):
                yield from self._neighbors(kind, parent, keys[:length], keys[length:])
                if not length:
                    return
                length -= 1

    def _around(self, entry: Entry) -> Iterator[Entry]:
        return self._neighbors(entry.kind, entry.parent, entry.least, entry.more)

    def _neighbors(self, kind: str, parent: str, least: Keys, more: Keys) -> Iterator[Entry]:
        for order in ("more <= ? ORDER BY more DESC", "more > ? ORDER BY more"):
            if (entry := self._first(kind, parent, f"least = ? AND {order}", least, more)) is not None:
                yield entry

    def _first(self, kind: str, parent: str, where: str, *keys: Keys) -> Entry | None:
        """Return the first file after `parent` that can be used. A damaged row is skipped, and later deleted."""
        query = f"SELECT rowid, {COLUMNS} FROM files WHERE kind = ? AND parent = ? AND {where}"
        values = (kind, parent, *(part.tobytes() for part in keys))
        with self._read() as reader:
            for row, path, *fields in reader.execute(query, values) if reader is not None else ():
                if path in self._ignored:
                    continue
                if (entry := entry_of(path, fields)) is not None:
                    return entry
                self._damaged.add(row)
                self._ignored.add(path)
                self._say(f"the prefix cache's database in {self.root} has a damaged row ({path!s:.80}); it is deleted")
        return None

    def write(self, entry: Entry, content: bytes, now: int) -> int:
        """Write a file and its row; if necessary, remove the least recently used files. Raises OSError. `now`: see
        `next_use`. Returns the bytes written: 0 if the file exists or does not fit."""
        path, room = self.root / entry.path, len(content)
        if room > self.limit or path.is_dir():
            return 0
        with self._transaction() as database:
            around = list(self._around(entry))
            if any(other.covers(entry) for other in around):
                return 0
            self._delete(database, [entry.path, *(other.path for other in around if entry.covers(other))])
            self._make_room(database, room)
            place = entry.path, entry.model, entry.kind, entry.parent, entry.start
            keys = entry.least.tobytes(), entry.more.tobytes()
            row = (*place, *keys, entry.shortest, room, entry.checksum_of(content), now)
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                _write_synced(path, content)
                database.execute(f"INSERT OR REPLACE INTO files VALUES ({', '.join('?' * len(row))})", row)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        self._ignored.discard(entry.path)
        self._reported = False
        return room

    def next_use(self) -> int:
        """Return a number above that of every use so far. It orders uses, whatever the clock says."""
        rows = self._rows("SELECT used FROM files WHERE used BETWEEN 0 AND ? ORDER BY used DESC LIMIT 1", _LAST_USE)
        return rows[0][0] + 1 if rows else 0

    def touch(self, entries: Iterable[Entry], now: int) -> None:
        """Set the last use of files to `now` (`next_use`). Of files with the same number, a text's end goes first."""
        if self._writer is not None:
            with self._transaction() as database:
                paths = [(now, entry.path) for entry in entries]
                database.executemany("UPDATE files SET used = ? WHERE path = ?", paths)

    def drop(self, entry: Entry, damaged: bool) -> None:
        """Stop using a file. If it is `damaged`, delete it; otherwise remove the rows of all files that are gone."""
        self._ignored.add(entry.path)
        try:
            with self._transaction() as database:
                if damaged:
                    self._delete(database, [entry.path])
                else:
                    self._remove_orphans(database)
        except OSError as e:
            self.report(e)

    def close(self) -> None:
        """Close the database; nothing is found afterward."""
        with self._reading, self._writing:
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()
            self._reader = self._writer = None

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._read() as reader:
            return reader.execute(query, values).fetchall() if reader is not None else []
        return []

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection | None]:
        """Hold the reader. If the database cannot be read, it counts as empty; each kind of error is reported once."""
        try:
            with self._reading:
                yield self._reader
        except sqlite3.Error as e:
            kind = getattr(e, "sqlite_errorname", type(e).__name__)
            if kind not in self._unreadable:
                self._unreadable.add(kind)
                self._say(f"the prefix cache's database in {self.root} cannot be read ({e}); it counts as empty")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction, while no other server writes. Raises OSError."""
        try:
            with self._writing:
                path = self.root / NAME
                if self._writer is None or not path.exists() or path.stat().st_ino != self._inode:
                    self._open(path)
                assert self._writer is not None
                self._writer.execute("BEGIN IMMEDIATE")
                with self._writer:
                    damaged = list(self._damaged)
                    self._writer.executemany("DELETE FROM files WHERE rowid = ?", zip(damaged, strict=True))
                    yield self._writer
                self._damaged.difference_update(damaged)
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
            self._writer = _writable(path)
        except (OSError, sqlite3.OperationalError):
            if self._reader is None and path.exists():
                self._reader = _connected(path, "?immutable=1")
            raise
        except sqlite3.DatabaseError as e:
            self._say(f"the database of the prefix cache in {self.root} is damaged ({e}); its files are deleted")
            for file in self.root.glob(f"{NAME}*"):
                file.unlink()
            self._writer = _writable(path)
        with self._reading:
            if self._reader is not None:
                self._reader.close()
            self._reader, self._inode = _connected(path), path.stat().st_ino

    def _make_room(self, database: sqlite3.Connection, nbytes: int) -> None:
        """Remove the least recently used files until `nbytes` more bytes fit. Raises OSError."""
        [(used,)] = database.execute("SELECT TOTAL(nbytes) FROM files").fetchall()
        over = int(used) + nbytes - self.limit
        oldest = "SELECT rowid, path, nbytes FROM files ORDER BY used, start DESC LIMIT 1"
        while over > 0 and (row := database.execute(oldest).fetchone()) is not None:
            self._unlink(row[1])
            database.execute("DELETE FROM files WHERE rowid = ?", row[:1])
            over -= row[2] if isinstance(row[2], int) else 0

    def _delete(self, database: sqlite3.Connection, paths: Iterable[str]) -> None:
        for path in paths:
            self._unlink(path)
            database.execute("DELETE FROM files WHERE path = ?", (path,))

    def _unlink(self, path: object) -> None:
        if isinstance(path, str) and _PATH.fullmatch(path):
            (self.root / path).unlink(missing_ok=True)

    def _remove_orphans(self, database: sqlite3.Connection) -> None:
        rows = {path for (path,) in database.execute("SELECT path FROM files").fetchall()}
        files = {f"{path.parent.name}/{path.name}" for path in self.root.glob("*/*.safetensors") if path.is_file()}
        for name in files - rows:
            self._unlink(name)
        database.executemany("DELETE FROM files WHERE path = ?", [(path,) for path in rows - files])


def _connected(path: Path, options: str = "") -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}{options}"
    connection = sqlite3.connect(uri, _WAIT_SECONDS, isolation_level=None, check_same_thread=False, uri=True)
    connection.text_factory = lambda text: text.decode(errors="replace")  # an error would end the whole query
    return connection


def _writable(path: Path) -> sqlite3.Connection:
    """Open or create the database. Raises sqlite3.OperationalError if it is not writable, sqlite3.DatabaseError if it
    is damaged or of another version."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # only its owner may read it: it reveals what was written
    connection = _connected(path)
    try:
        [(version,)] = connection.execute("PRAGMA user_version").fetchall()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"version {version}")
        if version:
            [(problem,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _write_synced(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, and sync it to disk. Raises OSError."""
    path.unlink(missing_ok=True)  # a leftover of a killed process
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
