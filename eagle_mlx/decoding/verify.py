"""Acceptance rules for draft tokens: pure functions over a batch of rows. All but one are lossless."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.decoding.draft import Branches, Tree, walk
from eagle_mlx.decoding.noise import uniform_noise
from eagle_mlx.decoding.sampling import SamplingBatch, Stream, distribution, filtered, gumbel, sample


@dataclass(frozen=True)
class Verdict:
    """The result of a verify: row b emits tokens[b, : accepted[b] + 1]."""

    accepted: mx.array  # [B] int32, accepted draft tokens
    tokens: mx.array  # [B, n+1] int32: the accepted drafts, the target's own token, then anything
    path: mx.array | None = None  # [B, levels + 1] int32, in a tree the nodes after which `tokens` come


def verify(
    logits: mx.array, drafts: mx.array, lengths: mx.array, q: mx.array | None, batch: SamplingBatch, positions: mx.array
) -> Verdict:
    """Accept drafts by each row's own rule; rows with different rules may share the batch.

    logits: [B, n+1, V], the target's, after the last token and after each draft; drafts: [B, n] int32, any valid id
    from `lengths` on; lengths: [B] int32, drafts per row, 0 allowed; q: [B, n, V] float32, the distributions from which
    rejection rows' drafts were drawn with their own noise (`Stream.DRAFT`), None if the proposer has none; positions:
    [B, n+1] int32, of the tokens being drawn.
    """
    if drafts.shape[1] == 0 or batch.rules <= {"greedy", "coupled"}:
        return match(sample(logits, batch, positions), drafts, lengths)
    logits, batch = filtered(logits, batch)
    p = distribution(logits, batch)
    verdict = None
    if "rejection" in batch.rules:
        # Each round starts at a new position, so its noise, keyed by that position, has never been used.
        noise = gumbel(batch, positions[:, :1], logits.shape[-1])
        u = uniform_noise(batch.keys[:, Stream.ACCEPT], positions[:, :-1])
        verdict = rejection(p, q, drafts, lengths, u, noise)
    if batch.rules != {"rejection"}:
        samples = sample(logits, batch, positions)
        others = match(samples, drafts, lengths)
        if "threshold" in batch.rules:
            kept = threshold(p, samples, drafts, lengths, batch.thresholds)
            others = _chosen(batch.thresholds <= 1, kept, others)
        verdict = others if verdict is None else _chosen(batch.rejects, verdict, others)
    assert verdict is not None
    return verdict


def verify_tree(
    logits: mx.array,
    drafts: mx.array,
    valid: mx.array,
    tree: Tree,
    branches: Branches,
    batch: SamplingBatch,
    first: mx.array,
) -> Verdict:
    """Verify a tree by the greedy or coupled rule: accept the drafted part of the target's own text.

    logits: [B, n+1, V]; drafts: [B, n] int32; valid: [B, n] bool, the drafts that are real; first: [B] int32, the
    position of the first token being drawn. The verdict's `tokens` are [B, levels + 1].
    """
    levels = first[:, None] + mx.arange(tree.levels + 1, dtype=mx.int32)
    samples = sample(logits, batch, levels, branches.depths)  # one draw per depth, not per node
    nodes, accepted = walk(samples, drafts, valid, tree, branches)
    return Verdict(accepted, mx.take_along_axis(samples, nodes, axis=1), nodes)


def _chosen(rows: mx.array, these: Verdict, those: Verdict) -> Verdict:
    return Verdict(mx.where(rows, these.accepted, those.accepted), mx.where(rows[:, None], these.tokens, those.tokens))


def match(samples: mx.array, drafts: mx.array, lengths: mx.array) -> Verdict:
    """Accept a draft if it is the target's own sample (greedy and coupled), so that the samples are emitted. samples:
    [B, n+1] int32, from `sample`; drafts: [B, n] int32; lengths: [B] int32."""
    return Verdict(_leading(samples[:, :-1] == drafts, lengths), samples)


def rejection(
    p: mx.array, q: mx.array | None, drafts: mx.array, lengths: mx.array, u: mx.array, gumbel: mx.array
) -> Verdict:
    """Accept draft x with probability min(1, p(x) / q(x)); at the first rejection, draw from max(p - q, 0).

    If all drafts are accepted, the next token is drawn from p. Emitted tokens follow p (Leviathan et al. 2023,
    algorithm 1; Chen et al. 2023, theorem 1), provided that drafts, `u` and `gumbel` are independent.

    p: [B, n+1, V] float32; q: [B, n, V] float32, None for deterministic drafts (one-hot q); drafts: [B, n] int32, n at
    least 1; lengths: [B] int32; u: [B, n] float32 in [0, 1); gumbel: [B, n+1, V] or [B, 1, V] float32.
    """
    p_draft = mx.take_along_axis(p[:, :-1], drafts[..., None], axis=-1)[..., 0]
    q_draft = 1.0 if q is None else mx.take_along_axis(q, drafts[..., None], axis=-1)[..., 0]
    accepted = _leading(u * q_draft < p_draft, lengths)

    target = _at(p, accepted)
    proposed = mx.arange(p.shape[-1]) == _at(drafts, accepted)[:, None] if q is None else _at(q, accepted)
    refused = (accepted < lengths)[:, None]
    residual = mx.maximum(target - mx.where(refused, proposed, 0.0), 0.0)
    # If p and q are equal up to rounding, the residual may be empty; p serves as well then.
    weights = mx.where(mx.max(residual, axis=-1, keepdims=True) > 0, residual, target)
    token = mx.argmax(mx.log(weights) + _at(gumbel, accepted), axis=-1).astype(mx.int32)[:, None]

    keep = mx.arange(drafts.shape[1] + 1) < accepted[:, None]
    return Verdict(accepted, mx.where(keep, mx.concatenate([drafts, token], axis=1), token))


def threshold(p: mx.array, samples: mx.array, drafts: mx.array, lengths: mx.array, least: mx.array) -> Verdict:
    """**Not lossless**: accept drafts with at least the given probability, then the target's own sample.

    p: [B, n+1, V] float32; samples: [B, n+1] int32, from `sample`; drafts: [B, n] int32; lengths: [B] int32; least: [B]
    float32. This is typical acceptance (Cai et al. 2024, Medusa, section 2.3.1) without its entropy term.
    """
    likely = mx.take_along_axis(p[:, :-1], drafts[..., None], axis=-1)[..., 0] >= least[:, None]
    accepted = _leading(likely, lengths)
    keep = mx.arange(samples.shape[1]) < accepted[:, None]
    return Verdict(accepted, mx.where(keep, mx.concatenate([drafts, samples[:, -1:]], axis=1), samples))


def _leading(passed: mx.array, lengths: mx.array) -> mx.array:
    """Return how many of each row's first `lengths` tests pass before one fails. passed: [B, n] bool."""
    if passed.shape[1] == 0:
        return lengths
    return mx.min(mx.where(passed, lengths[:, None], mx.arange(passed.shape[1], dtype=mx.int32)), axis=1)


def _at(x: mx.array, index: mx.array) -> mx.array:
    """Return x[b, min(index[b], last)] for each row b. x: [B, n, ...]; index: [B] int32."""
    return x[mx.arange(x.shape[0]), mx.minimum(index, x.shape[1] - 1)]
