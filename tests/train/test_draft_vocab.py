"""The draft vocabulary: frequent tokens, and always the special tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.errors import ConfigError
from eagle_mlx.hidden_states import Example
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data import InMemory
from eagle_mlx.train.data.examples import choose_draft_vocab, draft_vocabulary
from eagle_mlx.train.kinds import resolve
from tests.fakes import tiny_target


def test_only_learned_tokens_count() -> None:
    samples = InMemory([Example.of([1, 2, 2, 5], [0, 1, 1, 1]), Example.of([5, 5], [1, 0])])
    counts = samples.count_tokens(6)
    assert counts.tolist() == [0, 0, 2, 0, 0, 2]


def test_the_most_frequent_and_the_special_are_kept_in_ascending_order() -> None:
    counts = np.array([0, 9, 3, 3, 7, 1])
    assert choose_draft_vocab(counts, 3).tolist() == [1, 2, 4]
    assert choose_draft_vocab(counts, 3, always=(0, 99)).tolist() == [0, 1, 4]
    assert choose_draft_vocab(counts, 3, had=np.array([0, 3])).tolist() == [1, 3, 4]
    assert choose_draft_vocab(counts, 6).tolist() == list(range(6))


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


@pytest.mark.parametrize(
    ("size", "reason"), [(0, "between 1 and"), (7, "between 1 and"), (2, "3 special tokens alone")]
)
def test_invalid_sizes(size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_draft_vocab(np.ones(6, np.int64), size, always=(1, 2, 3))


@pytest.mark.parametrize("learned", [True, False])
def test_the_vocabulary_has_the_special_tokens_and_covers_a_share_of_the_learned_ones(learned: bool) -> None:
    target = tiny_target(tokenizer=True)
    counts = np.zeros(target.vocab_size, np.int64)
    if learned:
        counts[[50, 60]] = 9, 3
    config = resolve(TrainConfig.of(target="tiny", draft_vocab=4), target.hidden_size)
    kept, facts = draft_vocabulary(target, config, counts, None)
    assert kept is not None
    assert {0, 2} <= set(kept.tolist())
    assert facts == {"draft_vocab": 4, "draft_vocab_coverage": counts[kept].sum() / 12 if learned else 1.0}
