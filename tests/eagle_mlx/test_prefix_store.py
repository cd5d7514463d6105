"""The folder of the disk tier's files: the limit of several servers, leftovers, and the order of removal."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest

from eagle_mlx.engine.disk.store import Store
from tests.disk_tier import nbytes
from tests.forks import Fork

MODEL, OTHER = "0" * 32, "1" * 32


def path_of(number: int, model: str = MODEL, end: int = 128) -> str:
    return f"{model}/block-{end:08d}-{number:032x}.prefix"


def put(store: Store, number: int, size: int, model: str = MODEL) -> int:
    return store.keep((), [(path_of(number, model), lambda: b"x" * size)])


def test_servers_that_share_a_folder_count_each_others_files_at_once(tmp_path: Path) -> None:
    stores = [Store(tmp_path, 1000) for _ in range(2)]
    for number in range(14):
        assert put(stores[number % 2], number, 100, (MODEL, OTHER)[number % 2]) == 100
        assert nbytes(tmp_path) == stores[number % 2].nbytes() == min(100 * (number + 1), 1000)
    assert stores[1].nbytes(MODEL) == stores[1].nbytes(OTHER) == 500
    assert stores[0].size(path_of(0)) is None, "it was not used for longest"
    assert put(stores[0], 20, 1001) == 0, "it would never fit"
    assert nbytes(tmp_path) == 1000


def test_a_file_that_two_servers_write_is_written_once(tmp_path: Path) -> None:
    stores = [Store(tmp_path, 1000) for _ in range(2)]
    assert [put(store, number, 100) for store in stores for number in range(10)] == [100] * 10 + [0] * 10
    assert nbytes(tmp_path) == stores[1].nbytes() == 1000


def test_a_write_that_failed_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1000)
    put(store, 0, 600)

    def fails(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fails)
        for _ in range(3):
            with pytest.raises(OSError, match="no space"):
                put(store, 1, 300)
    assert store.nbytes() == 600
    put(store, 2, 400)
    assert nbytes(tmp_path) == store.nbytes() == 1000


def test_servers_that_write_and_delete_at_the_same_time_keep_the_limit(tmp_path: Path) -> None:
    failed, most = list[BaseException](), list[int]()

    def serve(number: int) -> None:
        try:
            store = Store(tmp_path, 1000)
            for step in range(12):
                put(store, (7 * step + number * (step % 3)) % 20, 100)
                most.append(store.nbytes())
        except BaseException as e:
            failed.append(e)

    threads = [Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert max(most) == nbytes(tmp_path) == 1000


KILLED = """
import os, sys
from pathlib import Path
from eagle_mlx import files
from eagle_mlx.engine.disk.store import Store

store, name = Store(Path(sys.argv[1]), 1000), "0" * 32 + "/block-00000000-" + 31 * "0"
store.keep((), [(name + "0.prefix", lambda: b"x" * 400)])
os.fsync = lambda _: os.kill(os.getpid(), 9)
store.keep((), [(name + "1.prefix", lambda: b"x" * 700)])
"""


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """It had deleted a file to make space, and not finished another one."""
    assert Fork("-c", KILLED, str(tmp_path)).wait(60) == -9
    (tmp_path / MODEL / "notes.txt").touch()
    assert len(list((tmp_path / MODEL).iterdir())) == 2
    store = Store(tmp_path, 1000)
    assert store.keep((), ()) == nbytes(tmp_path) == store.nbytes() == 0
    assert [path.name for path in (tmp_path / MODEL).iterdir()] == ["notes.txt"]
    assert put(store, 0, 400) == 400


def test_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    put(Store(tmp_path / "cache", 1000), 0, 100)
    modes = {path.name: path.stat().st_mode & 0o77 for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*"))}
    assert len(modes) == 3
    assert not any(modes.values()), modes


def test_uses_are_in_order_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1 << 60, 0, -(1 << 40)))
    monkeypatch.setattr("time.time_ns", lambda: next(clock))
    for number in range(12):  # 12 servers, one after the other
        store = Store(tmp_path, 1000)
        assert store.keep([path_of(0)], [(path_of(number), lambda: b"x" * 200)]) == 200
    assert sorted(path.name for path in tmp_path.glob("*/*")) == sorted(
        Path(path_of(number)).name for number in (0, 8, 9, 10, 11)
    )


def test_the_first_positions_of_a_text_stay_longest(tmp_path: Path) -> None:
    paths = [path_of(1, end=end) for end in (128, 256, 384)]
    Store(tmp_path, 1000).keep((), [(path, lambda: b"x" * 300) for path in paths])
    for left in (2, 1, 0):
        store = Store(tmp_path, 300 * left)
        store.keep((), ())
        assert [path for path in paths if store.size(path) is not None] == paths[:left]


def test_a_file_that_was_dropped_is_not_found_until_it_is_written_again(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    for number in (0, 1):
        put(store, number, 100)
    store.drop(path_of(0), damaged=True)
    store.drop(path_of(1), damaged=False)
    assert [store.size(path_of(number)) for number in (0, 1)] == [None, None]
    assert nbytes(tmp_path) == 100
    for number in (0, 1):
        assert put(store, number, 50) == store.size(path_of(number)) == 50


def test_states_are_told_by_their_ends_alone(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    assert store.states(MODEL) == set()
    paths = [path_of(number, end=end).replace("block", "state") for number, end in enumerate((5, 300, 300))]
    store.keep((), [(path, lambda: b"x") for path in (*paths, path_of(9, end=7))])
    (tmp_path / MODEL / "state-of-mine").touch()
    assert store.states(MODEL) == {5, 300}
