from __future__ import annotations

import numpy as np
import pytest

from eagle_mlx.data_pipelines import capture
from eagle_mlx.hidden_states import Example, widened
from eagle_mlx.train.data.batches import Batches, Rows, capture_rows, unpack
from eagle_mlx.train.data.examples import InMemory
from tests.fakes import tiny_target

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0]], np.int32)


def test_rows_are_unpacked() -> None:
    tokens = np.arange(1, 17, dtype=np.int32).reshape(2, 8)
    rows = Rows(tokens, np.ones((2, 8), np.uint8), SEGMENTS, None)
    [alone], places = unpack(rows)
    assert alone.tolist() == [[9, 10, 11, 12, 13], [4, 5, 6, 7, 0], [1, 2, 3, 0, 0]]
    inside = SEGMENTS > 0
    assert np.array_equal(alone.reshape(-1)[places][inside], tokens[inside])


def test_conversations_of_similar_length_are_read_together() -> None:
    segments = np.array([[1] * 12 + [0] * 4, [*range(1, 9)] * 2], np.int32)
    segments[1].sort()
    rows = Rows(np.arange(1, 33, dtype=np.int32).reshape(2, 16), np.ones((2, 16), np.uint8), segments, None)
    batches, places = unpack(rows)
    assert [batch.shape for batch in batches] == [(2, 12), (7, 2)], "none has more than the 32 tokens of the rows"
    flat = np.concatenate([batch.reshape(-1) for batch in batches])
    assert np.array_equal(flat[places][segments > 0], rows.tokens[segments > 0])


@pytest.mark.parametrize("parts", [1, 2])
def test_pieces_of_a_long_conversation_are_read_with_its_beginning(parts: int) -> None:
    target, rng = tiny_target(), np.random.default_rng(0)
    texts = [rng.integers(0, target.vocab_size, n).astype(np.int32) for n in (5, 30, 8, 19)]
    examples = [Example(text, np.ones(len(text), np.uint8)) for text in texts]
    captured = capture(target, (0, 2), [(text.tolist(), [1] * len(text)) for text in texts])
    whole = {tuple(sample.tokens.tolist()): sample.states for sample in captured}
    seen = 0
    for batch in Batches(InMemory(examples), rows=3, length=8, seed=1).epoch(0):
        states = np.concatenate([np.array(capture_rows(target, (0, 2), part)) for part in batch.split(parts)])
        for row, samples in enumerate(batch.samples):
            for number, sample in enumerate(samples, 1):
                at = batch.segments[row] == number
                own = batch.tokens[row][at]
                text = texts[sample]
                [start] = [s for s in range(0, len(text), 8) if np.array_equal(text[s : s + len(own)], own)]
                wanted = whole[tuple(text.tolist())]
                assert wanted is not None
                wide = widened(wanted.whole[start : start + len(own)])
                np.testing.assert_allclose(states[row][at], wide, rtol=1e-2, atol=2e-3)
                seen += start > 0
    assert seen > 4


def test_states_of_packed_rows_are_those_of_the_conversations_alone() -> None:
    target = tiny_target()
    tokens = np.random.default_rng(0).integers(0, target.vocab_size, SEGMENTS.shape).astype(np.int32)
    states = np.array(capture_rows(target, (0, 2), Rows(tokens, np.ones_like(tokens, np.uint8), SEGMENTS, None)))
    assert states.shape == (2, 8, 3 * target.hidden_size)
    for row, number in ((0, 1), (0, 2), (1, 1)):
        at = SEGMENTS[row] == number
        (sample,) = capture(target, (0, 2), [(tokens[row][at].tolist(), [1] * int(at.sum()))])
        np.testing.assert_allclose(states[row][at], widened(sample.states.whole), rtol=1e-2, atol=2e-3)
