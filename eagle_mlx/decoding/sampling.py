"""The distribution that sampling parameters define, draws from it that depend only on seed and position, and the log
probabilities of emitted tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from typing import Any, cast

import mlx.core as mx
import numpy as np

from eagle_mlx.decoding.filters import Filters
from eagle_mlx.decoding.noise import gumbel_noise, noise_words, noisy_argmax
from eagle_mlx.request import TokenLogprob
from eagle_mlx.sampling_params import Rule, SamplingParams


class Stream(IntEnum):
    """The purpose of noise; draws of different streams are independent."""

    TOKEN = 0
    DRAFT = 1  # in coupled rows, the same noise as TOKEN
    ACCEPT = 2  # the rejection test's uniforms


DraftChanges = Callable[[mx.array, Sequence[mx.array], mx.array | None], mx.array]
"""Penalties and biases for a proposer's logits, as `Processors.change_draft`."""


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of B requests as arrays, and what lets the host skip work that no row needs."""

    temperature: mx.array  # [B] float32, 0 in greedy rows, whose filters are off
    filters: Filters
    keys: mx.array  # [B, len(Stream), 2] uint32
    rejects: mx.array  # [B] bool, rows with the rejection rule
    thresholds: mx.array  # [B] float32, infinite unless the row has the threshold rule, which is not lossless
    rules: frozenset[Rule]  # the acceptance rules of all rows
    any_filtered: bool
    changes: DraftChanges | None = None  # None if no row has penalties or biases

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int]) -> SamplingBatch:
        """Collect the rows' parameters. `seeds`: every row's seed, including those that the requests did not set."""
        rules, filters = [row.rule for row in params], Filters.of(params)
        return cls(
            temperature=mx.array([0.0 if row.rule == "greedy" else row.temperature for row in params], mx.float32),
            filters=filters,
            keys=mx.array(_stream_keys(seeds, rules)),
            rejects=mx.array([rule == "rejection" for rule in rules], mx.bool_),
            thresholds=mx.array([p.threshold if p.rule == "threshold" else math.inf for p in params], mx.float32),
            rules=frozenset(rules),
            any_filtered=filters.any,
        )

    @property
    def all_greedy(self) -> bool:
        return self.rules <= {"greedy"}


def _stream_keys(seeds: Sequence[int], rules: Sequence[Rule]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """Return the keys [B, len(Stream), 2] of rows; similar seeds and different streams share no structure."""
    digests = [blake2b((seed % 2**64).to_bytes(8, "little"), digest_size=8 * len(Stream)).digest() for seed in seeds]
    keys = np.frombuffer(b"".join(digests), "<u4").astype(np.uint32).reshape(-1, len(Stream), 2)
    coupled = np.array([rule == "coupled" for _, rule in zip(seeds, rules, strict=True)], bool)
    keys[coupled, Stream.DRAFT] = keys[coupled, Stream.TOKEN]
    return keys


def gumbel(batch: SamplingBatch, positions: mx.array, vocab: int, stream: Stream = Stream.TOKEN) -> mx.array:
    """Return finite standard Gumbel noise [B, n, vocab] float32 for every token at positions [B, n] int32."""
    return gumbel_noise(batch.keys[:, stream], positions, mx.arange(vocab))


def filtered(logits: mx.array, batch: SamplingBatch) -> tuple[mx.array, SamplingBatch]:
    """Return logits [B, n, V] with minus infinity for the tokens that filters remove, and the batch without filters."""
    return _filtered(logits, batch), replace(batch, any_filtered=False)


def distribution(logits: mx.array, batch: SamplingBatch) -> mx.array:
    """Return the probabilities that each row's parameters define for logits [B, n, V], as float32 of the same shape.
    Greedy rows are one-hot at the argmax. At least one token has a positive probability."""
    if batch.all_greedy:
        return _one_hot_argmax(logits)
    probs = mx.softmax(_filtered(logits, batch) / _divisor(batch), axis=-1)
    if "greedy" not in batch.rules:
        return probs
    return mx.where(batch.temperature[:, None, None] == 0, _one_hot_argmax(logits), probs)


def sample(
    logits: mx.array,
    batch: SamplingBatch,
    positions: mx.array,
    levels: mx.array | None = None,
    stream: Stream = Stream.TOKEN,
    token_ids: mx.array | None = None,
) -> mx.array:
    """Return the token that plain decoding emits after each position's logits, by the Gumbel-max trick.

    It depends, bit for bit, only on the row's own logits, parameters, seed and position.

    logits: [B, n, V]; positions: [B, n] int32, of the tokens being drawn; levels: [B, n] int32, indices into the
    positions, if several tokens are drawn at one; token_ids: [V] int32, if V is not the target's vocabulary. Returns
    [B, n] int32, indices into V.
    """
    if batch.all_greedy:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    logits = _filtered(logits, batch) if batch.any_filtered else logits
    words = noise_words(batch.keys[:, stream], positions)
    return noisy_argmax(logits, batch.temperature, words, token_ids, levels)


def draft_sample(
    logits: mx.array, batch: SamplingBatch, positions: mx.array, vocab: int, token_ids: mx.array | None = None
) -> tuple[mx.array, mx.array | None]:
    """Return a proposer's tokens at the given positions, and the probabilities that they were drawn from.

    Coupled rows share the target's noise token by token; rejection rows have a stream of their own.

    logits: [B, n, Vd]; positions: [B, n] int32; vocab: the target's V; token_ids: [Vd] int32, the target's id of each
    draft id, None if they are equal. Returns tokens [B, n] int32 in the target's ids, and q [B, n, V] float32, None if
    no row needs it.
    """
    rejects = "rejection" in batch.rules
    logits, rest = filtered(logits, batch) if rejects else (logits, batch)
    tokens = sample(logits, rest, positions, stream=Stream.DRAFT, token_ids=token_ids)
    q = distribution(logits, rest) if rejects else None
    if token_ids is None:
        return tokens, q
    if q is not None:
        q = mx.put_along_axis(mx.zeros((*q.shape[:-1], vocab)), mx.broadcast_to(token_ids, q.shape), q, axis=-1)
    return token_ids[tokens], q


def draft_scores(
    logits: mx.array, batch: SamplingBatch, positions: mx.array, vocab: int, token_ids: mx.array | None = None
) -> mx.array:
    """Return scores of how likely the target is to draw each token, as unnormalized log probabilities.

    The largest is that of `draft_sample`'s token. In coupled rows the target's noise is known and included. Arguments
    as in `draft_sample`, but positions may be [B, 1] if all n are the same. Returns [B, n, Vd] float32, in draft ids.
    """
    scores = _filtered(logits, batch)
    if batch.all_greedy:
        return scores
    tokens = mx.arange(vocab) if token_ids is None else token_ids
    noise = gumbel_noise(batch.keys[:, Stream.DRAFT], positions, tokens)
    return scores / _divisor(batch) + mx.where(batch.temperature[:, None, None] > 0, noise, 0.0)


def surprise_of(logits: mx.array, batch: SamplingBatch) -> mx.array:
    """Return minus the log probability of the most likely token, at each row's temperature (1 in greedy rows). Filters
    are ignored. logits: [B, n, Vd]. Returns [B, n] float32, 0 if the token is certain."""
    logits = logits.astype(mx.float32)  # in bfloat16, a confidence of 0.992 would be 1
    scores = logits if batch.all_greedy else logits / _divisor(batch)
    return mx.logsumexp(scores, axis=-1) - mx.max(scores, axis=-1)


def _one_hot_argmax(logits: mx.array) -> mx.array:
    best = mx.argmax(logits, axis=-1, keepdims=True)
    return (mx.arange(logits.shape[-1]) == best).astype(mx.float32)


def _divisor(batch: SamplingBatch) -> mx.array:
    """Return the temperatures, [B, 1, 1], with 1 in greedy rows."""
    return mx.where(batch.temperature > 0, batch.temperature, 1.0)[:, None, None]


def _filtered(logits: mx.array, batch: SamplingBatch) -> mx.array:
    return batch.filters.apply(logits, _divisor(batch)) if batch.any_filtered else logits.astype(mx.float32)


@dataclass(frozen=True)
class Logprobs:
    """The log probabilities of M rows of a verify, on the device."""

    tops: dict[int, int]  # the rows' indices in the batch, and how many of the likeliest tokens each requests
    arrays: tuple[mx.array, mx.array, mx.array]  # from `logprobs_of`, each [M, n+1, ...]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], logits: mx.array, tokens: mx.array) -> Logprobs:
        """Compute them for the rows that request them, at least one. logits: [B, n+1, V]; tokens: [B, n+1] int32."""
        tops = {row: own.top_logprobs for row, own in enumerate(params) if own.wants_logprobs}
        if len(tops) < len(params):
            logits, tokens = logits[mx.array(list(tops))], tokens[mx.array(list(tops))]
        return cls(tops, logprobs_of(logits, tokens, max(tops.values())))

    def read(self, tokens: Sequence[Sequence[int]]) -> dict[int, list[TokenLogprob]]:
        """Wait for them; return one for each emitted token, by row. tokens: each row's emitted tokens."""
        scores = zip(*(cast(list[Any], x.tolist()) for x in self.arrays), strict=True)
        return {row: listed(tokens[row], own, top) for (row, top), own in zip(self.tops.items(), scores, strict=True)}


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


def listed(tokens: Sequence[int], scores: Sequence[Any], top: int) -> list[TokenLogprob]:
    """Return one entry for each token. scores: the lists of `logprobs_of`, which may cover more tokens."""
    chosen, ids, values = scores
    return [
        TokenLogprob(token, chosen[i], tuple(zip(ids[i][:top], values[i][:top], strict=True)))
        for i, token in enumerate(tokens)
    ]
