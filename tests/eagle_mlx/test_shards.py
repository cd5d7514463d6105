"""Shards: reads equal writes, and all damage is noticed."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.errors import ConfigError, OutputError, ShardError
from eagle_mlx.hidden_states import HiddenStates, block_size, dequantize, quantize, rounded, widened
from eagle_mlx.shards import MANIFEST, ShardMeta, ShardReader, bytes_per_token
from tests.eagle_mlx.shard_samples import META, same, sample, write, write_all
from tests.full import some


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write(tmp_path / "s", [5, 17, 9, 30])
    return tmp_path / "s"


@settings(max_examples=some(20), deadline=None)
@given(st.lists(st.integers(1, 30), max_size=8), st.integers(1, 60))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], tokens_per_shard: int
) -> None:
    folder = tmp_path_factory.mktemp("shards") / "s"
    samples = write(folder, lengths, tokens_per_shard)
    reader = ShardReader(folder)
    reader.verify()
    assert reader.meta == META
    assert (len(reader), reader.tokens) == (len(lengths), sum(lengths))
    assert reader.loss_tokens == sum(int(s.loss_mask.sum()) for s in samples)
    assert all(same(a, b) for a, b in zip(reader, samples, strict=True))
    for index in reversed(range(-len(samples), len(samples))):
        assert same(reader[index], samples[index])
    with pytest.raises(IndexError):
        reader[len(samples)]


def states(rows: int, layers: int, hidden: int, seed: int, spread: float) -> np.ndarray:
    """Return values of all magnitudes, with zeros and a few outliers."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, layers * hidden)) * 10 ** rng.uniform(-spread, spread, (rows, layers * hidden))
    values[rng.random(values.shape) < 0.1] = 0
    return rounded(values.astype(np.float32))


