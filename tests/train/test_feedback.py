"""The unroll for any kind of head equals the EAGLE-3 one, and how heads of every kind draft."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from eagle_mlx.cache import RaggedCache
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.target import Target
from eagle_mlx.train.kinds import kind_of
from eagle_mlx.train.kinds.eagle3 import unroll
from eagle_mlx.train.unroll import Inputs, UnrolledCache, unroll_feedback
from tests.eagle_mlx.heads import KINDS, eagle3
from tests.fakes import tiny_target
from tests.full import some

TARGET = tiny_target(vocab=64, seed=3)
STEPS = 4


def drafted(head: DraftHead, target: Target, tokens: list[int], index: int, steps: int) -> list[mx.array]:
    """Return the outputs [H] at `index` and of the next steps, as in a proposer: prefill, then feedback."""
    cache = RaggedCache(head.cache_layers, 1)
    ids = mx.array([tokens], mx.int32)
    aux = target.forward(ids[:, : index + 1], aux_layers=head.aux_layers).aux
    h = head(head.embed(ids[:, 1 : index + 2]), head.features(aux), cache)[:, -1:]
    cache.lengths.advance(index + 1)
    outputs = [h[0, 0]]
    for step in range(1, steps):
        h = head(head.embed(ids[:, index + 1 + step : index + 2 + step]), h, cache)
        cache.lengths.advance(1)
        outputs.append(h[0, 0])
    return outputs


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_trained_on_what_it_drafts_with(name: str) -> None:
    """Two conversations share a row, a third has its own row, and padding follows the last one."""
    head = KINDS[name](TARGET)
    head.attach(TARGET)
    rng = np.random.default_rng(0)
    lengths = ((9, 11), (16,))
    parts = [[rng.integers(0, 64, n).tolist() for n in row] for row in lengths]
    width = 22
    texts = [[token for text in row for token in text] for row in parts]
    tokens = mx.array([text + [0] * (width - len(text)) for text in texts], mx.int32)
    segments = np.zeros((2, width), np.int32)
    states = []
    layers = (*head.named_layers, TARGET.num_layers - 1)
    for row, alone in enumerate(parts):
        begin, pieces = 0, []
        for number, text in enumerate(alone):
            segments[row, begin : begin + len(text)] = number + 1
            begin += len(text)
            pieces.append(mx.concatenate(TARGET.forward(mx.array([text]), aux_layers=layers).aux, axis=-1)[0])
        pieces.append(mx.zeros((width - begin, pieces[0].shape[-1])))
        states.append(mx.concatenate(pieces))
    wanted = [(0, 0, 0, 3), (0, 1, 9, 2), (0, 1, 9, 6), (1, 0, 0, 0), (1, 0, 0, 5), (1, 0, 0, 11)]  # row, text, at
    positions = mx.array([[3, 11, 15], [0, 5, 11]])
    g = kind_of(head).features(head, TARGET, mx.stack(states), lambda x: x)
    unrolled = kind_of(head).unroll(head, Inputs(head.embed(tokens), g, mx.array(segments), positions), STEPS)
    assert [h.shape for h in unrolled] == [(2, 3, head.hidden_size)] * STEPS
    for place, (row, text, _, index) in enumerate(wanted):
        expected = drafted(head, TARGET, parts[row][text], index, STEPS)
        for step, want in enumerate(expected):
            np.testing.assert_allclose(unrolled[step][row, place % 3], want, rtol=1e-3, atol=1e-3, err_msg=str(step))


@settings(max_examples=some(10), deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(8, 14))
def test_it_equals_the_unroll_that_knows_eagle3(seed: int, steps: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    head = eagle3(TARGET, seed % 7, norm_before_residual=bool(seed % 2))
    tokens = mx.array(rng.integers(0, 64, (2, length)), mx.int32)
    g = mx.array(rng.normal(size=(2, length, head.hidden_size)), mx.float32)
    segments = mx.array(np.sort(rng.integers(1, 4, (2, length)), axis=1), mx.int32)
    positions = mx.array(np.sort(rng.integers(0, length - steps, (2, 3)), axis=1), mx.int32)
    inputs = Inputs(TARGET.embed(tokens), g, segments, positions)
    reference = unroll(head, inputs, steps)
    for ours, theirs in zip(unroll_feedback(head, inputs, steps), reference, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", KINDS)
def test_the_gradient_reaches_the_keys_of_earlier_steps(name: str) -> None:
    """The last step's output depends on every weight, also through the cache entries of earlier steps."""
    head = KINDS[name](TARGET)
    head.attach(TARGET)
    rng = np.random.default_rng(1)
    tokens, segments = mx.array(rng.integers(0, 64, (1, 8)), mx.int32), mx.ones((1, 8), mx.int32)
    g = mx.array(rng.normal(size=(1, 8, head.hidden_size)), mx.float32)

    def last_key(start: mx.array) -> mx.array:
        """At index 1 only the first step's keys differ, and only they affect index 4."""
        inputs = Inputs(head.embed(tokens), start, segments, mx.array([[4]]))
        return mx.sum(unroll_feedback(head, inputs, 3)[-1])

    gradient = dict(tree_flatten({"g": mx.grad(last_key)(g)}))["g"]
    size = np.abs(np.array(gradient)).sum(axis=-1)[0]
    assert np.all(np.isfinite(size))
    assert size[4] > 0
    assert np.all(size[5:] == 0), "no position attends to later ones"
    if not any(getattr(getattr(head, "config", None), "windows", ()) or ()):
        assert np.all(size[:4] > 0)


def test_the_mask_is_causal_on_the_first_keys_and_then_diagonal() -> None:
    made = mx.zeros((1, 1, 4, 2))
    cache = UnrolledCache(mx.array([[1, 1, 2, 2]]), [(made, made)])
    mask = np.array(cache.make_mask(4)[0, 0], np.int32)
    assert mask[:, :4].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[:, 4:].tolist() == np.eye(4, dtype=int).tolist()
    windowed = np.array(cache.make_mask(4, window_size=1)[0, 0], np.int32)
    assert windowed[:, :4].sum() == 0
    assert windowed[:, 4:].tolist() == np.eye(4, dtype=int).tolist()
