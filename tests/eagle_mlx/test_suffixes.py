"""Searching texts for the last tokens of another equals a slow search, whatever is in blocks and in the tail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.proposers import suffixes
from eagle_mlx.proposers.suffixes import PLACES, REACH, Texts, last_of, likeliest

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def followers(texts: list[list[int]], last: list[int]) -> list[list[int]]:
    """Return what followed these tokens in any text, as `Texts` returns it: 0 is a text's end."""
    size = len(last)
    return [
        [*(token + 1 for token in text[end : end + REACH]), 0][:REACH]
        for text in texts
        for end in range(size, len(text) + 1)
        if text[end - size : end] == last
    ]


def until_gap(row: list[int]) -> list[int]:
    return row[: row.index(0) + 1] if 0 in row else row


@pytest.mark.parametrize("tail", [2, 12, 1000])
@given(texts=st.lists(TOKENS, min_size=1, max_size=6), query=TOKENS)
def test_the_longest_match_and_what_followed_it_are_those_of_a_slow_search(
    tail: int, texts: list[list[int]], query: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffixes, "TAIL", tail)
        patch.setattr(suffixes, "PLACES", 1000)
        kept = Texts()
        for text in texts:
            kept.add(text)
            kept.end()
    sizes = range(1, min(len(query), REACH) + 1)
    longest = max((size for size in sizes if followers(texts, query[-size:])), default=0)
    assert kept.longest(last_of(query)) == longest
    for size in range(1, longest + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(suffixes, "PLACES", 1000)
            rows = [until_gap(row) for row in kept.followers(last_of(query[-size:]))]
        assert sorted(rows) == sorted(followers(texts, query[-size:]))


@pytest.mark.parametrize("most", [1, 7, 1000])
@given(texts=st.lists(TOKENS, min_size=1, max_size=6), query=TOKENS)
def test_texts_of_the_tokens_of_others_have_the_same_matches(
    most: int, texts: list[list[int]], query: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffixes, "MOST", most)
        patch.setattr(suffixes, "TAIL", most)
        kept = Texts()
        for text in texts:
            kept.add(text)
            kept.end()
        again = Texts.of(kept.tokens)
    assert again.tokens.tolist() == kept.tokens.tolist() == [n for text in texts for n in (*(t + 1 for t in text), 0)]
    assert again.longest(last_of(query)) == kept.longest(last_of(query))


def test_a_text_that_continues_matches_across_its_pieces_in_the_tail() -> None:
    texts = Texts()
    texts.add([1, 2])
    texts.add([3, 4])
    assert texts.longest(last_of([9, 2, 3])) == 2
    assert texts.followers(last_of([2, 3])) == [[5]]


def test_tokens_whose_bytes_overlap_are_told_apart() -> None:
    texts = Texts()
    texts.add([255, 255, 7])  # 00 00 01 00 00 00 01 00: the bytes of token 0 begin at the fourth
    assert texts.longest(last_of([0])) == 0
    assert texts.followers(last_of([0])) == []
    texts.add([0, 9, 255, 255, 7])
    assert texts.longest(last_of([0])) == 1
    assert texts.followers(last_of([0])) == [[10, 256, 256, 8]]


@pytest.mark.parametrize("vocab", [1, 3, 50_000])
def test_texts_take_about_eight_bytes_a_token(vocab: int) -> None:
    texts, rng = Texts(), np.random.default_rng(0)
    for _ in range(100):
        texts.add(rng.integers(0, vocab, 215).tolist())
        texts.end()
    assert texts.nbytes <= 8.1 * 216 * 100


def test_of_a_text_that_grows_only_the_newest_tokens_are_searched_as_bytes() -> None:
    texts, rng = Texts(), np.random.default_rng(0)
    for _ in range(10 * suffixes.TAIL):
        texts.add(rng.integers(0, 50_000, 3).tolist())
    sorted_tokens = (texts.nbytes - 4 * 30 * suffixes.TAIL) / 4  # they take eight bytes, others four
    assert 30 * suffixes.TAIL - sorted_tokens <= 1.1 * suffixes.TAIL


def test_the_oldest_tokens_are_forgotten_first() -> None:
    texts, rng, added = Texts(), np.random.default_rng(0), list[int]()
    for _ in range(20):
        text = rng.integers(0, 50_000, 1000).tolist()
        texts.add(text)
        texts.end()
        added += [*(token + 1 for token in text), 0]
    before = len(added) + 1
    while texts.nbytes:
        tokens = texts.tokens.tolist()
        assert tokens == added[len(added) - len(tokens) :]
        assert len(tokens) < before
        before = len(tokens)
        texts.forget()


def test_a_lookup_looks_at_few_places_and_blocks() -> None:
    texts = Texts()
    for _ in range(300):
        texts.add([1, 2] * 200)
        texts.end()
    assert len(texts.followers(last_of([1, 2]))) <= 32
    forgotten = 0
    while texts.nbytes:
        texts.forget()
        forgotten += 1
    assert forgotten <= 8


def test_drafts_end_where_places_disagree() -> None:
    assert likeliest([[2, 3, 4], [2, 3, 5], [2, 3, 6]]) == [1, 2]
    assert likeliest([[2, 3, 4], [2, 3, 4], [2, 9, 9]]) == [1, 2, 3]
    assert likeliest([[2]] * 9 + [[3]] * 8 + [[4]] * 3) == [1]  # with a share of 0.45, and the bar is 0.4
    assert likeliest([[2]] * 7 + [[3]] * 7 + [[4]] * 6) == []
    assert likeliest([[0, 5]]) == []  # a text ended there
    assert likeliest([[2]] * 3 + [[3, 4]] * 2, written={2}) == [2, 3], "what the own text has counts twice"
    assert likeliest([]) == []


@pytest.mark.parametrize("tail", [2, 1000])
def test_no_more_places_are_looked_at_however_many_there_are(tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffixes, "TAIL", tail)
    texts = Texts()
    for _ in range(3 * PLACES):
        texts.add([1, 2])
        texts.end()
    assert len(texts.followers(last_of([1]))) == PLACES
