"""The target's log probabilities of emitted tokens, for the rows that request them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from eagle_mlx.request import TokenLogprob
from eagle_mlx.request_state import RequestState


@dataclass(frozen=True)
class Logprobs:
    """The log probabilities of M rows of a verify, on the device."""

    rows: list[int]  # indices in the batch
    tops: list[int]  # the number of most likely tokens that each row requests
    chosen: mx.array  # [M, n+1] float32, for the verdict's tokens
    ids: mx.array  # [M, n+1, K] int32, the most likely tokens in descending order
    values: mx.array  # [M, n+1, K] float32

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.chosen, self.ids, self.values

    @classmethod
    def of(cls, requests: Sequence[RequestState], logits: mx.array, tokens: mx.array) -> Logprobs | None:
        """Compute the log probabilities; None if no row requests them. logits: [B, n+1, V]; tokens: [B, n+1] int32."""
        places = [index for index, request in enumerate(requests) if request.params.wants_logprobs]
        if not places:
            return None
        if len(places) < len(requests):
            logits, tokens = logits[mx.array(places)], tokens[mx.array(places)]
        tops = [requests[index].params.top_logprobs for index in places]
        return cls(places, tops, *logprobs_of(logits, tokens, max(tops)))

    def read(self, tokens: Sequence[Sequence[int]]) -> dict[int, list[TokenLogprob]]:
        """Wait for them; return one for each emitted token, by row. tokens: each row's emitted tokens."""
        chosen, ids, values = (cast(list[Any], x.tolist()) for x in self.arrays)
        return {
            row: listed(tokens[row], chosen[m], ids[m], values[m], top)
            for m, (row, top) in enumerate(zip(self.rows, self.tops, strict=True))
        }


def logprobs_of(logits: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return log probabilities of tokens [...] int32, and of the most likely tokens, under logits [..., V].

    Returns the tokens' log probabilities [...], and the ids [..., K] int32 and log probabilities [..., K] of the most
    likely tokens in descending order, with K = min(top, V); log probabilities are float32.
    """
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    count = min(top, logits.shape[-1])
    if not count:
        none = mx.zeros((*logprobs.shape[:-1], 0))
        return chosen, none.astype(mx.int32), none
    ids = mx.argpartition(-logprobs, count - 1, axis=-1)[..., :count]
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return chosen, mx.take_along_axis(ids, order, axis=-1).astype(mx.int32), mx.take_along_axis(values, order, axis=-1)


def listed(
    tokens: Sequence[int],
    chosen: Sequence[float],
    ids: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
    top: int,
) -> list[TokenLogprob]:
    """Return one entry for each token, from the values of `logprobs_of` on the host, which may cover more tokens."""
    return [
        TokenLogprob(token, chosen[i], tuple(zip(ids[i][:top], values[i][:top], strict=True)))
        for i, token in enumerate(tokens)
    ]
