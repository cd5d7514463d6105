from __future__ import annotations

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
