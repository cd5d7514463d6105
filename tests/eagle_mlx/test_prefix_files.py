"""Files of the disk tier, and pieces cut into blocks: what is read is what was written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.cache.pieces import KVPiece
from eagle_mlx.engine.disk.file import DamagedError, Tensor, on_host, read, read_header, write
from eagle_mlx.engine.disk.index import Index
from eagle_mlx.engine.disk.pieces import HostPiece
from eagle_mlx.engine.disk.room import Room, folder_of
from eagle_mlx.engine.disk.store import files_of
from eagle_mlx.engine.prefix_piece import PrefixPiece, keys_of, tokens_of
from eagle_mlx.engine.prefix_tree import common
from eagle_mlx.proposers.head_piece import Gap, HeadPiece

TYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.int8, mx.bool_]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_file_holds_what_was_written_and_mlx_reads_it_too(tmp_path: Path, dtype: mx.Dtype) -> None:
    x = (mx.random.normal((1, 2, 5, 3)) * 10).astype(dtype)
    mx.eval(x)
    path = tmp_path / "file.safetensors"
    [tensor] = on_host([x])
    nbytes = write(path, {"said": "ä"}, {"x": tensor, "none": tensor.cut(2, 2)})
    assert nbytes == path.stat().st_size == read_header(path).nbytes
    about, tensors = read(path)
    assert about["said"] == "ä"
    assert mx.array_equal(tensors["x"].on_device(), x)
    assert tensors["none"].data.shape == (1, 2, 0, 3)
    arrays, metadata = mx.load(str(path), return_metadata=True)
    assert metadata["said"] == "ä"
    assert mx.array_equal(arrays["x"], x)
    assert [each.name for each in tmp_path.iterdir()] == ["file.safetensors"]


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write(path, {"said": "so"}, {"x": Tensor("F32", np.arange(3, dtype=np.float32))})
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedError):
            read(path)
        path.write_bytes(whole[:at])
        with pytest.raises(DamagedError):
            read_header(path)


def test_what_a_dead_writer_has_left_is_cleared_away_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "some/model", "0" * 32)
    assert folder.name == f"model-{'0' * 32}"
    folder.mkdir()
    for name, age in ((".old.part", 7200), (".new.part", 0), ("notes.txt", 7200)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age,) * 2)
    assert Room(tmp_path, 1000).make(1) == []
    assert sorted(path.name for path in folder.iterdir()) == [".new.part", "notes.txt"]
    assert folder_of(tmp_path, "other name", "0" * 32) == folder


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=4),
    st.tuples(st.integers(0, 48), st.integers(0, 48)),
)
def test_blocks_are_what_pieces_would_be(
    lengths: list[int], left_out: list[tuple[int, int]], span: tuple[int, int]
) -> None:
    """Entries tell their positions; a head's leave some out."""
    total = sum(lengths)
    gone = {position for start, count in left_out for position in range(start, start + count)}

    def entries(positions: list[int]) -> KVPiece:
        x = mx.array(positions, mx.float32).reshape(1, 1, -1, 1)
        return KVPiece([[x, x + 0.5], []])

    pieces, start = list[HostPiece](), 0
    for length in lengths:
        own = range(start, start + length)
        there = [position for position in own if position not in gone]
        gaps = [Gap(sum(p < position for p in there), 1) for position in own if position in gone]
        state = HeadPiece(entries(there), gaps, length)
        pieces.append(HostPiece.of(start, start + length, PrefixPiece(entries(list(own)), state)))
        start += length
    first, last = sorted(min(each, total) for each in span)
    if first == last:
        return
    cut = HostPiece.cut(pieces, first, last)
    back = HostPiece.read(json.loads(json.dumps(cut.about)), cut.tensors).on_device()
    assert isinstance(back.state, HeadPiece)
    wanted = list(range(first, last))
    assert back.target.layers[0][0].reshape(-1).tolist() == wanted
    assert back.state.entries.layers[0][0].reshape(-1).tolist() == [p for p in wanted if p not in gone]
    assert back.state.slots == sum(p not in gone for p in wanted)
    assert back.state.length == last - first
    assert back.target.layers[1] == []


TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=16), max_size=6)


@given(TEXTS, st.lists(st.integers(0, 1), min_size=2, max_size=18), st.sampled_from(["positions", "windows", "states"]))
def test_the_longest_beginning_is_found(texts: list[list[int]], prompt: list[int], kind: str) -> None:
    """Of what can be cut anywhere, at its end alone, or up to a token before it within the last block."""
    keys, found = keys_of(prompt), Index(kind == "positions")
    wanted = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("eagle_mlx.engine.disk.index.BLOCK", 4)
        for text in texts:
            own = keys_of(text)
            shortest = {"positions": 0, "windows": max(len(own) - 1, (len(own) - 1) // 4 * 4), "states": len(own)}[kind]
            for entry in files_of(own, kind == "positions", shortest):
                if entry.name not in found and (entry.kind == "place" or not found.covers(entry.parent, entry.keys)):
                    found.add(entry)
            shared = common(own, keys)
            wanted = max(wanted, shared if shared >= shortest else 0)
        match = found.find(keys)
        length = match.length if match is not None else 0
        assert length >= wanted if kind == "windows" else length == wanted
        if match is not None:
            held = [key for block in match.blocks for key in block.keys.tolist()]
            assert held[:length] == keys.tolist()[:length]
            assert match.place is None or match.place.shortest <= length <= match.place.end


@given(st.lists(st.integers(0, (1 << 31) - 1), min_size=2, max_size=20))
def test_tokens_and_keys_are_the_same_thing(tokens: list[int]) -> None:
    assert tokens_of(keys_of(tokens)) == tokens
