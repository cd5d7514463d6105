from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.blas import blas_threads, set_blas_threads
from eagle_mlx.errors import ShardError
from eagle_mlx.hidden_states import Example, HiddenStates, rounded, widened
from eagle_mlx.shards import ShardMeta, ShardReader
from eagle_mlx.train.data.batches import MIN_TOKENS, Batches, Rows, batches_of, cut_into_pieces, order_of, pack
from eagle_mlx.train.data.examples import InMemory, OnDisk
from tests.eagle_mlx.shard_samples import write_all
from tests.full import some

H, N = 4, 3


def make_samples(lengths: list[int], seed: int = 0) -> list[Example]:
    """Return samples whose states encode their tokens, so that a mix-up is noticed."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        tokens = rng.integers(1, 200, length).astype(np.int32)
        aux = np.repeat(tokens[:, None], N * H, axis=1).astype(np.float32)
        last = -aux[:, :H]
        samples.append(
            Example(
                tokens,
                rng.integers(0, 2, length).astype(np.uint8),
                HiddenStates(tuple(range(N)), rounded(aux), rounded(last)),
            )
        )
    return samples


def collect(batches: Batches, epoch: int, skip: int = 0) -> list[Rows]:
    with closing(batches.epoch(epoch, skip)) as stream:
        return list(stream)


@settings(max_examples=some(200), deadline=None)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(4, 24), st.integers(0, 9))
def test_packing_uses_every_piece_once_and_fits(lengths: list[int], length: int, seed: int) -> None:
    rows = pack(lengths, order_of(seed, 0, len(lengths)), length)
    counted = Counter((p.sample, p.start, p.stop) for row in rows for p in row)
    wanted = Counter((p.sample, p.start, p.stop) for i, n in enumerate(lengths) for p in cut_into_pieces(i, n, length))
    assert counted == wanted
    assert all(sum(len(piece) for piece in row) <= length for row in rows)
    assert rows == pack(lengths, order_of(seed, 0, len(lengths)), length)


@settings(max_examples=some(200), deadline=None)
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(4, 24), st.integers(0, 9))
def test_no_two_rows_would_fit_into_one(lengths: list[int], length: int, seed: int) -> None:
    fills = sorted(sum(map(len, row)) for row in pack(lengths, order_of(seed, 0, len(lengths)), length))
    assert len(fills) < 2 or fills[0] + fills[1] > length


SAMPLE_LENGTHS = st.one_of(
    st.lists(st.integers(1, 2000), max_size=300),
    st.lists(st.integers(3, 40), max_size=300),
    st.lists(st.integers(510, 1100), max_size=300),
    st.builds(lambda length, count: [length] * count, st.integers(3, 1100), st.integers(1, 300)),
)


@settings(max_examples=some(150), deadline=None)
@given(SAMPLE_LENGTHS, st.integers(1, 8), st.sampled_from([64, 256, 1000]), st.integers(0, 9))
def test_batches_hold_every_piece_and_little_else(lengths: list[int], rows: int, length: int, seed: int) -> None:
    batches = batches_of(lengths, rows, length, seed, epoch=1)
    counted = Counter((p.sample, p.start, p.stop) for batch in batches for row in batch.rows for p in row)
    pieces = (p for i, n in enumerate(lengths) for p in cut_into_pieces(i, n, length))
    assert counted == Counter((p.sample, p.start, p.stop) for p in pieces)
    assert all(len(batch.rows) == rows for batch in batches[:-1])
    assert all(1 <= len(batch.rows) <= rows for batch in batches[-1:])
    for batch in batches:
        fills = [sum(map(len, row)) for row in batch.rows]
        assert max(fills) <= batch.width <= length
        assert batch.tokens == sum(fills)
    places = sum(len(batch.rows) * batch.width for batch in batches)
    empty = places - sum(batch.tokens for batch in batches)
    assert empty <= places / 32 + rows * length
    assert batches == batches_of(lengths, rows, length, seed, epoch=1)


@pytest.mark.parametrize(
    "lengths",
    [
        np.random.default_rng(0).lognormal(6, 0.9, 2000),
        np.random.default_rng(0).integers(5, 40, 3000),
        np.random.default_rng(0).integers(520, 1000, 600),
        np.full(400, 600),
        np.full(300, 5000),
    ],
    ids=["chats", "short", "over half a row", "equal", "long"],
)
@pytest.mark.parametrize("length", [256, 1024])
def test_at_most_a_twentieth_is_padding(lengths: np.ndarray[Any, Any], length: int) -> None:
    samples = InMemory([Example(np.ones(int(n), np.int32), np.ones(int(n), np.uint8)) for n in np.maximum(lengths, 3)])
    batches = Batches(samples, 4, length, seed=0)
    assert 0 <= batches.padding <= 0.05
    places = held = 0
    for rows in collect(batches, 0):
        places += rows.segments.size
        held += int((rows.segments > 0).sum())
    assert batches.padding == pytest.approx(1 - held / places)


def test_full_rows_are_regrouped_in_every_epoch() -> None:
    lengths = [100] * 64
    groups = [
        {
            frozenset(piece.sample for row in batch.rows for piece in row)
            for batch in batches_of(lengths, 4, 100, 0, epoch)
        }
        for epoch in (0, 1)
    ]
    assert not groups[0] & groups[1]


def test_long_samples_are_cut_and_short_rests_are_dropped() -> None:
    assert [(p.start, p.stop) for p in cut_into_pieces(0, 20, 8)] == [(0, 8), (8, 16), (16, 20)]
    assert [(p.start, p.stop) for p in cut_into_pieces(0, 17, 8)] == [(0, 8), (8, 16)]
    assert cut_into_pieces(0, MIN_TOKENS - 1, 8) == []


def test_rows_contain_the_samples() -> None:
    samples = make_samples([5, 9, 3, 14, 7, 6, 30])
    batches = Batches(InMemory(samples), rows=2, length=16, seed=1)
    seen: list[int] = []
    epoch = collect(batches, 0)
    assert len(epoch) == batches.steps_per_epoch()
    for rows in epoch:
        assert rows.states is not None
        assert rows.states.shape == (*rows.tokens.shape, (N + 1) * H)
        assert rows.tokens.shape[1] <= 16
        inside = rows.segments > 0
        assert np.array_equal(widened(rows.states)[..., 0], rows.tokens * inside)
        assert np.array_equal(widened(rows.states)[..., -1], -rows.tokens * inside)
        seen += rows.tokens[inside].tolist()
        for row in range(len(rows.tokens)):
            segments = rows.segments[row][inside[row]]
            assert np.all(np.diff(segments) >= 0)
            assert segments[0] == 1
    assert sorted(seen) == sorted(t for s in samples for t in s.tokens.tolist())


def test_the_order_is_fixed_by_seed_and_epoch() -> None:
    store = InMemory(make_samples([4, 6, 5, 7, 3, 8, 9, 4, 6, 5]))
    first, again = (collect(Batches(store, 2, 10, seed=3), 0) for _ in range(2))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0].tokens, collect(Batches(store, 2, 10, seed=3), 1)[0].tokens)
    assert not np.array_equal(first[0].tokens, collect(Batches(store, 2, 10, seed=4), 0)[0].tokens)


def test_an_epoch_can_start_midway() -> None:
    batches = Batches(InMemory(make_samples([4, 6, 5, 7, 3, 8, 9, 4])), 2, 10, seed=0)
    whole, rest = collect(batches, 0), collect(batches, 0, skip=1)
    assert [r.tokens.tolist() for r in whole[1:]] == [r.tokens.tolist() for r in rest]
    assert collect(batches, 0, skip=99) == []


def test_leaving_early_stops_the_threads() -> None:
    with closing(Batches(InMemory(make_samples([8] * 200)), 2, 8, seed=0).epoch(0)) as stream:
        next(stream)


def test_samples_without_states() -> None:
    samples = [Example(s.tokens, s.loss_mask) for s in make_samples([5, 9, 3])]
    (rows,) = collect(Batches(InMemory(samples), 4, 16, seed=0), 0)
    assert rows.states is None


def test_rows_are_split() -> None:
    rows = Rows(np.arange(6, dtype=np.int32).reshape(3, 2), np.zeros((3, 2), np.uint8), np.ones((3, 2), np.int32), None)
    assert [part.tokens.tolist() for part in rows.split(2)] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert len(rows.split(8)) == 3


def test_shards_give_the_same_rows(tmp_path: Path) -> None:
    samples = make_samples([5, 9, 3, 14, 7])
    write_all(tmp_path / "s", samples, ShardMeta("t", H, 1000, tuple(range(N))), 12)
    store = OnDisk(ShardReader(tmp_path / "s"))
    assert store.lengths == [5, 9, 3, 14, 7]
    for a, b in zip(
        collect(Batches(store, 2, 16, 0), 0), collect(Batches(InMemory(samples), 2, 16, 0), 0), strict=True
    ):
        assert np.array_equal(a.tokens, b.tokens)
        assert a.states is not None
        assert b.states is not None
        assert np.array_equal(a.states, b.states)
    counts = sum(np.bincount(s.tokens[s.loss_mask == 1], minlength=1000) for s in samples)
    assert np.array_equal(store.count_tokens(1000), counts)


def test_a_damaged_shard_is_found_before_training(tmp_path: Path) -> None:
    write_all(tmp_path / "s", make_samples([5]), ShardMeta("t", H, 1000, tuple(range(N))))
    shard = next((tmp_path / "s").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ShardError, match="damaged"):
        OnDisk(ShardReader(tmp_path / "s"))


def test_an_error_in_a_reading_thread_is_raised(tmp_path: Path) -> None:
    write_all(tmp_path / "s", make_samples([6] * 4), ShardMeta("t", H, 1000, tuple(range(N))), 4)
    reader = ShardReader(tmp_path / "s")
    store = OnDisk(reader)
    shard = next((tmp_path / "s").glob("shard-00001*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ShardError, match="can no longer be read"):
        collect(Batches(store, 2, 8, 0), 0)


def test_prefetching_does_not_change_the_number_of_blas_threads() -> None:
    """The last bits of a product depend on the threads, so a run with changing threads could not be repeated."""
    before = blas_threads()
    if not before:
        pytest.skip("not OpenBLAS")
    set_blas_threads(2)
    try:
        batches = Batches(InMemory(make_samples([6] * 4)), 2, 8, 0)
        for epoch in range(20):
            for _ in batches.epoch(epoch):
                assert blas_threads() == 2
            assert blas_threads() == 2
    finally:
        set_blas_threads(before)