@settings(max_examples=some(100))
@given(st.integers(0, 6), st.integers(0, 3), st.integers(1, 200), st.integers(0, 999), st.floats(0, 6))
def test_eight_bits_are_off_by_half_a_step_at_most(
    rows: int, layers: int, hidden: int, seed: int, spread: float
) -> None:
    exact = states(rows, layers, hidden, seed, spread)
    integers, scales = quantize(exact, hidden)
    size = block_size(hidden)
    assert (integers.dtype, integers.shape) == (np.int8, exact.shape)
    assert (scales.dtype, scales.shape) == (np.uint16, (rows, layers * hidden // size))
    back = dequantize(integers, scales, hidden)
    assert (back.dtype, back.shape) == (np.uint16, exact.shape)
    assert np.isfinite(widened(back)).all()
    for layer in range(layers):
        for start in range(0, hidden, size):
            at = slice(layer * hidden + start, layer * hidden + start + size)
            block, restored = (widened(x)[:, at].astype(np.float64) for x in (exact, back))
            largest = np.abs(block).max(1, keepdims=True)
            step = largest / 127 * (1 + 2**-7)
            assert (np.abs(restored - block) <= step / 2 + np.abs(block) * 2**-7).all()
            assert (restored[(block == 0)] == 0).all()


def test_eight_bits_of_the_largest_values_stay_finite() -> None:
    exact = rounded(np.full((1, 64), 1e38, np.float32))
    exact[0, ::2] |= 0x8000
    np.testing.assert_allclose(widened(dequantize(*quantize(exact, 64), 64)), widened(exact), rtol=2**-7)


def test_an_outlier_costs_its_own_block_alone() -> None:
    exact = states(1, 1, 128, 0, 0)
    loud = exact.copy()
    loud[0, 3] = rounded(np.float32([3e6]))[0]
    calm, shaken = (dequantize(*quantize(x, 128), 128)[0, 64:] for x in (exact, loud))
    assert np.array_equal(calm, shaken)


@pytest.mark.parametrize("hidden", [4, 64, 100])
def test_eight_bits_come_back_as_bfloat16_from_smaller_files(tmp_path: Path, hidden: int) -> None:
    meta = ShardMeta("tiny", hidden, 50, (1, 3), bits=8)
    samples = [
        replace(sample(n), states=HiddenStates((1, 3), states(n, 2, hidden, n, 1), states(n, 1, hidden, n, 1)))
        for n in (5, 17, 9, 30)
    ]
    write_all(tmp_path / "s", samples, meta, 20)
    reader = ShardReader(tmp_path / "s")
    assert reader.meta.bits == 8
    for stored, original in zip(reader, samples, strict=True):
        aux, last = (dequantize(*quantize(x, hidden), hidden) for x in (original.states.features, original.states.last))
        assert same(stored, replace(original, states=HiddenStates((1, 3), aux, last)))
    payload = bytes_per_token(meta) * reader.tokens
    assert payload < sum(f.size for f in reader.files) < payload + 2000
    assert (bytes_per_token(meta) < 0.55 * bytes_per_token(replace(meta, bits=16))) == (hidden > 4)


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="16 or 8 bits per value, not 4"):
        ShardMeta("tiny", 4, 50, (1,), bits=4)


def test_shards_are_cut_where_enough_tokens_have_gathered(shards: Path) -> None:
    reader = ShardReader(shards)
    assert [(f.samples, f.tokens) for f in reader.files] == [(2, 22), (2, 39)]
    assert sorted(p.name for p in shards.iterdir()) == [MANIFEST, *(f.name for f in reader.files)]
    payload = bytes_per_token(META) * reader.tokens
    assert payload < sum(f.size for f in reader.files) < payload + 2000


def test_a_flipped_byte_is_found_in_the_shard_that_has_it(shards: Path) -> None:
    second = shards / "shard-00001.safetensors"
    data = bytearray(second.read_bytes())
    data[-7] ^= 1
    second.write_bytes(data)
    reader = ShardReader(shards)
    assert len(reader[0].tokens) == 5
    with pytest.raises(ShardError, match=r"shard-00001.safetensors is damaged.*eagle-data collect"):
        reader[2]
    with pytest.raises(ShardError, match="shard-00001"):
        reader.verify()


def test_a_shard_cut_short_or_missing_is_named(shards: Path) -> None:
    first = shards / "shard-00000.safetensors"
    data = first.read_bytes()
    first.write_bytes(data[:-1])
    with pytest.raises(ShardError, match=r"shard-00000.safetensors is cut short: [\d,]+ bytes instead of"):
        ShardReader(shards)[0]
    first.write_bytes(data + b"x")
    with pytest.raises(ShardError, match="longer than it was"):
        ShardReader(shards)[0]
    first.unlink()
    with pytest.raises(ShardError, match=r"shard-00000.safetensors is missing"):
        ShardReader(shards)[0]


def test_a_damaged_manifest_is_named(shards: Path) -> None:
    path = shards / MANIFEST
    text = path.read_text()
    for damaged in (
        text.replace('"hidden_size": 4', '"hidden_size": 5'),
        text[:-20],
        "[]",
        "",
        text.replace('"meta"', '"mata"'),
    ):
        path.write_text(damaged)
        with pytest.raises(ShardError, match=r"manifest.json is damaged"):
            ShardReader(shards)
    path.write_text(json.dumps({**json.loads(text), "version": 9}))
    with pytest.raises(ShardError, match="version 9"):
        ShardReader(shards)
    path.unlink()
    with pytest.raises(ShardError, match="not a folder of shards"):
        ShardReader(shards)


def test_an_existing_folder_is_kept(shards: Path) -> None:
    before = {p: p.read_bytes() for p in shards.iterdir()}
    with pytest.raises(OutputError, match="exists already"):
        write(shards, [3])
    assert {p: p.read_bytes() for p in shards.iterdir()} == before
    write_all(shards, [sample(3)], META, overwrite=True)
    assert len(ShardReader(shards)) == 1


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replacing = Path.replace

    def full(path: Path, name: Path) -> Path:
        if name.name == "shard-00000.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replacing(path, name)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match=r"s could not be written: No space left on device; nothing was left"):
        write(tmp_path / "s", [5, 17, 9, 30])
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_the_system_refuses_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OutputError, match="could not be written"):
            write(tmp_path / "s", [200])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_moved_folder_still_reads(shards: Path, tmp_path: Path) -> None:
    shutil.move(shards, tmp_path / "elsewhere")
    ShardReader(tmp_path / "elsewhere").verify()
