"""The unroll equals inference: a cache over the true prefix, then the head's own outputs fed back."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.target import Target
from eagle_mlx.train.kinds.eagle3 import attend, causal_mask, take_rows, unroll
from eagle_mlx.train.unroll import Inputs
from tests.fakes import tiny_head, tiny_target
from tests.full import some


class PlainCache:
    """A minimal cache for the head's attention: keys and values concatenated, one row."""

    def __init__(self) -> None:
        self.offset = 0
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []

    def make_mask(self, count: int, **_: Any) -> None:
        """Return the mask of one new position."""

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += k.shape[2]
        self.keys.append(k)
        self.values.append(v)
        return mx.concatenate(self.keys, axis=2), mx.concatenate(self.values, axis=2)


def sequential(
    head: Eagle3Head, target: Target, tokens: list[int], g: mx.array, index: int, steps: int
) -> list[mx.array]:
    """Return the head's outputs [H] at `index` and for the next steps: prefill, then feedback one by one."""
    cache: Any = [PlainCache()]
    read = mx.array(tokens[1 : index + 2])[None]
    h = head(target.embed(read), g[:, : index + 1], cache, "causal")[:, -1:]
    outputs = [h[0, 0]]
    for step in range(1, steps):
        token = mx.array([[tokens[index + 1 + step]]])
        h = head(target.embed(token), h, cache, None)
        outputs.append(h[0, 0])
    return outputs


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(seed=3)


@pytest.fixture(scope="module", params=["output", "normed"])
def head(target: Target, request: pytest.FixtureRequest) -> Eagle3Head:
    """A head that feeds back its output, and one that feeds back its final norm's output."""
    plain = tiny_head(target, seed=4)
    head = Eagle3Head(dataclasses.replace(plain.config, norm_output=request.param == "normed"), plain.token_ids)
    head.update(plain.parameters())
    return head


@settings(max_examples=some(12), deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(8, 14))
def test_every_step_equals_inference(target: Target, head: Eagle3Head, seed: int, steps: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, target.vocab_size, (2, length))
    ids = mx.array(tokens, mx.int32)
    aux = target.forward(ids, aux_layers=head.config.aux_layers).aux
    g = head.features(aux)
    count = int(rng.integers(1, length - steps))
    positions = np.sort(rng.permuted(np.tile(np.arange(length - steps), (2, 1)), axis=1)[:, :count], axis=1)
    segments = mx.ones((2, length), mx.int32)
    outputs = unroll(head, Inputs(target.embed(ids), g, segments, mx.array(positions, mx.int32)), steps)
    assert [out.shape for out in outputs] == [(2, count, target.hidden_size)] * steps
    for row in range(2):
        for place, index in enumerate(positions[row]):
            expected = sequential(head, target, tokens[row].tolist(), g[row : row + 1], int(index), steps)
            for step, want in enumerate(expected):
                np.testing.assert_allclose(outputs[step][row, place], want, rtol=2e-4, atol=2e-4)


def test_packed_conversations_do_not_see_each_other(target: Target, head: Eagle3Head) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, target.vocab_size, n) for n in (7, 9)]
    packed = mx.array(np.concatenate([*parts, [0, 0]])[None], mx.int32)
    segments = mx.array([[1] * 7 + [2] * 9 + [0] * 2], mx.int32)
    alone = [head.features(target.forward(mx.array(p)[None], aux_layers=head.config.aux_layers).aux) for p in parts]
    g = mx.concatenate([*alone, mx.zeros((1, 2, target.hidden_size))], axis=1)
    outputs = unroll(head, Inputs(target.embed(packed), g, segments, mx.array([[2, 10, 12]], mx.int32)), 3)
    for place, (part, index) in enumerate([(0, 2), (1, 3), (1, 5)]):
        expected = sequential(head, target, parts[part].tolist(), alone[part], index, 3)
        for step, want in enumerate(expected):
            np.testing.assert_allclose(outputs[step][0, place], want, rtol=2e-4, atol=2e-4)


def test_the_mask_is_causal_within_a_segment() -> None:
    mask = causal_mask(mx.array([[1, 1, 2, 2, 0]]), mx.array([[1, 3]]))
    assert mask.shape == (1, 1, 1, 2, 5)
    np.testing.assert_array_equal(np.array(mask[0, 0, 0]) == 0, [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]])


def test_attention_equals_a_softmax_over_all_keys_together() -> None:
    rng = np.random.default_rng(1)

    def random(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape), mx.float32)

    q, k, v = random(1, 4, 3, 8), random(1, 2, 6, 8), random(1, 2, 6, 8)
    own = [(random(1, 2, 3, 8), random(1, 2, 3, 8)) for _ in range(2)]
    mask = causal_mask(mx.ones((1, 6), mx.int32), mx.array([[1, 3, 5]]))
    out = attend(q, k, v, mask, own)
    for query, index in enumerate((1, 3, 5)):
        keys = mx.concatenate([k[:, :, : index + 1], *(x[:, :, query : query + 1] for x, _ in own)], axis=2)
        values = mx.concatenate([v[:, :, : index + 1], *(x[:, :, query : query + 1] for _, x in own)], axis=2)
        want = mx.fast.scaled_dot_product_attention(q[:, :, query : query + 1], keys, values, scale=1.0)
        np.testing.assert_allclose(out[:, :, query : query + 1], want, rtol=1e-4, atol=1e-5)


def test_rows_are_taken_row_by_row() -> None:
    x = mx.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(take_rows(x, mx.array([[2, 0], [1, 1]]))[:, :, 0], [[8, 0], [16, 16]])
