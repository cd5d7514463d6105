"""Ragged caches against fresh single-row runs, after any history of appends, roll backs, joins and leaves."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import gemma3_text

from eagle_mlx.cache import RaggedCache, check_cacheable, without_row
from eagle_mlx.errors import TargetError
from tests.fakes import tiny_target

TARGET = tiny_target()
WIDTH = 5


def fresh_logits(tokens: list[int]) -> np.ndarray:
    return np.array(TARGET.forward(mx.array([tokens])).logits[0, -1])


def run(cache: RaggedCache, texts: list[list[int]], rows: list[list[int]], kept: list[int], settle: bool) -> None:
    """One ragged forward: row i gets rows[i], of which kept[i] tokens stay; checks the logits of what stays."""
    width = max(map(len, rows))
    tokens = mx.array([row + [0] * (width - len(row)) for row in rows], mx.int32)
    logits = np.array(TARGET.forward(tokens, cache).logits)
    cache.lengths.advance(mx.array(kept, mx.int32), at_most=width)
    for text, row, keep, out in zip(texts, rows, kept, logits, strict=True):
        text.extend(row[:keep])
        if keep:
            np.testing.assert_allclose(out[keep - 1], fresh_logits(text), rtol=1e-3, atol=1e-3)
    if settle:
        cache.lengths.settle([len(text) for text in texts])


step = st.tuples(
    st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=WIDTH), min_size=6, max_size=6),
    st.lists(st.integers(0, WIDTH), min_size=6, max_size=6),
    st.booleans(),
    st.sampled_from(["stay", "join", "leave"]),
    st.integers(0, 5),
)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.lists(step, min_size=1, max_size=6))
def test_rows_equal_fresh_runs_after_any_history(rows: int, steps: list) -> None:  # type: ignore[type-arg]
    cache, texts = RaggedCache(TARGET.num_layers, rows), [[] for _ in range(rows)]
    for pieces, keeps, settle, event, which in steps:
        pieces = pieces[: len(texts)]
        kept = [min(keep, len(piece)) for keep, piece in zip(keeps, pieces, strict=False)]
        run(cache, texts, pieces, kept, settle)
        if event == "join" and len(texts) < 6:
            other, new = RaggedCache(TARGET.num_layers, 1), [[]]
            run(other, new, [[7, which, 3]], [3], True)
            cache.append(other)
            texts.extend(new)
        elif event == "leave" and len(texts) > 1:
            row = which % len(texts)
            cache.remove(row)
            texts[row] = texts[-1]
            texts.pop()


@pytest.mark.parametrize("rows", [1, 3])
def test_buffers_grow_past_their_step(rows: int) -> None:
    rng = np.random.default_rng(0)
    cache, texts = RaggedCache(TARGET.num_layers, rows), [[] for _ in range(rows)]
    for width in (250, 4, 4, 4):
        pieces = rng.integers(0, 128, (rows, width)).tolist()
        run(cache, texts, pieces, [width - 1 - (i % 2) for i in range(rows)], True)


def test_restore_forgets_what_was_written_since() -> None:
    cache, texts = RaggedCache(TARGET.num_layers, 2), [[], []]
    run(cache, texts, [[1, 2, 3], [4, 5, 6]], [3, 1], True)
    saved = cache.lengths.save()
    for token in (9, 10, 11):
        TARGET.forward(mx.array([[token], [token]]), cache)
        cache.lengths.advance(1)
    cache.lengths.restore(saved)
    run(cache, texts, [[7, 8], [7, 8]], [2, 2], True)


def test_uniform_rows_use_the_cheap_masks_and_ragged_ones_do_not() -> None:
    cache = RaggedCache(1, 2)
    assert cache[0].make_mask(1) is None
    assert cache[0].make_mask(3) == "causal"
    cache.lengths.advance(mx.array([1, 2]), at_most=2)
    mask = cache[0].make_mask(2)
    assert np.array(mask)[:, 0].astype(int).tolist() == [[[1, 1, 0, 0], [1, 1, 1, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    cache.lengths.settle([2, 2])
    assert cache[0].make_mask(1) is None


def test_what_cannot_be_rolled_back_is_refused_with_the_layer_and_its_kind() -> None:
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text", hidden_size=32, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2,
        head_dim=16, num_key_value_heads=1, vocab_size=64, sliding_window=8, sliding_window_pattern=2,
    )  # fmt: skip
    with pytest.raises(TargetError, match="layer 0 of this model keeps a RotatingKVCache"):
        check_cacheable(gemma3_text.Model(args))


@given(st.integers(1, 6), st.data())
def test_without_row_moves_the_last_row_into_the_gap(rows: int, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, rows - 1))
    expected = list(range(rows))
    expected[row] = expected[-1]
    assert without_row(mx.arange(rows), row).tolist() == expected[:-1]
