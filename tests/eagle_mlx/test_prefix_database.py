"""The disk tier's database: the limit of several servers, damage, leftovers of a killed process, and lookups."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.engine.disk.database import NAME, Database
from eagle_mlx.engine.disk.snapshot_file import Entry, entries_of
from eagle_mlx.engine.prefix_tree import common, keys_of
from tests.disk_tier import nbytes, said_of
from tests.forks import Fork
from tests.full import in_full

MODEL, OTHER = "0" * 32, "1" * 32


def opened(root: Path, say: Callable[[str], None] | None = None, limit: int = 1000) -> Database:
    return Database(root, limit, say or said_of(()))


def entry(number: int, model: str = MODEL) -> Entry:
    return Entry(model, "block", MODEL, 0, np.array([number, number], np.int64))


def put(database: Database, number: int, size: int, model: str = MODEL) -> int:
    return database.write(entry(number, model), b"x" * size, number)


def test_servers_that_share_a_folder_count_each_others_files_at_once(tmp_path: Path) -> None:
    databases = [opened(tmp_path) for _ in range(2)]
    for number in range(14):
        assert put(databases[number % 2], number, 100, (MODEL, OTHER)[number % 2]) == 100
        assert nbytes(tmp_path) == databases[0].nbytes() == databases[1].nbytes() == min(100 * (number + 1), 1000)
    assert databases[0].nbytes(MODEL) == databases[0].nbytes(OTHER) == 500
    assert not (tmp_path / entry(0).path).exists(), "it was not used for longest"
    assert put(databases[0], 20, 1001) == 0, "it would never fit"


def test_a_file_that_two_servers_write_is_counted_once(tmp_path: Path) -> None:
    databases = [opened(tmp_path) for _ in range(2)]
    found = [put(database, number, 100) for database in databases for number in range(10)]
    assert found == [100] * 10 + [0] * 10
    assert [database.nbytes() for database in databases] == [1000, 1000]


def test_a_write_that_failed_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = opened(tmp_path)
    put(database, 0, 600)

    def fails(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fails)
        for _ in range(3):
            with pytest.raises(OSError, match="no space"):
                put(database, 1, 300)
    put(database, 2, 400)
    assert nbytes(tmp_path) == database.nbytes() == 1000


def test_servers_that_write_and_delete_at_the_same_time_keep_the_limit(tmp_path: Path) -> None:
    failed, most = list[BaseException](), list[int]()

    def serve(number: int) -> None:
        try:
            database = opened(tmp_path)
            for step in range(12):
                put(database, (7 * step + number * (step % 3)) % 20, 100)
                most.append(nbytes(tmp_path))
        except BaseException as e:
            failed.append(e)

    threads = [Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert max(most) == 1000


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from eagle_mlx.engine.disk import database

here = database.Database(Path(sys.argv[1]), 1000, print)
one, other = (database.Entry("0" * 32, "block", "0" * 32, 0, np.array([i, i], np.int64)) for i in range(2))
here.write(one, b"x" * 400, 0)
database.sync_folder = lambda folder: os.kill(os.getpid(), 9)
here.write(other, b"x" * 700, 1)
"""


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """It had deleted a file to make space, and written another one that has no row yet."""
    assert Fork("-c", KILLED, str(tmp_path)).wait(60) == -9
    assert [path.stat().st_size for path in tmp_path.glob("*/*.safetensors")] == [700]
    (tmp_path / MODEL / "notes.txt").touch()
    database = opened(tmp_path)
    assert nbytes(tmp_path) == database.nbytes() == 0
    assert [path.name for path in (tmp_path / MODEL).iterdir()] == ["notes.txt"]
    assert put(database, 0, 400) == 400


