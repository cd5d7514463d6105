"""Attention in slices of a verify's queries, as Metal's kernel needs them, equals attention in one call."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention

import eagle_mlx as em
from eagle_mlx.attention import queries_at_once, sliced, tiled
from eagle_mlx.cache import RaggedCache
from eagle_mlx.hooks import AttendsInSlices, Hooks, replace_attention
from tests.architectures import tiny_model
from tests.fakes import Oracle, randomize
from tests.full import some

MODELS = ["qwen3", "gpt_oss", "gemma3_text"]


@given(st.integers(1, 4096), st.integers(1, 32), st.sampled_from([64, 80, 96, 128, 192, 256]))
def test_a_slice_stays_within_a_kernel(length: int, sharing: int, width: int) -> None:
    """The bounds are those of mlx's `use_fallback`; a prompt is never sliced."""
    most = queries_at_once(length, sharing, width)
    assert 1 <= most <= length
    if length > 64 or length == 1 or (length > 16 and width in (64, 80, 128)):
        assert most == length
    else:
        assert most <= 8
        assert most * sharing <= 32


@settings(max_examples=some(40), deadline=None)
@given(
    st.integers(2, 20),
    st.integers(0, 9),
    st.sampled_from([(2, 1), (4, 2), (16, 1), (8, 8)]),
    st.sampled_from(["causal", "array", "heads", None]),
    st.booleans(),
)
def test_slices_equal_one_call(length: int, past: int, heads: tuple[int, int], kind: str | None, sinks: bool) -> None:
    mx.random.seed(length * 10 + past)
    queries = mx.random.normal((2, heads[0], length, 96))
    keys, values = mx.random.normal((2, 2, heads[1], past + length, 96))
    seen = mx.arange(past + length) <= (past + mx.arange(length))[:, None]
    masks = {"causal": "causal", "array": seen[None, None], "heads": mx.broadcast_to(seen, (2, heads[0], *seen.shape))}
    how = {"cache": None, "scale": 0.1, "mask": masks.get(kind or ""), "sinks": mx.ones(heads[0]) if sinks else None}
    calls = []

    def counting(queries: mx.array, *args: object, **more: object) -> mx.array:
        calls.append(queries.shape[2])
        return scaled_dot_product_attention(queries, *args, **more)

    found = sliced(counting)(queries, keys, values, **how)  # type: ignore[arg-type]
    assert mx.allclose(found, scaled_dot_product_attention(queries, keys, values, **how), atol=1e-5).item()
    assert sum(calls) == length
    assert max(calls) <= max(1, min(8, 32 * heads[1] // heads[0]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("nodes", [0, 9], ids=["chain", "tree"])
def test_text_with_slices_is_the_text_without(name: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name)
    randomize(model, 0, 0.2)
    target = em.Target(model)
    prompts = [[5, 6, 7, 8, 9], [9, 8, 7]]
    params = em.SamplingParams(max_tokens=20)
    plain = [output.tokens for output in em.Engine(target).generate(prompts, params)]
    monkeypatch.setattr("eagle_mlx.attention.MOST_QUERIES", 3)
    replace_attention(model, Hooks.of(model), AttendsInSlices)
    oracle = Oracle({tuple(p): t for p, t in zip(prompts, plain, strict=True)}, 0.6)
    engine = em.Engine(target, oracle, policy=em.FixedPolicy(6, nodes=nodes))  # type: ignore[arg-type]
    assert [output.tokens for output in engine.generate(prompts, params)] == plain


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
    how = {"cache": cache[0], "scale": 0.3, "mask": cache.lengths.mask(length, window)}

    def never(*args: object, **more: object) -> mx.array:
        raise AssertionError("not in one call")

    found = tiled(never)(queries, keys, values, **how)  # type: ignore[arg-type]
    assert mx.allclose(found, scaled_dot_product_attention(queries, keys, values, **how), atol=1e-5).item()


@pytest.mark.parametrize(
    "changed", ["few queries", "sinks", "a ring", "additive mask", "no cache of ours", "quantized"]
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
    elif changed == "quantized":
        cache = type("Quantized", (), {"bits": 4, "lengths": RaggedCache(1, 1).lengths})()
    calls = []

    def one(*args: object, **more: object) -> mx.array:
        calls.append(args)
        return mx.zeros(1)

    sinks = mx.ones(2) if changed == "sinks" else None
    x = mx.zeros((1, 2, keys, 8))
    tiled(one)(x[:, :, :length], x, x, cache, 1.0, mask, sinks)
    assert len(calls) == 1
