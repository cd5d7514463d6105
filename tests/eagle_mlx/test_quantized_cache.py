"""Quantized keys and values: the same as mlx-lm's, for any drafts and other rows."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3
from mlx_lm.models.cache import QuantizedKVCache

import eagle_mlx as em
from eagle_mlx.errors import ConfigError, TargetError
from tests.architectures import tiny_model
from tests.eagle_mlx.heads import IN_BLOCKS
from tests.fakes import Oracle, randomize, tiny_config, tiny_head
from tests.full import diagonal, in_full


def target(head_dim: int = 64) -> em.Target:
    model = qwen3.Model(qwen3.ModelArgs(**{**tiny_config(), "head_dim": head_dim}))  # type: ignore[arg-type]
    randomize(model, 0, 0.2)
    return em.Target(model)


TARGET = target()
PROMPTS = [[1, 2, 3, 4, 5], [9, 8], list(range(3, 40)), [7, 8, 7, 8, 7, 8]]
MARGIN = 1e-3


@cache
def mlx_lms_own(prompt: tuple[int, ...], bits: int) -> list[int]:
    """Decode with mlx-lm up to the first token that rounding could change."""
    caches = [QuantizedKVCache(group_size=64, bits=bits) for _ in TARGET.model.layers]
    tokens = []
    for (token, logprobs), _ in zip(
        generate_step(mx.array(prompt), TARGET.model, prompt_cache=caches), range(24), strict=False
    ):
        best = np.sort(np.array(logprobs))[-2:]
        if best[1] - best[0] < MARGIN:
            break
        tokens.append(int(token))
    return tokens


BLOCKS = list(IN_BLOCKS)


@pytest.mark.parametrize(("max_batch", "bits", "kinds"), diagonal([1, 3], [8, 4], [BLOCKS[:2], BLOCKS[2:]]))
def test_text_is_mlx_lms_own_with_such_a_cache(bits: int, max_batch: int, kinds: list[str]) -> None:
    params, prompts = em.SamplingParams(max_tokens=24), in_full(PROMPTS, PROMPTS[::2])
    plain = [o.tokens for o in em.Engine(TARGET, max_batch=1, kv_bits=bits).generate(prompts, params)]
    expected = [mlx_lms_own(tuple(prompt), bits) for prompt in prompts]
    assert sum(map(len, expected)) > 40
    assert [a[: len(b)] for a, b in zip(plain, expected, strict=True)] == expected
    texts = {tuple(prompt): text for prompt, text in zip(prompts, plain, strict=True)}
    heads = [em.HeadProposer(make(TARGET)) for make in (tiny_head, *(IN_BLOCKS[kind] for kind in kinds))]
    for proposer in (Oracle(texts, 0.0), Oracle(texts, 0.4), *heads):
        engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(3), max_batch=max_batch, kv_bits=bits)
        assert [o.tokens for o in engine.generate(prompts, params)] == plain


def test_quantized_caches_are_reused() -> None:
    params = em.SamplingParams(max_tokens=12)
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), prefix_cache_bytes=1 << 30, kv_bits=8)
    whole = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), prefix_cache_bytes=1 << 30)
    [first] = engine.generate([PROMPTS[2]], params)
    whole.generate([PROMPTS[2]], params)
    assert engine.prefixes is not None
    assert whole.prefixes is not None
    assert engine.prefixes.nbytes < 0.5 * whole.prefixes.nbytes
    prompt = [*PROMPTS[2], *first.tokens, 5, 6]
    [again] = engine.generate([prompt], params)
    assert again.cached_tokens == len(prompt) - 3
    assert again.tokens == em.Engine(TARGET, kv_bits=8).generate([prompt], params)[0].tokens


def test_unquantizable_models_are_refused_when_the_engine_is_built() -> None:
    with pytest.raises(ConfigError, match="kv_bits must be 4, 8 or None; got 3"):
        em.Engine(TARGET, kv_bits=3)
    with pytest.raises(TargetError, match="heads of 16 and 16 numbers"):
        em.Engine(target(head_dim=16), kv_bits=4)
    with pytest.raises(TargetError, match="mamba2 have no cache that kv_bits can quantize"):
        em.Engine(em.Target(tiny_model("mamba2")), kv_bits=4)
