"""A round: draft, verify and commit on the device, then collect on the host or cancel."""

from __future__ import annotations

from enum import IntEnum
from time import perf_counter
from typing import Any, cast

import mlx.core as mx

from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.logprobs import Logprobs
from eagle_mlx.decoding.verify import Verdict, cut_at_nan
from eagle_mlx.engine.batch import Batch
from eagle_mlx.plan import PLAIN, Plan, RoundResult
from eagle_mlx.proposers.base import Observation


class NaN(IntEnum):
    """The positions at which a row's logits of a round are NaN."""

    NOWHERE = 0
    REJECTED = 1  # only at positions from which no token is emitted
    KEPT = 2  # at a position from which a token would be emitted
    PROCESSED = 3  # the same, but only because a logits processor returned NaN


class Round:
    """One round of a batch with a plan. It is dispatched, and then either collected or canceled."""

    def __init__(self, batch: Batch, plan: Plan, group: int = 0):
        """`group`: the batch's group number, for the policy."""
        self.batch, self.plan, self.group = batch, plan, group
        self.before = batch.checkpoint()
        """The batch's state before the round."""
        self.ahead = 0.0
        """Seconds of its dispatch during another round. They count for this round, not for the other one."""
        self.draft_seconds: float | None = None
        """Seconds of drafting, if measured."""
        self._answer: list[mx.array]
        """On the device, all int32: [B] a `NaN`; [B] accepted drafts, -1 if the row skips the round; [B] draft tokens
        of a chain or levels of a tree; [B, n+1] tokens; for trees also [B, n+1] nodes, where 0 is the last token.
        """
        self._logprobs: Logprobs | None
        self._aux: tuple[mx.array, ...]
        """Hidden states of the proposer's aux layers at the answer's tokens, each [B, n+1, H]."""
        self._draft: Draft

    def dispatch(self, measured: bool = False) -> None:
        """Start the round. The host waits only for an early exit's confidences, or for a `measured` draft."""
        batch, started = self.batch, perf_counter()
        draft = batch.draft(self.plan)
        if batch.state is None:
            self.plan = PLAIN
        if measured:
            mx.eval(draft.tokens)
            self.draft_seconds = perf_counter() - started
        out = batch.forward(draft)
        verdict = batch.verify(out.logits, draft)
        if draft.tokens.shape[1]:
            verdict = cut_at_nan(verdict, mx.any(mx.isnan(out.logits), axis=-1), may_reread=draft.lengths > 0)
        spoiled = batch.processors.spoiled if batch.processors else None
        drafted = draft.lengths if draft.tree is None else mx.minimum(draft.lengths, draft.tree.levels)
        path = [] if verdict.path is None else [verdict.path]
        self._answer = [_nan_in(out.logits, verdict, spoiled), verdict.accepted, drafted, verdict.tokens, *path]
        self._draft = draft
        outputs = (out.logits, *out.aux)
        if verdict.path is not None:
            outputs = tuple(mx.take_along_axis(x, verdict.path[..., None], axis=1) for x in outputs)
        logits, self._aux = outputs[0], outputs[1:]
        self._logprobs = Logprobs.of(batch.requests, logits, verdict.tokens) if batch.wants_logprobs else None
        mx.async_eval(*self._answer, *self._aux, *(self._logprobs.arrays if self._logprobs else ()))
        batch.commit(verdict, self.before)  # after the answer, which does not wait for a recurrent state
        mx.async_eval(batch.newest, [state.state for state in batch.cache.recurrent])

    def collect(self) -> RoundResult:
        """Wait for the round and give every request its tokens. Only here does the host read from the device.

        The result's seconds are not set yet.
        """
        mx.eval(self._answer)
        batch, requests = self.batch, self.batch.requests
        nan, accepted, drafted, tokens, *nodes = [cast(list[Any], x.tolist()) for x in self._answer]
        emitted = [row[: count + 1] for row, count in zip(tokens, accepted, strict=True)]  # nothing if -1 are accepted
        drafted = [count if row else 0 for count, row in zip(drafted, emitted, strict=True)]
        steps = nodes[0] if nodes else [[]] * len(accepted)
        paths = [[node - 1 for node in row[1 : count + 1]] for row, count in zip(steps, accepted, strict=True)]
        batch.cache.keep(paths, [request.length for request in requests])
        logprobs = self._logprobs.read(emitted) if self._logprobs else {}
        taken = []
        for index, request in enumerate(requests):
            if nan[index] == NaN.KEPT:
                request.fail("the model's logits are not numbers (NaN)")
            elif nan[index] == NaN.PROCESSED:
                request.fail("a logits processor returned NaN; use minus infinity for tokens that are not allowed")
            taken.append(request.take(emitted[index], drafted[index], logprobs.get(index, ())))
            if nan[index] == NaN.REJECTED:
                judges = request.params.rule == "rejection" and not request.pending
                pending = self._draft.unjudged(index, emitted[index]) if judges else None
                request.reread(without_draft=not emitted[index], pending=pending)  # the draft may be the cause
                batch.cache.zero(index, request.length)
        reread = [found == NaN.REJECTED and not row for found, row in zip(nan, emitted, strict=True)]
        if any(reread):  # rare; done here so that no round must select states on the device
            batch.cache.put_back(mx.array(reread), self.before.cache)
        if self._draft.tokens.shape[1] or not all(emitted):
            batch.cache.sync([request.length for request in requests])
        if batch.state is not None and any(emitted):
            aux = tuple(map(mx.nan_to_num, self._aux)) if any(nan) else self._aux
            batch.state.observe(Observation(emitted, aux))
        return RoundResult(
            self.plan,
            drafted=drafted,
            accepted=[max(0, count) for count in accepted],
            taken=taken,
            seconds=0.0,
            draft_seconds=self.draft_seconds,
            paths=paths if self.plan.is_tree else (),
            confidences=self._draft.confidences,
            group=self.group,
            trials=batch.trials(),
        )

    def cancel(self) -> None:
        """Undo the round. It must be the newest of its batch."""
        self.batch.restore(self.before)


def _nan_in(logits: mx.array, verdict: Verdict, spoiled: mx.array | None) -> mx.array:
    """Return [B] int32, a `NaN` per row. logits: [B, n+1, V]; spoiled: [B, n+1] bool, never for a tree."""
    nan = mx.any(mx.isnan(logits), axis=-1) if verdict.nan is None else verdict.nan
    said = nan if verdict.path is None else mx.take_along_axis(nan, verdict.path, axis=1)
    emitted = mx.arange(said.shape[1]) <= verdict.accepted[:, None]
    found = mx.any(nan, axis=1).astype(mx.int32) + mx.any(said & emitted, axis=1).astype(mx.int32)
    if spoiled is None:
        return found
    return mx.where((found < NaN.KEPT) & mx.any(spoiled & emitted, axis=1), int(NaN.PROCESSED), found)
