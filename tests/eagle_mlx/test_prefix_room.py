"""The disk tier's limit with several servers, FIFOs and folders with a file's name, and folders that are read-only."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

import eagle_mlx as em
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.engine.disk.room import COUNT, Room, folder_of
from tests.fakes import tiny_target

TEXT = [(7 * i * i + 3 * i) % 90 + 1 for i in range(100)]
GREEDY = em.SamplingParams(max_tokens=4, ignore_eos=True)
MANY = 1 << 30


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_mlx.engine.disk.index.BLOCK", 32)


def engine(folder: Path, heard: list[str], limit: int = MANY) -> em.Engine:
    target = tiny_target()
    made = em.Engine(target, max_batch=2, prefix_cache_bytes=MANY)
    assert made.prefixes is not None
    made.prefixes.disk = DiskTier(folder, limit, target, say=heard.append)
    return made


def disk(of: em.Engine) -> DiskTier:
    assert of.prefixes is not None
    assert of.prefixes.disk is not None
    return of.prefixes.disk


def answered(by: em.Engine, prompt: list[int] = TEXT) -> int:
    """Answer, have the text written, and return how many tokens were reused."""
    row = by.prepare(prompt, GREEDY)
    by.submit(row)
    while row.finish_reason is None:
        by.step()
    assert disk(by).close(60)
    return row.cached_tokens


def blocks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/block-*"))


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in blocks(folder))


def test_19_fifos_and_folders_with_a_blocks_name_are_skipped_and_named_once(tmp_path: Path) -> None:
    heard = list[str]()
    answered(engine(tmp_path, heard))
    first, second, third = blocks(tmp_path)[:3]
    second.unlink()
    os.mkfifo(second)
    third.unlink()
    third.mkdir()
    (third / "mine").touch()
    again = engine(tmp_path, heard)
    assert len(heard) == 1
    assert f"{second.name} and 1 more" in heard[0]
    assert answered(again) == 32
    assert disk(again).bytes_read == first.stat().st_size
    assert (third / "mine").exists()
    assert second.is_file(), "the block is written again, in the FIFO's place"
    assert answered(engine(tmp_path, heard)) == 64
    assert len(heard) == 2


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_19_a_block_that_becomes_a_fifo_or_a_folder_is_passed_over(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    heard = list[str]()
    answered(engine(tmp_path, heard))
    again = engine(tmp_path, heard)
    block = blocks(tmp_path)[1]
    block.unlink()
    make(block)
    assert answered(again) in (0, 32)
    assert len(heard) == disk(again).store.passed_over == 1
    assert "no regular file" in heard[0]


def file_of(root: Path, name: int) -> Path:
    folder = folder_of(root, "model", "0" * 32)
    folder.mkdir(exist_ok=True)
    return folder / f"block-{name:08d}-{name:032x}.safetensors"


def put(room: Room, path: Path, size: int) -> None:
    with room.writing(size, path):
        path.write_bytes(b"x" * size)


def test_19_servers_that_share_a_folder_count_each_others_files_at_once(tmp_path: Path) -> None:
    rooms = [Room(tmp_path, 1000, clock=lambda: 0.0) for _ in range(2)]
    for name in range(20):
        put(rooms[name % 2], file_of(tmp_path, name), 100)
        assert min(100 * (name + 1), 900) <= nbytes(tmp_path) <= 1000


def test_19_a_file_that_both_write_is_counted_once(tmp_path: Path) -> None:
    rooms = [Room(tmp_path, 1000, clock=lambda: 0.0) for _ in range(2)]
    for room in rooms * 3:
        for name in range(10):
            put(room, file_of(tmp_path, name), 100)
    assert len(blocks(tmp_path)) == 10
    assert [room.used for room in rooms] == [1000, 1000]


def test_19_a_write_that_failed_is_not_counted(tmp_path: Path) -> None:
    room = Room(tmp_path, 1000, clock=lambda: 0.0)
    put(room, file_of(tmp_path, 0), 600)
    for _ in range(3):
        with pytest.raises(OSError, match="no space"), room.writing(300, file_of(tmp_path, 1)):
            raise OSError("no space")
    put(room, file_of(tmp_path, 2), 400)
    assert nbytes(tmp_path) == 1000


def test_19_servers_that_write_and_delete_at_the_same_time_keep_the_limit(tmp_path: Path) -> None:
    failed, most = list[BaseException](), list[int]()
    file_of(tmp_path, 0)

    def serve(number: int) -> None:
        room = Room(tmp_path, 3000)
        try:
            for step in range(60):
                path = file_of(tmp_path, (7 * step + number * (step % 3)) % 50)
                with room.writing(100, path):
                    path.write_bytes(b"x" * 100)
                    most.append(sum(each.stat().st_size for each in path.parent.iterdir()))
        except BaseException as e:
            failed.append(e)

    threads = [Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert 2500 < max(most) <= 3000


@pytest.mark.parametrize("damage", ["text", "cut", "fifo", "folder"])
def test_19_without_a_shared_count_each_looks_for_itself(tmp_path: Path, damage: str) -> None:
    room = Room(tmp_path, 1000)
    put(room, file_of(tmp_path, 0), 700)
    count = tmp_path / COUNT
    if damage in ("fifo", "folder"):
        count.unlink()
    {
        "text": lambda: count.write_text("x" * 24),
        "cut": lambda: count.write_text("700"),
        "fifo": lambda: os.mkfifo(count),
        "folder": count.mkdir,
    }[damage]()
    put(room, file_of(tmp_path, 1), 250)
    assert nbytes(tmp_path) == 950
    put(room, file_of(tmp_path, 2), 250)
    assert nbytes(tmp_path) <= 1000


def test_19_two_engines_keep_one_limit(tmp_path: Path) -> None:
    heard = list[str]()
    answered(engine(tmp_path, heard))
    one = nbytes(tmp_path)
    engines = [engine(tmp_path, heard, int(2.5 * one)) for _ in range(2)]
    for number, by in enumerate(engines * 3):
        row = by.prepare([number + 1, *TEXT[1:]], GREEDY)
        by.submit(row)
        while not by.idle:
            by.step()
    for by in engines:
        assert disk(by).close(60)
        assert nbytes(tmp_path) <= 2.5 * one
    assert nbytes(tmp_path) > one
    assert heard == []


def test_19_what_another_server_has_deleted_is_written_again(tmp_path: Path) -> None:
    """One missing block is met; those after it are missing too."""
    heard = list[str]()
    answered(engine(tmp_path, heard))
    before = [path.name for path in blocks(tmp_path)]
    again = engine(tmp_path, heard)
    for path in blocks(tmp_path)[1:]:
        path.unlink()
    assert answered(again) == 32
    assert [path.name for path in blocks(tmp_path)] == before
    assert heard == []


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], Path]]:
    """Makes a copy of a folder that this process may read and not write, even if it is root's."""
    root, user = Path(tempfile.mkdtemp()), os.geteuid()
    root.chmod(0o755)

    def copied(folder: Path) -> Path:
        copy = shutil.copytree(folder, root / "cache")
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        if user == 0:
            os.seteuid(65534)
        return copy

    yield copied
    if os.geteuid() != user:
        os.seteuid(user)
    for path in (root / "cache", *(root / "cache").rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(root)


def test_19_a_read_only_folder_over_its_limit_is_reported_once_and_read(
    tmp_path: Path, read_only: Callable[[Path], Path]
) -> None:
    heard = list[str]()
    answered(engine(tmp_path, heard))
    before, limit = len(blocks(tmp_path)), nbytes(tmp_path) // 2
    folder = read_only(tmp_path)
    again = engine(folder, heard, limit)
    [said] = heard
    assert f"the files of the prefix cache in {folder} take 0.1 MB, more than the limit of" in said
    assert "cannot be deleted (Permission denied)" in said
    assert answered(again, [*TEXT, 5, 6, 7]) >= 96
    assert heard == [said]
    assert len(blocks(folder)) == before


def test_19_a_read_only_folder_within_its_limit_is_reported_once_when_something_is_to_be_written(
    tmp_path: Path, read_only: Callable[[Path], Path]
) -> None:
    heard = list[str]()
    answered(engine(tmp_path, heard))
    again = engine(read_only(tmp_path), heard)
    assert answered(again, [*TEXT, 5, 6, 7]) >= 96
    [said] = heard
    assert "cannot write to" in said
