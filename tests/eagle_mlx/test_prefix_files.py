"""Files of the disk tier: reads equal writes, and pieces are cut into blocks and joined again."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.cache.ragged import KVPiece
from eagle_mlx.engine.disk.snapshot_file import Content, Entry, content_of, cut, decode, joined, piece_from
from eagle_mlx.engine.prefix_tree import PrefixPiece
from eagle_mlx.proposers.base import HeadPiece

TYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.int8, mx.bool_]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_file_holds_what_was_written_and_is_a_safetensors_file(tmp_path: Path, dtype: mx.Dtype) -> None:
    x = (mx.random.normal((1, 2, 5, 3)) * 10).astype(dtype)
    content = Content.of({"said": "ä"}, {"x": x, "none": x[:, :, 2:2]})
    about, arrays = decode(content.encode())
    assert about["said"] == "ä"
    assert arrays["x"].dtype == dtype
    assert mx.array_equal(arrays["x"], x)
    assert arrays["none"].shape == (1, 2, 0, 3)
    (tmp_path / "file.safetensors").write_bytes(content.encode())
    assert mx.array_equal(mx.load(str(tmp_path / "file.safetensors"))["x"].view(dtype), x)  # type: ignore[call-overload, index]


def test_a_file_is_decoded_while_another_engine_frees_its_buffers() -> None:
    program = """if True:
        from threading import Thread
        import eagle_mlx
        import mlx.core as mx
        from eagle_mlx.engine.disk.snapshot_file import Content, decode

        content = Content.of({}, {str(at): mx.ones((64, 64)) for at in range(12)}).encode()
        reading = Thread(target=lambda: [decode(content) for _ in range(400)])
        reading.start()
        while reading.is_alive():
            mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
            mx.clear_cache()
    """
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_any_changed_byte_of_a_file_or_its_name_changes_the_checksum() -> None:
    entry = Entry("0" * 32, "state", "1" * 32, 256, 300)
    whole = Content.of({"said": "so"}, {"x": mx.arange(3)}).encode()
    checksums = {entry.checksum(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]) for at in range(len(whole))}
    checksums |= {entry.checksum(whole[:at]) for at in range(len(whole))}
    changes = {"model": "2" + "0" * 31, "kind": "block", "digest": "2" + "1" * 31, "end": 301}
    checksums |= {replace(entry, **{name: value}).checksum(whole) for name, value in changes.items()}  # type: ignore[arg-type]
    assert len(checksums) >= 2 * len(whole)
    assert entry.checksum(whole) not in checksums


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=4),
)
def test_blocks_equal_pieces(lengths: list[int], left_out: list[tuple[int, int]]) -> None:
    """Entries hold their positions; a head's entries skip some."""
    total = sum(lengths)
    gone = {position for start, count in left_out for position in range(start, start + count)}
    there = [position for position in range(total) if position not in gone]

    def entries(positions: list[int]) -> KVPiece:
        x = mx.array(positions, mx.float32).reshape(1, 1, -1, 1)
        return KVPiece([[x, x + 0.5], []])

    marks = bytes(position not in gone for position in range(total))
    whole = content_of(PrefixPiece(entries(list(range(total))), HeadPiece(entries(there), marks)))
    pieces, start = list[PrefixPiece](), 0
    for length in lengths:
        pieces.append(piece_from(*decode(cut(whole, start, start + length).encode())))
        start += length
    for piece, first in zip([joined(pieces), pieces[-1]], [0, total - lengths[-1]], strict=True):
        wanted = list(range(first, total))
        assert isinstance(piece.state, HeadPiece)
        assert piece.target.layers[0][0].reshape(-1).tolist() == wanted
        assert piece.state.entries.layers[0][0].reshape(-1).tolist() == [p for p in wanted if p not in gone]
        assert piece.state.marks == marks[first:]
        assert piece.target.layers[1] == []
