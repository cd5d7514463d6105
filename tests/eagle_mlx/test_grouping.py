"""Grouping by lengths and bytes: groups read the least, memory suffices, and rows do not move back and forth."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

import eagle_mlx as em
from eagle_mlx.cache.full import most_slots
from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.engine.groups import Places, RoundReads, Row, arrange, by_reach, split
from tests.architectures import tiny_model
from tests.fakes import tiny_head, tiny_target

SIZE = CacheSize(position=1)
PLENTY = 10**9
LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=7)


def slots(lengths: list[int], places: Places) -> int:
    """Return the positions that one round of all groups reads."""
    groups = [[n for n, place in zip(lengths, places, strict=True) if place == at] for at in (0, 1)]
    return sum(len(group) * max(group, default=0) for group in groups)


def read(lengths: list[int], places: Places, reads: RoundReads) -> int:
    return slots(lengths, places) * reads.position + len(set(places)) * reads.fixed


def taken(reaches: list[int], places: Places) -> int:
    groups = [[n for n, place in zip(reaches, places, strict=True) if place == at] for at in (0, 1)]
    return sum(SIZE.nbytes(len(group), max(group, default=0)) for group in groups)


@given(LENGTHS)
def test_a_split_has_the_least_padding_there_is(lengths: list[int]) -> None:
    groups = split(lengths)
    assert slots(lengths, groups) == min(slots(lengths, places) for places in product((0, 1), repeat=len(lengths)))
    long = [n for n, place in zip(lengths, groups, strict=True) if place]
    short = [n for n, place in zip(lengths, groups, strict=True) if not place]
    assert short
    assert not long or min(long) > max(short)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    numbers = st.tuples(st.integers(1, 5000), st.integers(0, 3000), st.sampled_from([None, 0, 1]))
    return [
        Row(length, length + more, group) for length, more, group in draw(st.lists(numbers, min_size=1, max_size=7))
    ]


@settings(max_examples=200)
@given(rows(), st.integers(0, 20_000), st.integers(1, 30_000))
def test_an_arrangement_keeps_to_memory_pays_for_its_moves_and_stays(
    requests: list[Row], fixed: int, allowed: int
) -> None:
    reads, lengths, reaches = RoundReads(fixed, 1), [row.length for row in requests], [row.reach for row in requests]
    arrangement = arrange(requests, reads, SIZE, allowed)
    wanted = by_reach(reaches, SIZE, allowed)
    assert taken(reaches, arrangement) <= taken(reaches, wanted)
    assert taken(reaches, wanted) <= max(allowed, taken(reaches, split(reaches)))
    now = tuple(0 if row.group is None else row.group for row in requests)
    if taken(reaches, now) <= taken(reaches, wanted):
        moved = sum(row.length for row, to in zip(requests, arrangement, strict=True) if row.group not in (None, to))
        assert read(lengths, arrangement, reads) + 2 * moved / 64 <= read(lengths, now, reads) + 1e-6
    settled = [Row(row.length, row.reach, group) for row, group in zip(requests, arrangement, strict=True)]
    assert arrange(settled, reads, SIZE, allowed) == arrangement


@settings(max_examples=50)
@given(LENGTHS, st.integers(100, 5000), st.integers(0, 99))  # weights take as many bytes as many positions
def test_rows_that_grow_unevenly_do_not_move_back_and_forth(lengths: list[int], fixed: int, seed: int) -> None:
    """Accepted drafts make rows longer than others by a few tokens at different times."""
    grown = list(lengths)
    groups: Places = (0,) * len(lengths)
    moves, random = [], Random(seed)
    for _ in range(40):
        at = arrange(
            [Row(n, n + 100, g) for n, g in zip(grown, groups, strict=True)],
            RoundReads(fixed, 1),
            SIZE,
            PLENTY,
        )
        moves += [i for i, (a, b) in enumerate(zip(groups, at, strict=True)) if a != b]
        groups = at
        grown = [n + random.randint(1, 4) for n in grown]
    assert len(moves) <= len(lengths)  # about one move per row


@pytest.mark.parametrize(("long", "expected"), [(1000, {0}), (2200, {0}), (2400, {0, 1}), (30_000, {0, 1})])
def test_weights_are_read_twice_if_padding_costs_more(long: int, expected: set[int]) -> None:
    """Seven rows of 256 and a long one: seven times the difference is padding, compared with the weights."""
    reads = RoundReads(fixed=7 * 2000, position=1)
    waiting = [Row(256, 300), *[Row(256, 300, 0)] * 6, Row(long, long + 100)]
    assert set(arrange(waiting, reads, SIZE, PLENTY)) == expected


def test_groups_merge_later_than_they_split_by_the_cost_of_a_copy() -> None:
    reads = RoundReads(fixed=7 * 2000 * 512, position=512)

    def places(long: int, group: int) -> Places:
        return arrange([Row(256, 300, 0)] * 7 + [Row(long, long, group)], reads, SIZE, PLENTY)

    parted = next(n for n in range(2000, 4000) if set(places(n, 0)) == {0, 1})
    joined = next(n for n in range(4000, 1000, -1) if len(set(places(n, 1))) == 1)
    copied = 2 * 256 // 64  # positions of each of the seven short rows, a copy's share of a round
    assert (joined, parted) == (2256 - copied - 1, 2256 + copied + 1)


def test_windows_and_states_do_not_count() -> None:
    target = tiny_target()
    head = em.HeadProposer(tiny_head(target))
    head.bind(target)
    size = CacheSize(position=0, windows=((64, 1024),), row=4096)
    reads = RoundReads.of(target, head, size)
    assert reads.position == 0
    waiting = [Row(10, 20, 0)] * 7 + [Row(30_000, 30_100)]
    assert arrange(waiting, reads, size, PLENTY) == (0,) * 8
    assert reads.fixed > RoundReads.of(target, None, size).fixed > target.weight_bytes


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_an_embedding_that_is_not_the_output_layer_hardly_counts(name: str) -> None:
    target = tiny_target() if name == "qwen3" else em.Target(tiny_model(name))
    whole = sum(x.nbytes for _, x in tree_flatten(target.model.parameters()))
    embedding = target.vocab_size * target.hidden_size * 4
    assert target.weight_bytes == whole - (0 if name == "qwen3" else embedding)


def test_memory_decides_if_one_group_does_not_fit() -> None:
    reaches = [300] * 7 + [8000]
    together, apart = most_slots(8, 8000), most_slots(7, 300) + most_slots(1, 8000)
    assert by_reach(reaches, SIZE, together) == (0,) * 8
    assert by_reach(reaches, SIZE, together - 1) == (*[0] * 7, 1)
    waiting = [Row(20, reach, 0) for reach in reaches]  # all rows are still short, and a second read costs more
    assert arrange(waiting, RoundReads(PLENTY, 1), SIZE, apart) in ((*[0] * 7, 1), (*[1] * 7, 0))
    assert all(a == b for a, b in pairwise(arrange(waiting, RoundReads(PLENTY, 1), SIZE, together)))
