"""The target's log probabilities of a prompt's own tokens, for completions that echo it with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.row import TokenLogprob
from eagle_mlx.target import Target


def score_prompt(target: Target, tokens: Sequence[int], top: int, chunk: int = 256) -> Iterator[list[TokenLogprob]]:
    """Of each token but the first, given those before it; `chunk` of them at a time, so that others get their turn.

    top: how many of the likeliest to report at each place. Must run in the thread that owns the target.
    """
    cache = RaggedCache.of(target.model, 1)
    for start in range(0, len(tokens) - 1, chunk):
        following = list(tokens[start + 1 : start + 1 + chunk])
        read = mx.array([tokens[start : start + len(following)]], mx.int32)
        logits = target.forward(read, cache).logits[0].astype(mx.float32)
        cache.advance(len(following))
        cache.settle([start + len(following)])
        yield _of(logits, following, min(top, target.vocab_size))


def _of(logits: mx.array, tokens: list[int], top: int) -> list[TokenLogprob]:
    """logits: [L, V] float32; one for each of the L tokens that follow."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = cast(list[float], mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)[:, 0].tolist())
    if not top:
        return [TokenLogprob(token, logprob, ()) for token, logprob in zip(tokens, chosen, strict=True)]
    ids = mx.argsort(-logprobs, axis=-1)[:, :top]
    values = cast(list[list[float]], mx.take_along_axis(logprobs, ids, axis=-1).tolist())
    likeliest = cast(list[list[int]], ids.tolist())
    return [
        TokenLogprob(token, chosen[i], tuple(zip(likeliest[i], values[i], strict=True)))
        for i, token in enumerate(tokens)
    ]