@pytest.mark.parametrize("damage", ["text", "cut", "version", "middle", "deleted"])
def test_a_damaged_database_starts_over_with_its_files(tmp_path: Path, damage: str) -> None:
    database, path, heard = opened(tmp_path), tmp_path / NAME, list[str]()
    for number in range(9):
        put(database, number, 100)
    database.close()
    content = path.read_bytes()
    if damage == "version":
        sqlite3.connect(path).execute("PRAGMA user_version = 77").connection.close()
    elif damage == "deleted":
        path.unlink()
    else:
        middle = content[:2000] + b"\xff" * 20000 + content[22000:]
        path.write_bytes({"text": b"nonsense" * 999, "cut": content[:5000], "middle": middle}[damage])
    again = opened(tmp_path, say=said_of(["is damaged"], heard))
    assert len(heard) == (damage != "deleted")
    assert nbytes(tmp_path) == again.nbytes() == 0
    assert put(again, 1, 100) == again.nbytes() == 100


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_without_a_database_nothing_is_written_and_one_message_says_so(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / NAME)
    heard = list[str]()
    database = opened(tmp_path, say=said_of(["is not a regular file; delete it"], heard))
    with pytest.raises(OSError, match="not a regular file"):
        put(database, 0, 100)
    assert (database.nbytes(), len(heard)) == (0, 1)


def test_the_database_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It contains the tokens of prompts."""
    put(opened(tmp_path / "cache"), 0, 100)
    modes = {path.name: path.stat().st_mode & 0o77 for path in (tmp_path / "cache").rglob("*")}
    assert len(modes) >= 3
    assert not any(modes.values()), modes


TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=16), max_size=6)


@settings(max_examples=in_full(100, 15))
@given(TEXTS, st.lists(st.integers(0, 1), min_size=2, max_size=18), st.sampled_from(["positions", "windows", "states"]))
def test_the_longest_prefix_is_found(texts: list[list[int]], prompt: list[int], kind: str) -> None:
    """Among snapshots that can be cut anywhere, only at their end, or up to a token before it in the last block."""
    keys, wanted, positional = keys_of(prompt), 0, kind == "positions"
    with pytest.MonkeyPatch.context() as patched, TemporaryDirectory() as name:
        patched.setattr("eagle_mlx.engine.disk.snapshot_file.BLOCK", 4)
        patched.setattr("os.fsync", lambda _: None)
        found = opened(Path(name))
        for text in texts:
            own = keys_of(text)
            shortest = {"positions": 0, "windows": max(len(own) - 1, (len(own) - 1) // 4 * 4), "states": len(own)}[kind]
            for each in found.lacks(entries_of(own, MODEL, "", None if positional else shortest))[0]:
                found.write(each, b"x", 0)
            shared = common(own, keys)
            wanted = max(wanted, shared if shared >= shortest else 0)
        match = found.find(keys, MODEL, "", positional)
        assert found.find(keys, OTHER, "", positional) is found.find(keys, MODEL, "their", positional) is None
        length = match.length if match is not None else 0
        assert length >= wanted if kind == "windows" else length == wanted
        if match is not None:
            held = [key for block in match.blocks for key in block.keys.tolist()]
            assert held[:length] == keys.tolist()[:length]
            assert match.state is None or match.state.shortest <= length <= match.state.end
        found.close()


@pytest.mark.parametrize("kind", ["positions", "windows", "states"])
def test_a_lookup_reads_as_many_rows_however_many_texts_begin_the_same(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do the lookup before a write, and the choice of what to remove."""
    rows = 0

    def counted(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal rows
        rows += 1
        return row

    connect = sqlite3.connect

    def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        connection.row_factory = counted
        return connection

    monkeypatch.setattr("sqlite3.connect", connected)
    monkeypatch.setattr("os.fsync", lambda _: None)
    database, system, reads = opened(tmp_path, limit=1 << 30), [*range(300)], list[int]()
    for number in range(200):
        keys = keys_of([*system, *(1000 + (number * place * 7919) % 991 for place in range(1, 40))])
        shortest = {"positions": None, "windows": len(keys) - 20, "states": len(keys)}[kind]
        rows = 0
        for missing in database.lacks(entries_of(keys, MODEL, "", shortest))[0]:
            database.write(missing, b"x", database.next_use())
        match = database.find(keys, MODEL, "", kind == "positions")
        assert match is not None
        assert match.length == len(keys)
        database.find(keys[:310], MODEL, "", kind == "positions")
        reads.append(rows)
    assert max(reads) <= 30
    database.close()


def test_uses_are_numbered_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1 << 60, 0, -(1 << 40)))
    monkeypatch.setattr("time.time_ns", lambda: next(clock))
    for number in range(12):  # 12 servers, one after the other
        database = opened(tmp_path)
        now = database.next_use()
        database.touch([entry(0)], now)
        assert database.write(entry(number), b"x" * 200, now) == 200
        database.close()
    assert sorted(path.name for path in tmp_path.glob("*/*.safetensors")) == sorted(
        Path(entry(number).path).name for number in (0, 8, 9, 10, 11)
    )


