"""Shards: what is written is read, and no damage goes unnoticed."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.errors import OutputError, ShardError
from eagle_mlx.shards import MANIFEST, Sample, ShardMeta, ShardReader, ShardWriter, bytes_per_token

META = ShardMeta("tiny", hidden_size=4, vocab_size=50, aux_layers=(1, 3))


def sample(length: int, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    return Sample(
        rng.integers(0, 50, length).astype(np.int32),
        rng.integers(0, 2, length).astype(np.uint8),
        rng.normal(size=(length, 8)).astype(np.float16),
        rng.normal(size=(length, 4)).astype(np.float16),
    )


def same(a: Sample, b: Sample) -> bool:
    pairs = ((a.tokens, b.tokens), (a.loss_mask, b.loss_mask), (a.aux, b.aux), (a.last, b.last))
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def write(folder: Path, lengths: list[int], tokens_per_shard: int = 20) -> list[Sample]:
    samples = [sample(length, seed) for seed, length in enumerate(lengths)]
    with ShardWriter(folder, META, tokens_per_shard) as writer:
        for s in samples:
            writer.add(s)
    return samples


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write(tmp_path / "s", [5, 17, 9, 30])
    return tmp_path / "s"


@settings(max_examples=20, deadline=None)
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
    with pytest.raises(ShardError, match=r"shard-00000.safetensors is cut short: [\d,]+ bytes in place of"):
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
    with ShardWriter(shards, META, overwrite=True) as writer:
        writer.add(sample(3))
    assert len(ShardReader(shards)) == 1


@pytest.mark.parametrize("failing", ["shard-00001.safetensors", MANIFEST])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    whole = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == failing:
            whole(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match=r"s could not be written: No space left on device"):
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


def test_an_error_in_the_block_leaves_nothing_and_comes_through(tmp_path: Path) -> None:
    def fail(writer: ShardWriter) -> None:
        writer.add(sample(3))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ShardWriter(tmp_path / "s", META, 2) as writer:
        fail(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_sample_of_another_shape_is_refused(tmp_path: Path) -> None:
    wrong = sample(3)
    with pytest.raises(ValueError, match="a sample of 3 tokens"), ShardWriter(tmp_path / "s", META) as writer:
        writer.add(Sample(wrong.tokens, wrong.loss_mask, wrong.last, wrong.last))
    with pytest.raises(ValueError, match="a sample of 0 tokens"), ShardWriter(tmp_path / "s", META) as writer:
        writer.add(sample(0))


def test_a_moved_folder_still_reads(shards: Path, tmp_path: Path) -> None:
    shutil.move(shards, tmp_path / "elsewhere")
    ShardReader(tmp_path / "elsewhere").verify()
