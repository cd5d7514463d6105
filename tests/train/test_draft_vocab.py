"""The draft vocabulary: frequent tokens, and always the special tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.data_pipelines import Sample
from eagle_mlx.errors import ConfigError
from eagle_mlx.train.data.examples import (
    choose_draft_vocab,
    count_tokens,
    coverage,
    special_token_ids,
)
from tests.fakes import tiny_target


def test_only_learned_tokens_count() -> None:
    counts = count_tokens([Sample([1, 2, 2, 5], [0, 1, 1, 1], 7), Sample([5, 5], [1, 0], 8)], 6)
    assert counts.tolist() == [0, 0, 2, 0, 0, 2]


def test_the_most_frequent_and_the_special_are_kept_in_ascending_order() -> None:
    counts = np.array([0, 9, 3, 3, 7, 1])
    assert choose_draft_vocab(counts, 3).tolist() == [1, 2, 4]
    assert choose_draft_vocab(counts, 3, always=(0, 99)).tolist() == [0, 1, 4]
    assert choose_draft_vocab(counts, 3, had=np.array([0, 3])).tolist() == [1, 3, 4]
    assert choose_draft_vocab(counts, 6).tolist() == list(range(6))
    assert coverage(counts, np.array([1, 4])) == 16 / 23
    assert coverage(np.zeros(3, np.int64), np.array([1])) == 1.0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_the_choice_has_the_size_and_what_must_be_in_it(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    kept = choose_draft_vocab(np.array(counts), size, always)
    assert len(kept) == size
    assert (np.diff(kept) > 0).all()
    assert always <= set(kept.tolist())
    left_out = set(range(len(counts))) - set(kept.tolist())
    chosen = set(kept.tolist()) - always
    assert max((counts[i] for i in left_out), default=0) <= min((counts[i] for i in chosen), default=9)


@pytest.mark.parametrize(("size", "said"), [(0, "between 1 and"), (7, "between 1 and"), (2, "3 special tokens alone")])
def test_invalid_sizes(size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_draft_vocab(np.ones(6, np.int64), size, always=(1, 2, 3))


def test_special_tokens_of_the_embedded_tokenizer() -> None:
    tokenizer = tiny_target(tokenizer=True).tokenizer
    assert tokenizer is not None
    assert special_token_ids(tokenizer) >= {0, 2}
