"""The radix tree equals a list of all texts: what it keeps, finds and drops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle_mlx.engine.prefix_tree import PrefixTree, Space
from tests.full import in_full

POSITION = 10
"""Bytes per position."""


@dataclass(frozen=True)
class Letters:
    """A piece that knows its positions."""

    keys: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return POSITION * len(self.keys)

    @property
    def arrays(self) -> list[mx.array]:
        return [mx.zeros((self.nbytes,), mx.uint8)]

    def split(self, at: int) -> tuple[Letters, Letters]:
        assert 0 < at < len(self.keys)
        return Letters(self.keys[:at]), Letters(self.keys[at:])


@dataclass(frozen=True, eq=False)
class Place:
    """A snapshot at the end of a text."""

    keys: tuple[int, ...]
    least: int
    nbytes: int

    @property
    def state(self) -> list[mx.array]:
        return [mx.zeros((self.nbytes,), mx.uint8)]

    def shortest(self, row: int) -> int:
        return self.least

    def serves(self, keys: tuple[int, ...]) -> int:
        """Return how many positions of a text it can serve."""
        common = next((at for at, pair in enumerate(zip(self.keys, keys)) if pair[0] != pair[1]), None)  # noqa: B905
        length = min(len(self.keys), len(keys)) if common is None else common
        return length if length >= self.least else 0

    def covers(self, other: Place) -> bool:
        return self.least <= other.least and self.keys[: len(other.keys)] == other.keys


@dataclass
class Naive:
    """All entries, the least recently used first."""

    places: list[Place] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        positions = {place.keys[:end] for place in self.places for end in range(1, len(place.keys) + 1)}
        return POSITION * len(positions) + sum(place.nbytes for place in self.places)

    def touch(self, place: Place) -> None:
        self.places.remove(place)
        self.places.append(place)

    def insert(self, new: Place, limit: int) -> bool:
        if POSITION * len(new.keys) + new.nbytes > limit:
            return False
        self.places = [*(place for place in self.places if not new.covers(place)), new]
        self.trim(limit)
        return True

    def trim(self, limit: int) -> None:
        while self.places and self.nbytes > limit:
            self.places.pop(0)


texts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
steps = st.one_of(
    st.tuples(st.just("insert"), texts, st.sampled_from([0.0, 0.5, 0.8, 1.0]), st.integers(0, 25)),
    st.tuples(st.just("find"), texts, st.just(0.0), st.integers(1, 3)),
    st.tuples(st.just("trim"), st.just(()), st.just(0.0), st.integers(0, 400)),
)


@settings(max_examples=in_full(2000, 80))
@given(st.lists(steps, max_size=40), st.sampled_from([60, 150, 400, 100_000]))
@example([("insert", (0, 1) * 4, 0.0, 0), ("insert", (0, 1, 1, 1, 1), 0.0, 0)], 100)  # it shares a part of a long text
def test_a_tree_equals_a_list_of_all_texts(history: list[tuple[str, tuple[int, ...], float, int]], limit: int) -> None:
    tree, naive = PrefixTree(), Naive()
    for step, keys, share, number in history:
        tokens = np.array(keys, np.int64)
        if step == "insert":
            new, cut = Place(keys, int(share * len(keys)), number), list[tuple[int, int]]()

            def piece(start: int, end: int, keys: tuple[int, ...] = keys, cut: list[tuple[int, int]] = cut) -> Letters:
                cut.append((start, end))
                return Letters(keys[start:end])

            longest = max((common(place.keys, keys) for place in naive.places), default=0)
            serving = [place for place in naive.places if place.covers(new)]
            kept = tree.insert(tokens, new, piece, limit)
            if serving:
                assert kept
                assert not cut
                touched = next(place for place in serving if place is next(reversed(tree.used)).snapshot)
                naive.touch(touched)
            else:
                assert kept == naive.insert(new, limit)
                assert cut == ([(longest, len(keys))] if longest < len(keys) else [])  # nothing is copied twice
        elif step == "find":
            best = max((place.serves(keys) for place in naive.places), default=0)
            match = tree.find(tokens, number)
            if match is None:
                assert best < number
            else:
                assert (match.length, match.snapshot.serves(keys)) == (best, best)
                held = tuple(key for part in match.pieces for key in part.keys)
                assert held[:best] == keys[:best]
                naive.touch(match.snapshot)
        else:
            tree.trim(number)
            naive.trim(number)
        assert len(tree.used) == len(naive.places)
        assert {node.snapshot for node in tree.used} == set(naive.places)
        assert tree.nbytes == naive.nbytes


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((at for at, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))  # noqa: B905


def test_shared_prefixes_are_kept_once() -> None:
    tree = PrefixTree()
    shared = tuple(range(100))
    for last in range(5):
        keys = (*shared, 1000 + last)
        assert tree.insert(np.array(keys), Place(keys, 0, 1), lambda start, end, keys=keys: Letters(keys[start:end]))
    assert tree.nbytes == POSITION * (100 + 5) + 5
    tree.trim(tree.nbytes - 1)
    assert tree.nbytes == POSITION * (100 + 4) + 4
    assert len(tree.used) == 4


def test_a_text_of_very_many_pieces_is_found() -> None:
    """As a conversation with as many turns leaves them."""
    tree = PrefixTree()
    for end in range(1, 400):
        keys = tuple(range(end))
        tree.insert(np.array(keys), Place(keys, 0, 0), lambda start, end, keys=keys: Letters(keys[start:end]))
    match = tree.find(np.arange(399))
    assert match is not None
    assert (match.length, len(match.pieces), len(tree.used)) == (399, 399, 1)


def test_namespaces_share_only_the_limit() -> None:
    tree, keys = PrefixTree(), (1, 2, 3)
    spaces = [("a", False), ("a", True), ("b", False)]

    def insert(space: Space) -> bool:
        return tree.insert(np.array(keys), Place(keys, 0, 1), lambda a, b: Letters(keys[a:b]), math.inf, space)

    def hits() -> list[bool]:
        return [tree.find(np.array(keys), 1, space) is not None for space in spaces]

    assert insert(spaces[0])
    text_bytes = tree.nbytes
    assert tree.find(np.array(keys)) is None
    assert hits() == [True, False, False]
    assert insert(spaces[1])
    assert insert(spaces[2])
    assert tree.nbytes == 3 * text_bytes
    assert hits() == [True, True, True]
    tree.trim(text_bytes)
    assert hits() == [False, False, True]
    tree.trim(0)
    assert tree.nbytes == len(tree.used) == 0
    assert insert(spaces[0])
