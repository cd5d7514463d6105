"""Reduced test cases: which ones run unless the suite runs in full."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.full import diagonal, in_turn, mixed

PARAMETERS = (["none", "ngram", "head", "model"], [0, 1, 3, 5], [1, 4, 8], [{}, {"seed": 1}])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_two_values_meet_in_few_combinations(count: int) -> None:
    parameters = PARAMETERS[:count]
    chosen = mixed(*parameters, full=False)
    for first, second in combinations(range(count), 2):
        for pair in product(parameters[first], parameters[second]):
            assert any((values[first], values[second]) == pair for values in chosen)
    assert len(chosen) <= 1.3 * 16
    assert chosen == mixed(*parameters, full=False)


def test_in_full_all_combinations_are_there() -> None:
    assert mixed(*PARAMETERS, full=True) == list(product(*PARAMETERS))


def test_those_who_take_turns_are_all_at_last() -> None:
    parts = [in_turn(range(7), turn, of=3, full=False) for turn in range(3)]
    assert sorted(number for part in parts for number in part) == list(range(7))
    assert max(map(len, parts)) == 3
    assert in_turn(range(7), 1, full=True) == list(range(7))


def test_a_diagonal_meets_every_value() -> None:
    chosen = diagonal(*PARAMETERS, full=False)
    assert len(chosen) == 4
    for values, met in zip(PARAMETERS, zip(*chosen, strict=True), strict=True):
        assert all(value in met for value in values)
    assert diagonal(*PARAMETERS, full=True) == list(product(*PARAMETERS))
