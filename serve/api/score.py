"""The target's log probabilities of a prompt's own tokens, for completions that echo it with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.decoding.logprobs import listed, logprobs_of
from eagle_mlx.request import TokenLogprob
from eagle_mlx.target import Target


def score_prompt(target: Target, tokens: Sequence[int], top: int, chunk: int = 256) -> Iterator[list[TokenLogprob]]:
    """Of each token but the first, given those before it; `chunk` of them at a time, so that others get their turn.

    top: how many of the likeliest to report at each place. Must run in the thread that owns the target.
    """
    cache = RaggedCache.of(target.model, 1)
    for start in range(0, len(tokens) - 1, chunk):
        following = list(tokens[start + 1 : start + 1 + chunk])
        read = mx.array([tokens[start : start + len(following)]], mx.int32)
        logits = target.forward(read, cache).logits[0]
        cache.advance(len(following))
        cache.sync([start + len(following)])
        chosen, ids, values = logprobs_of(logits, mx.array(following, mx.int32), top)
        yield listed(
            following,
            cast(list[float], chosen.tolist()),
            cast(list[list[int]], ids.tolist()),
            cast(list[list[float]], values.tolist()),
            top,
        )
