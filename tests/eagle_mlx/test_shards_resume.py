"""Unfinished and damaged shards: valid data is never lost, and invalid data never used."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_mlx import files
from eagle_mlx.errors import OutputError, ShardError
from eagle_mlx.shards import MANIFEST, UNFINISHED, ShardReader, ShardWriter, unfinished_folder
from tests.eagle_mlx.shard_samples import META, sample, write
from tests.full import in_full

MADE_FROM = {"target": "tiny (abc)", "bits": "16"}
COUNT = 4


def writer(folder: Path, made_from: dict[str, str] = MADE_FROM, overwrite: bool = False) -> ShardWriter:
    return ShardWriter(folder, META, made_from, overwrite)


def repair(folder: Path, made_from: dict[str, str]) -> ShardWriter:
    return ShardWriter(folder, META, made_from, resume=True)


def write_some(shards: ShardWriter, stop: int = COUNT, then: type[BaseException] | None = None) -> None:
    for index in range(stop):
        if index not in shards.files:
            shards.write(index, [sample(index + 2, index), sample(3, index + 10)])
    if then is not None:
        raise then


def interrupt(folder: Path, after: int, overwrite: bool = False) -> None:
    with pytest.raises(KeyboardInterrupt), writer(folder, overwrite=overwrite) as shards:
        write_some(shards, after, KeyboardInterrupt)


def fill(shards: ShardWriter, folder: Path, name: str) -> None:
    """Write until the disk is full at this file."""
    (folder / f"{name}{files.PART}").symlink_to("/dev/full")
    write_some(shards)


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    with writer(tmp_path / "whole") as shards:
        write_some(shards)
    return content(tmp_path / "whole")


def test_what_was_written_is_kept_and_gone_on_with(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "s"
    interrupt(folder, 2)
    with writer(folder) as shards:
        assert sorted(shards.files) == [0, 1]
        before = (shards.part / "shard-00001.safetensors").stat().st_mtime_ns
        write_some(shards)
    assert content(folder) == whole
    assert (folder / "shard-00001.safetensors").stat().st_mtime_ns == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "whole"]


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path) -> None:
    interrupt(tmp_path / "s", 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["s", "s.unfinished"])
def test_an_unfinished_capture_is_not_read(tmp_path: Path, place: str) -> None:
    interrupt(tmp_path / "s", COUNT)
    with pytest.raises(ShardError, match=rf"{place} is not finished.*s\.unfinished; run the same `eagle-data` command"):
        ShardReader(tmp_path / place)


def test_the_capture_of_something_else_is_refused(tmp_path: Path) -> None:
    interrupt(tmp_path / "s", 2)
    before = content(unfinished_folder(tmp_path / "s"))
    other = {"target": "tiny (abc)", "bits": "8"}
    with pytest.raises(OutputError, match=r"of something else \(bits: 16 there, 8 now\).*--overwrite"):
        writer(tmp_path / "s", other).__enter__()
    with pytest.raises(OutputError, match="target: tiny .abc. there, not recorded now; bits: 16 there, not recor"):
        write(tmp_path / "s", [3])
    assert content(unfinished_folder(tmp_path / "s")) == before
    with writer(tmp_path / "s", other, overwrite=True) as shards:
        assert shards.files == {}
        write_some(shards, 1)
    assert len(ShardReader(tmp_path / "s").files) == 1


def test_a_command_with_overwrite_goes_on_too(tmp_path: Path) -> None:
    write(tmp_path / "s", [3])
    interrupt(tmp_path / "s", 2, overwrite=True)
    assert len(ShardReader(tmp_path / "s")) == 1
    with writer(tmp_path / "s", overwrite=True) as shards:
        assert sorted(shards.files) == [0, 1]
        write_some(shards)
    assert len(ShardReader(tmp_path / "s").files) == COUNT


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("name", "damage", "kept"),
    [
        ("shard-00001.safetensors", flip, [0, 2]),
        ("shard-00001.safetensors", tear, [0, 2]),
        ("shard-00001.safetensors", Path.unlink, [0, 2]),
    ],
)
def test_what_is_not_whole_is_made_again(
    tmp_path: Path, whole: dict[str, bytes], name: str, damage: Callable[[Path], None], kept: list[int]
) -> None:
    interrupt(tmp_path / "s", 3)
    damage(unfinished_folder(tmp_path / "s") / name)
    with writer(tmp_path / "s") as shards:
        assert sorted(shards.files) == kept
        write_some(shards)
    assert content(tmp_path / "s") == whole


@pytest.mark.parametrize("damage", [flip, tear])
def test_a_damaged_list_of_what_is_whole_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    interrupt(tmp_path / "s", 2)
    damage(unfinished_folder(tmp_path / "s") / UNFINISHED)
    with pytest.raises(OutputError, match=r"unfinished.json is damaged.*remove .*s\.unfinished"):
        writer(tmp_path / "s").__enter__()


def test_somebody_s_files_are_left_alone(tmp_path: Path) -> None:
    part = unfinished_folder(tmp_path / "s")
    part.mkdir()
    (part / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(
            OutputError, match=r"s\.unfinished also contains .*thesis\.txt, which is not part of a capture; move"
        ):
            writer(tmp_path / "s", overwrite=overwrite).__enter__()
    assert content(part) == {"thesis.txt": b"mine"}


def test_a_capture_continues_after_the_finder_has_shown_its_folder(tmp_path: Path, whole: dict[str, bytes]) -> None:
    interrupt(tmp_path / "s", 2)
    (unfinished_folder(tmp_path / "s") / files.FINDER).write_bytes(b"\0\0\0\1Bud1")
    with writer(tmp_path / "s") as shards:
        assert sorted(shards.files) == [0, 1]
        write_some(shards)
    assert content(tmp_path / "s") == whole


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with writer(tmp_path / "s") as shards:
        with pytest.raises(OutputError, match=r"another process is writing to .*s\.unfinished"):
            writer(tmp_path / "s").__enter__()
        write_some(shards)


def test_a_shard_that_was_forgotten_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shard-00000.* was never written"), writer(tmp_path / "s") as shards:
        shards.write(2, [sample(3)])
    assert not (tmp_path / "s").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("name", ["shard-00002.safetensors", MANIFEST])
def test_a_full_disk_keeps_what_was_written(tmp_path: Path, whole: dict[str, bytes], name: str) -> None:
    folder = tmp_path / "s"
    with pytest.raises(OutputError) as refused, writer(folder) as shards:
        fill(shards, shards.part, name)
    count = 2 if name != MANIFEST else COUNT
    assert f"No space left on device; {count} shards are kept in {shards.part}: make room" in str(refused.value)
    assert not folder.exists()
    with writer(folder) as shards:
        assert len(shards.files) == count
        write_some(shards)
    assert content(folder) == whole


def test_a_full_disk_at_any_moment_keeps_what_was_written(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, room = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    refused = 0
    while not (tmp_path / "s").exists():
        room = refused
        with contextlib.suppress(OutputError), writer(tmp_path / "s") as shards:
            write_some(shards)
        refused += 1
    assert refused > COUNT
    assert content(tmp_path / "s") == whole


def killed(run: Callable[[], None], moment: int) -> bool:
    """Run in a forked process that gets SIGKILL at its nth write. Return whether it was killed."""
    child = os.fork()
    if child == 0:
        synced, calls = os.fsync, 0

        def sync(descriptor: int) -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            synced(descriptor)

        os.fsync = sync
        try:
            run()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_at_every_moment(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "s"

    def run() -> None:
        with writer(folder) as shards:
            write_some(shards)

    moment = 1
    while killed(run, moment):
        part = unfinished_folder(folder)
        if (folder / MANIFEST).exists():  # the very last write renames the folder
            assert not part.exists()
        else:
            run()
        assert content(folder) == whole
        for path in folder.iterdir():
            path.unlink()
        moment += in_full(1, 5)
    assert moment > 3 * COUNT


def test_killed_again_and_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder, draw = tmp_path / "s", random.Random(0)

    def run() -> None:
        with writer(folder) as shards:
            write_some(shards)

    kills = 0
    while not folder.exists():
        kills += killed(run, draw.randint(3, 9))
    assert kills > 2
    assert content(folder) == whole


def damaged(tmp_path: Path) -> Path:
    folder = tmp_path / "whole"
    flip(folder / "shard-00001.safetensors")
    (folder / "shard-00003.safetensors").unlink()
    return folder


def test_damaged_shards_of_a_finished_folder_are_written_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = damaged(tmp_path)
    with pytest.raises(ShardError, match=r"shard-00001.*is damaged.*`eagle-data collect`; with --resume"):
        ShardReader(folder).verify()
    inode = (folder / "shard-00002.safetensors").stat().st_ino
    with repair(folder, MADE_FROM) as shards:
        assert sorted(shards.files) == [0, 2]
        with pytest.raises(ShardError, match="whole is not finished"):
            ShardReader(folder)
        with pytest.raises(OutputError, match="another process is writing"):
            repair(folder, MADE_FROM).__enter__()
        write_some(shards)
    assert content(folder) == whole
    assert (folder / "shard-00002.safetensors").stat().st_ino == inode


def test_a_whole_folder_is_left_as_it_is(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "whole"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with repair(folder, MADE_FROM) as shards:
        assert len(shards.files) == COUNT
        assert len(ShardReader(folder).files) == COUNT, "others read it all the time"
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert content(folder) == whole


def test_a_repair_that_was_killed_is_repeated(tmp_path: Path, whole: dict[str, bytes]) -> None:
    def run() -> None:
        with repair(folder, MADE_FROM) as shards:
            write_some(shards)

    folder, moment = damaged(tmp_path), 1
    while killed(run, moment):
        run()
        assert content(folder) == whole
        damaged(tmp_path)
        moment += in_full(1, 5)
    assert moment > 6


def test_a_folder_of_something_else_is_not_repaired(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = damaged(tmp_path)
    with pytest.raises(OutputError, match=r"whole has a capture of something else \(bits: 16 there, 8 now\)"):
        repair(folder, {**MADE_FROM, "bits": "8"}).__enter__()
    assert "shard-00001.safetensors" in content(folder)
