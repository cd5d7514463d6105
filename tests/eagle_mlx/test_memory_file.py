"""A memory's file: a new engine remembers what earlier ones knew; files that cannot be trusted are not used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.proposers.memory import fitted
from eagle_mlx.proposers.memory_file import MemoryFile
from eagle_mlx.proposers.suffixes import REACH, TOKEN_BYTES, last_of
from tests.disk_tier import said_of
from tests.fakes import tiny_target
from tests.full import in_full

TARGET = tiny_target(tokenizer=True)
RNG = np.random.default_rng(0)
NOTHING = said_of(())
TEXTS = RNG.integers(0, 4000, (40, 60)).tolist()


def opened(folder: Path, nbytes: int = 1 << 20, say: Callable[[str], None] = NOTHING) -> tuple[em.Memory, MemoryFile]:
    memory = em.Memory(nbytes)
    return memory, MemoryFile(folder, memory, TARGET, say)


def write(folder: Path, texts: list[list[int]] = TEXTS, namespace: str | None = "") -> Path:
    memory, file = opened(folder)
    for text in texts:
        memory.add(text, namespace)
    assert file.close(30)
    return file.path


def remembered(folder: Path, namespace: str = "", nbytes: int = 1 << 20) -> list[bool]:
    """Return which texts a new engine remembers."""
    memory, file = opened(folder, nbytes)
    file.close(30)
    return [any(kept.longest(last_of(text)) == REACH for kept in memory.of(namespace)) for text in TEXTS]


def test_a_new_memory_has_the_texts_of_the_earlier_one_for_their_namespaces(tmp_path: Path) -> None:
    write(tmp_path, TEXTS[:20], "key and secret")
    path = write(tmp_path, TEXTS[20:], "another")
    assert remembered(tmp_path, "key and secret") == [True] * 20 + [False] * 20
    assert remembered(tmp_path, "another") == [False] * 20 + [True] * 20
    assert not any(remembered(tmp_path, "a third"))
    assert b"secret" not in path.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_texts_that_are_read_at_every_start_are_not_written(tmp_path: Path) -> None:
    assert not write(tmp_path, namespace=None).exists()


def test_servers_that_share_a_folder_keep_the_texts_of_each_other(tmp_path: Path) -> None:
    (first, first_file), (second, second_file) = opened(tmp_path), opened(tmp_path)
    for text in TEXTS[:20]:
        first.add(text)
    for text in TEXTS[20:]:
        second.add(text)
    first_file.save()
    second_file.save()
    first.add([1, 2, 3])
    assert first_file.close(30)
    size = first_file.path.stat().st_size
    assert second_file.close(30)
    assert all(remembered(tmp_path))
    write(tmp_path, [[4, 5, 6]])
    assert first_file.path.stat().st_size <= size + 100  # no text is there twice


@pytest.mark.parametrize(("room", "kept"), [(11, [9, 2]), (10, [6, 2]), (7, [2, 2]), (3, [2]), (0, [])])
def test_as_many_of_the_newest_texts_stay_as_fit(room: int, kept: list[int]) -> None:
    """The namespace with the most loses first."""
    texts = {"own": np.array([5, 6, 0, 7, 8, 9, 0, 3, 0], np.uint32), "others": np.array([4, 0], np.uint32)}
    left = fitted(texts, TOKEN_BYTES * room)
    assert sorted(map(len, left.values()), reverse=True) == kept
    assert all(tokens.tolist() == texts[name][-len(tokens) :].tolist() for name, tokens in left.items())


def test_restored_texts_fit_beside_those_for_every_namespace() -> None:
    memory = em.Memory(TOKEN_BYTES * 20)
    memory.add(list(range(11)), namespace=None)
    memory.restore({"own": np.array([5, 6, 0, 7, 8, 9, 0] * 3, np.uint32)})
    assert memory.texts()["own"].size
    assert memory.nbytes <= memory.limit


def test_the_newest_texts_fit_a_smaller_memory(tmp_path: Path) -> None:
    write(tmp_path, TEXTS[:2], "quiet")
    write(tmp_path, TEXTS)
    kept = remembered(tmp_path, nbytes=12_000)
    assert kept == sorted(kept)
    assert sum(kept) in range(15, 24)
    assert sum(remembered(tmp_path, "quiet", nbytes=12_000)) == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def with_identity_of_another(path: Path) -> None:
    np.savez(path, **{**np.load(path), "identity": np.array("0" * 32)})


def leave_out_the_identity(path: Path) -> None:
    np.savez(path, np.zeros(3))


DAMAGE = {
    cut: "File is not a zip file",
    flip: "Bad CRC-32",
    empty: "No data left in file",
    with_identity_of_another: "its tokens are of another tokenizer",
    leave_out_the_identity: "its tokens are of another tokenizer",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_cannot_be_trusted_is_refused_by_name_and_replaced(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = write(tmp_path)
    damage(path)
    lines = list[str]()
    memory, file = opened(tmp_path, say=lines.append)
    assert memory.nbytes == 0
    assert lines[0].startswith(f"{path} is not used, and replaced when there are new texts: ")
    assert DAMAGE[damage] in lines[0]
    memory.add(TEXTS[0])
    file.close(30)
    assert remembered(tmp_path) == [True] + [False] * 39


def test_no_damage_of_any_byte_is_taken_for_texts(tmp_path: Path) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    for at in [*range(0, len(content), in_full(97, 389)), *range(len(content) - 200, len(content), in_full(1, 3))]:
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1 :])
        memory, file = opened(tmp_path, say=lambda _: None)
        file.close(30)
        assert sum(len(kept.tokens) for kept in memory.of("")) in (0, 40 * 61)


def test_a_memory_goes_on_without_a_file_that_cannot_be_written_and_says_so_once(tmp_path: Path) -> None:
    path = write(tmp_path)
    make_folder(path)
    lines = list[str]()
    memory, file = opened(tmp_path, say=lines.append)
    for text in TEXTS[:3]:
        memory.add(text)
        file.save()
    assert [line for line in lines if "cannot be written" in line] == lines[2:3]
    path.rmdir()
    file.close(30)
    assert sum(remembered(tmp_path)) == 3


def test_a_write_that_was_killed_leaves_the_last_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.with_name(f"{path.name}.part").write_bytes(path.read_bytes()[:1000])
    assert all(remembered(tmp_path))
    write(tmp_path, [[1, 2, 3]])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
