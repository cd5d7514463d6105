"""Attention over tiles of a prompt's queries equals attention in one call."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention

from eagle_mlx.attention import tiled
from eagle_mlx.cache import RaggedCache
from tests.full import some


@settings(max_examples=some(20), deadline=None)
@given(
    st.integers(65, 300),
    st.lists(st.integers(0, 90), min_size=1, max_size=3),
    st.sampled_from([(2, 1), (4, 2), (9, 3), (8, 8)]),
    st.sampled_from([None, 40]),
)
def test_a_prompt_in_tiles_attends_as_in_one_call(
    length: int, past: list[int], heads: tuple[int, int], window: int | None
) -> None:
    """Rows of several lengths whose queries see different keys; a window hides the oldest."""
    mx.random.seed(length)
    cache = RaggedCache(1, len(past))
    cache.lengths.sync(past)
    seen = max(past) + length
    queries = mx.random.normal((len(past), heads[0], length, 16))
    keys, values = mx.random.normal((2, len(past), heads[1], seen, 16))
    options = {"cache": cache[0], "scale": 0.3, "mask": cache.lengths.mask(length, window)}
    output = tiled(never)(queries, keys, values, **options)  # type: ignore[arg-type]
    assert mx.allclose(output, scaled_dot_product_attention(queries, keys, values, **options), atol=1e-5).item()


@pytest.mark.parametrize("heads", [(2, 1), (9, 3)])
def test_conversations_without_a_cache_attend_in_tiles_too(heads: tuple[int, int]) -> None:
    queries = mx.random.normal((2, heads[0], 200, 16), key=mx.random.key(0))
    keys, values = mx.random.normal((2, 2, heads[1], 200, 16), key=mx.random.key(1))
    options = {"cache": None, "scale": 0.3, "mask": "causal"}
    output = tiled(never)(queries, keys, values, **options)  # type: ignore[arg-type]
    assert mx.allclose(output, scaled_dot_product_attention(queries, keys, values, **options), atol=1e-5).item()


def never(*args: object, **more: object) -> mx.array:
    raise AssertionError("not in one call")


@pytest.mark.parametrize(
    "changed",
    [
        "few queries",
        "sinks",
        "a ring",
        "additive mask",
        "no cache of ours",
        "quantized",
        "an image",
        "no mask",
        "earlier keys",
    ],
)
def test_other_attention_is_mlx_lms(changed: str) -> None:
    cache: object = RaggedCache(1, 1)[0]
    length, keys = (64 if changed == "few queries" else 65), 65
    mask = mx.ones((1, 1, length, keys), mx.bool_)
    if changed == "a ring":
        keys += 3
        mask = mx.ones((1, 1, length, keys), mx.bool_)
    elif changed == "additive mask":
        mask = mx.zeros(mask.shape)
    elif changed == "no cache of ours":
        cache = None
    elif changed == "no mask":
        mask = None
    elif changed == "earlier keys":
        cache, mask, keys = None, "causal", 70
    elif changed == "quantized":
        cache = type("Quantized", (), {"bits": 4, "lengths": RaggedCache(1, 1).lengths})()
    elif changed == "an image":  # its tokens see later ones, too
        cache.lengths.see_blocks([(0, 9)])  # type: ignore[attr-defined]
    calls = []

    def one(*args: object, **more: object) -> mx.array:
        calls.append(args)
        return mx.zeros(1)

    sinks = mx.ones(2) if changed == "sinks" else None
    x = mx.zeros((1, 2, keys, 8))
    tiled(one)(x[:, :, :length], x, x, cache, 1.0, mask, sinks)
    assert len(calls) == 1
