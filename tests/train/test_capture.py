from __future__ import annotations

import numpy as np

from eagle_mlx.data_pipelines import capture
from eagle_mlx.hidden_states import widened
from eagle_mlx.train.data.batches import Rows
from eagle_mlx.train.data.sources import capture_rows, unpack
from tests.fakes import tiny_target

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0]], np.int32)


def test_rows_are_unpacked() -> None:
    tokens = np.arange(1, 17, dtype=np.int32).reshape(2, 8)
    alone, places = unpack(Rows(tokens, np.ones((2, 8), np.uint8), SEGMENTS, None))
    assert alone.tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 0], [9, 10, 11, 12, 13]]
    inside = SEGMENTS > 0
    assert np.array_equal(alone.reshape(-1)[places][inside], tokens[inside])


def test_states_of_packed_rows_are_those_of_the_conversations_alone() -> None:
    target = tiny_target()
    tokens = np.random.default_rng(0).integers(0, target.vocab_size, SEGMENTS.shape).astype(np.int32)
    states = np.array(capture_rows(target, (0, 2), Rows(tokens, np.ones_like(tokens, np.uint8), SEGMENTS, None)))
    assert states.shape == (2, 8, 3 * target.hidden_size)
    for row, number in ((0, 1), (0, 2), (1, 1)):
        at = SEGMENTS[row] == number
        (sample,) = capture(target, (0, 2), [(tokens[row][at].tolist(), [1] * int(at.sum()))])
        np.testing.assert_allclose(states[row][at], widened(sample.states.whole), rtol=1e-2, atol=2e-3)