DAMAGE = {
    "path": ["''", "7", "X'00ff'", "CAST(X'ff' AS TEXT)", "'../../../etc/passwd'"],
    "model": ["''", "X'00'"],
    "start": ["'many'", "-3", "1.5", "1 << 40"],
    "more": ["'text'", "X'010203'", "X'0102030405060708'", "5"],
    "least": ["'text'", "X'0102030405060708'"],
    "shortest": ["'x'", "-1", "1 << 40"],
    "nbytes": ["'x'", "-1", "2.5", "X'00'"],
    "checksum": ["'x'", "X'00'"],
    "used": ["'x'", "9223372036854775807", "X'00'"],
}


@pytest.mark.parametrize(("column", "value"), [(column, value) for column, all in DAMAGE.items() for value in all])
def test_a_damaged_row_is_dropped_and_the_rest_is_found(tmp_path: Path, column: str, value: str) -> None:
    heard, found = list[str](), opened(tmp_path)
    texts = [keys_of([1, 2, 3, 4, 5, *range(10 + number, 40)]) for number in range(3)]
    for text in texts:
        for file in found.lacks(entries_of(text, MODEL))[0]:
            found.write(file, b"x" * 300, found.next_use())
    found.close()
    with closing(sqlite3.connect(tmp_path / NAME)) as damaged, damaged:
        damaged.execute(f"UPDATE files SET {column} = {value} WHERE path = ?", (entries_of(texts[1], MODEL)[0].path,))
    found = opened(tmp_path, say=heard.append)
    for _ in range(2):
        for text in texts:
            match = found.find(text, MODEL, "", True)
            assert match is not None
            assert match.length >= 4
        for text in texts:
            found.touch([], found.next_use())
            for file in found.lacks(entries_of(text, MODEL))[0]:
                found.write(file, b"x" * 300, found.next_use())
        assert nbytes(tmp_path) <= 1000
    assert sum("has a damaged row" in text for text in heard) == len(heard) <= 1
    assert [found.find(text, MODEL, "", True).length for text in texts] == [len(text) for text in texts]  # type: ignore[union-attr]
    found.close()
    assert not said_rows(tmp_path)


def test_each_kind_of_reading_error_is_reported_once(tmp_path: Path) -> None:
    heard, text = list[str](), keys_of(range(40))
    opened(tmp_path).close()
    found = opened(tmp_path, say=heard.append)
    with closing(sqlite3.connect(tmp_path / NAME)) as other:
        other.executescript("DROP TABLE files")
    for _ in range(3):
        assert found.find(text, MODEL, "", True) is None
        assert found.nbytes() == 0
    assert [said for said in heard if "cannot be read (no such table: files); it counts as empty" in said] == heard
    assert len(heard) == 1
    found.close()


def said_rows(root: Path) -> list[str]:
    """Return the paths of rows that do not name a file."""
    with closing(sqlite3.connect(root / NAME)) as database:
        rows = database.execute("SELECT path FROM files").fetchall()
    return [path for (path,) in rows if not (root / str(path)).is_file()]
