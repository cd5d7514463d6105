from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.text import distinct_ratio, is_loop


def test_ratios() -> None:
    assert distinct_ratio([]) == 1.0
    assert distinct_ratio([1, 2, 3]) == 1.0
    assert distinct_ratio(list(range(20))) == 1.0
    assert distinct_ratio([1] * 13) == 0.1
    assert distinct_ratio([1, 2] * 5, n=2) == 2 / 9


def test_a_loop_is_distinguished_from_a_text() -> None:
    assert is_loop([5, 6, 7] * 30)
    assert not is_loop([*range(50), 1, 2, 3, 4, 5])


TOKENS = st.lists(st.integers(0, 3), max_size=30)


@given(TOKENS, TOKENS, st.integers(0, 5), st.floats(0, 1))
def test_a_certain_loop_stays_one_whatever_comes(tokens: list[int], rest: list[int], more: int, least: float) -> None:
    if is_loop(tokens, least, coming=len(rest) + more):
        assert all(is_loop(tokens + rest[:end], least) for end in range(len(rest) + 1))


@given(TOKENS.filter(lambda tokens: len(tokens) > 3), st.integers(0, 30))
def test_a_loop_is_certain_as_soon_as_no_continuation_can_undo_it(tokens: list[int], coming: int) -> None:
    assert distinct_ratio(tokens, coming=coming) == distinct_ratio([*tokens, *range(10, 10 + coming)])
