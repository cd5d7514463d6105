"""A batch of requests that decode together, and its rounds: draft, verify and commit on the device, then collect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from time import perf_counter
from typing import Any, cast

import mlx.core as mx

from eagle_mlx.cache import RaggedCache, without_row
from eagle_mlx.decoding.draft import Draft, Tree, chains
from eagle_mlx.decoding.processors import Processors
from eagle_mlx.decoding.sampling import Logprobs, SamplingBatch
from eagle_mlx.decoding.verify import Verdict, verify, verify_tree
from eagle_mlx.engine.collector import Collector
from eagle_mlx.engine.prefix import Prefix
from eagle_mlx.engine.prefix_tree import Past
from eagle_mlx.errors import require
from eagle_mlx.plan import MATCH, PLAIN, Plan, RoundResult
from eagle_mlx.proposers.base import Observation, Proposer, ProposerState, check_draft
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import Drafter
from eagle_mlx.target import Forward, Target
from eagle_mlx.vision.spans import positions_shift

log = logging.getLogger("eagle_mlx.engine")


class NaN(IntEnum):
    """The positions at which a row's logits of a round are NaN."""

    NOWHERE = 0
    REJECTED = 1  # only at positions from which no token is emitted
    KEPT = 2  # at a position from which a token would be emitted
    PROCESSED = 3  # the same, but only because a logits processor returned NaN


_NAN_ERRORS = {
    NaN.KEPT: "the model's logits are not numbers (NaN)",
    NaN.PROCESSED: "a logits processor returned NaN; use minus infinity for tokens that are not allowed",
}


class Batch:
    """Requests with their KV caches and proposer state. Row i of every array belongs to `requests[i]`."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        requests: Sequence[RequestState],
        past: Prefix | None = None,
        kv_bits: int | None = None,
        collector: Collector | None = None,
    ):
        """`past`: the cached prefix of a single request's prompt. The batch takes ownership of it."""
        self.target, self.proposer = target, proposer
        self.requests, self.collector = list(requests), collector
        texts = [request.text for request in requests]
        self.cache = past.cache if past else RaggedCache.of(target.model, len(texts), kv_bits)
        self.cache.lengths.shift([positions_shift(request.request.images) for request in requests])
        self.state: ProposerState | None = past.state if past and proposer else None
        """None without a proposer, and after it raised, until the texts have been read again."""
        if self.state is None and proposer:
            self.state = proposer.open(texts)
            require(f"what {type(proposer).__name__}.open returns", self.state, ProposerState, "a ProposerState")
            if past and past.draft is not None:
                self.state.resume(past.draft)
        if self.state is not None:
            self.state.enter([request.request.namespace if request.params.memory else None for request in requests])
        self._gather()
        self.newest = mx.array([text[-1:] for text in texts], mx.int32).reshape(-1, 1)
        """[B, 1] int32: the newest token of each row, not yet in the caches."""

    def _gather(self) -> None:
        self.params = [request.params for request in self.requests]
        self.sampling = SamplingBatch.of(self.params, [request.request.seed for request in self.requests])
        self.has_images = any(request.request.images for request in self.requests)
        self.wants_logprobs = any(params.wants_logprobs for params in self.params)
        self.processors = Processors.of(self.requests, self.target.vocab_size)
        if self.processors is not None and self.processors.on_device:
            self.sampling = replace(self.sampling, changes=self.processors.change_draft)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Those that the proposer reads, and then those that only the collector does."""
        own = self.proposer.aux_layers if self.proposer is not None and self.state is not None else ()
        return own if self.collector is None else self.collector.layers_with(own)

    def observe(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        aux: Sequence[mx.array],
        in_prompts: bool = False,
        embeddings: mx.array | None = None,
    ) -> None:
        """Let collector and proposer observe `aux_layers` at `counts` positions from `starts`, and the next tokens."""
        if self.collector is not None:
            self.collector.see(self.requests, starts, counts, self.aux_layers, aux)
        if self.state is not None and self.proposer is not None:
            observe = self.state.prefill if in_prompts else self.state.observe
            observe(Observation(tokens, tuple(aux[: len(self.proposer.aux_layers)]), embeddings))

    @property
    def draft_cache(self) -> RaggedCache | None:
        """The cache of the draft model, if one drafts, alone or together with n-grams."""
        return self.state.draft_cache if self.state is not None else None

    @property
    def caches(self) -> list[RaggedCache]:
        return [self.cache, *([self.draft_cache] if self.draft_cache is not None else [])]

    def drafters(self, default: Drafter | None) -> list[Drafter | None]:
        """Return what may draft for each request. `default`: `Engine.drafter`."""
        return [request.params.drafter or default for request in self.requests]

    def rooms(self, plan: Plan, drafters: Sequence[Drafter | None]) -> list[int]:
        """Return the useful draft tokens per request; 0 if it excludes what drafts for it in the plan."""
        lookups, state = plan.lookups or [0] * len(drafters), self.state
        rows = zip(self.requests, drafters, map(bool, lookups), strict=True)
        return [
            request.room
            * bool((lookup and request.forced.draft) or (state is not None and state.may_draft(drafter, lookup)))
            for request, drafter, lookup in rows
        ]

    def sources(self, drafters: Sequence[Drafter | None]) -> tuple[int, ...]:
        """Return `Context.sources` of the next round."""
        matches = (self.state.matches(drafters) if self.state is not None else ()) or [0] * len(self.requests)
        rows = zip(self.requests, matches, strict=True)
        sources = tuple(request.forced.likely or MATCH * match for request, match in rows)
        return sources if any(sources) else ()

    @property
    def lost_state(self) -> bool:
        """Whether the proposer raised, so that the texts must be read again."""
        return self.proposer is not None and self.state is None

    @property
    def may_run_ahead(self) -> bool:
        """Whether all requests could use a plain round that is dispatched before the previous one is collected."""
        if self.lost_state or (self.processors is not None and self.processors.on_host):
            return False
        return all(not row.finish_reason and len(row.tokens) + 1 < row.limit for row in self.requests)

    def dispatch(
        self, plan: Plan, drafter: Drafter | None = None, exact: bool = False, measured: bool = False
    ) -> Round:
        """Start a round. The host waits only for an early exit's confidences, or for a `measured` draft. `drafter`,
        `exact`: see `Engine`."""
        undo = self._checkpoint()
        started, drafters, draft_seconds = perf_counter(), self.drafters(drafter), None
        draft = self.draft(plan, drafters)
        if measured:
            mx.eval(draft.tokens)
            draft_seconds = perf_counter() - started
        out = self.forward(draft, exact)
        logits, spoiled = self.processors.apply(out.logits, draft) if self.processors else (out.logits, None)
        verdict = self.verify(logits, draft)
        drafted = draft.lengths if draft.tree is None else mx.minimum(draft.lengths, draft.tree.levels)
        answer = [_nan_in(out.logits, verdict, spoiled), verdict.accepted, drafted, verdict.tokens]
        outputs = (out.logits, *out.aux)
        if verdict.path is not None:
            answer.append(verdict.path)
            outputs = tuple(mx.take_along_axis(x, verdict.path[..., None], axis=1) for x in outputs)
        logprobs = Logprobs.of(self.params, outputs[0], verdict.tokens) if self.wants_logprobs else None
        mx.async_eval(*answer, *outputs[1:], *(logprobs.arrays if logprobs else ()))
        self.commit(verdict)  # after the answer, which does not wait for a recurrent state
        mx.async_eval(self.newest, [state.state for state in self.cache.recurrent])
        plan = PLAIN if self.lost_state else plan
        forced = [*map(bool, self.forced(plan))]
        return Round(self, plan, undo, draft, answer, outputs[1:], logprobs, drafters, draft_seconds, forced)

    def draft(self, plan: Plan, drafters: Sequence[Drafter | None]) -> Draft:
        """Return the proposer's draft for a plan, checked and cut to what each request can use.

        If the proposer raises, its state is dropped (`lost_state`), and this round drafts nothing. Raises ProposerError
        if the draft is malformed.
        """
        rows = len(self.requests)
        draft = Draft(mx.zeros((rows, 0), mx.int32), mx.zeros((rows,), mx.int32))
        if not plan.size or self.lost_state:
            return draft
        forced = self.forced(plan)
        looks_up = any(count and not tokens for count, tokens in zip(plan.lookups, forced, strict=False))
        if plan.depth or looks_up:
            draft = self._proposed(plan, draft)
        if self.lost_state:
            return draft
        if any(forced):
            draft = draft.replaced(chains(forced), list(map(len, forced)))
        rejects = self.sampling.rejects if "rejection" in self.sampling.rules else None
        by = self.proposer.name if self.proposer is not None else "none"
        return check_draft(draft, by, plan, self.rooms(plan, drafters), self.target.vocab_size, self.newest, rejects)

    def forced(self, plan: Plan) -> list[Sequence[int]]:
        """Return the tokens that each row drafts because its grammar forces them or those after them."""
        rows = zip(self.requests, plan.lookups or [0] * len(self.requests), strict=True)
        return [request.forced.draft[:count] for request, count in rows]

    def _proposed(self, plan: Plan, draft: Draft) -> Draft:
        """Return the proposer's draft, or if there is none, the given one."""
        if self.state is None or self.proposer is None:
            return draft
        by = self.proposer.name
        try:
            draft = self.state.draft(plan, self.sampling, self.cache.lengths.positions(1)[:, 0] + 1)
        except Exception:
            if not all(request.counts.draft_failures for request in self.requests):  # once for each request
                log.exception("the proposer %r raised; its %d rows are read again for it", by, len(self.requests))
            self.state = None
        for request in self.requests:
            request.counts.draft_ended(failed=self.state is None)
        return draft

    def forward(self, draft: Draft, exact: bool = False) -> Forward:
        """Run the target over each row's newest token and its draft."""
        tokens = mx.concatenate([self.newest, draft.tokens], axis=1)
        if draft.tree is not None:
            self.cache.branch(draft.tree.branches())
        if tokens.shape[1] > 1 or not exact:
            return self.target.forward(tokens, self.cache, self.aux_layers)
        out = self.target.forward(mx.repeat(tokens, 2, axis=1), self.cache, self.aux_layers)
        return Forward(out.logits[:, :1], tuple(x[:, :1] for x in out.aux))  # `commit` rolls the second back

    def verify(self, logits: mx.array, draft: Draft) -> Verdict:
        """Verify a draft with the processed logits [B, n+1, V] and the requests' sampling settings."""
        if draft.tree is not None:
            return self._verify_tree(logits, draft, draft.tree)
        positions = self.cache.lengths.positions(logits.shape[1]) + 1
        return verify(logits, draft.tokens, draft.lengths, draft.probs, self.sampling, positions)

    def _verify_tree(self, logits: mx.array, draft: Draft, tree: Tree) -> Verdict:
        branches = self.cache.lengths.branches
        assert branches is not None
        count = draft.tokens.shape[1]
        room = mx.array([[request.room] for request in self.requests], mx.int32)
        depths = branches.depths[:, 1:]  # 0 of nodes that do not attend to all their ancestors
        valid = (mx.arange(count) < draft.lengths[:, None]) & (0 < depths) & (depths <= room)
        first = self.cache.lengths.offset + 1
        return verify_tree(logits, draft.tokens, valid, tree, branches, self.sampling, first)

    def commit(self, verdict: Verdict) -> None:
        """Advance each row past its accepted tokens. Entries after its new length count as rolled back. Accepted
        entries of a tree stay in place until the host knows which they are."""
        width = verdict.tokens.shape[1]
        self.newest = mx.take_along_axis(verdict.tokens, verdict.accepted[:, None], axis=1)
        self.cache.advance(1 if width == 1 else verdict.accepted + 1, at_most=width)
        if self.processors:
            self.processors.commit(verdict)

    def _checkpoint(self) -> Callable[[], None]:
        """Return a function that undoes all that a round changes from now on."""
        cache, newest = self.cache.save(), self.newest
        counts = self.processors.save() if self.processors else None

        def undo() -> None:
            self.cache.restore(cache)
            self.newest = newest
            if self.processors:
                self.processors.restore(counts)

        return undo

    def pasts(self, index: int, length: int | None = None) -> Iterator[Past]:
        """Yield a row's cached states, or their first `length` positions, for the prefix cache. The target's is last,
        because it must stay if there is memory for one."""
        request, state, draft = self.requests[index], self.state, self.draft_cache
        past = partial(Past, row=index, namespace=request.request.namespace, images=request.request.images)
        length = request.length if length is None else length
        if state is not None and draft is not None and not request.error:
            yield past(min(length, state.length(index)), draft, of_draft_model=True)
        if request.error or not request.counts.may_draft or (request.overran and self.cache.recurrent):
            return
        if self.proposer is None or not self.proposer.aux_layers:
            yield past(length, self.cache)
        elif state is not None:
            yield past(min(length, state.length(index)), self.cache, state=state)

    def take(self, rows: Sequence[int]) -> Batch:
        """Split off some rows, but not all, as a new batch. No round may be in progress."""
        taken, *others = [self._alone(row) for row in sorted(rows, reverse=True)]
        for other in others:
            taken.append(other)
        self._after_leaving()
        return taken

    def _alone(self, row: int) -> Batch:
        other = copy(self)
        other.requests = [self.requests[row]]
        other.cache = self.cache.fork(row, self.requests[row].length)
        other.newest = self.newest[row : row + 1]
        mx.eval(other.newest, other.cache.state)  # lazy arrays would keep the old buffers alive
        if self.state is not None:
            other.state = self.state.take(row)
        other._gather()
        self._remove(row)
        return other

    def append(self, other: Batch) -> None:
        if self.state is not None and other.state is not None:
            self.state.append(other.state)
        self.cache.append(other.cache)
        self.newest = mx.concatenate([self.newest, other.newest], axis=0)
        self.requests.extend(other.requests)
        self._gather()

    def release(self) -> None:
        """Remove the requests that ended or are paused. The last row fills each gap."""
        ended = [index for index, request in enumerate(self.requests) if request.leaves]
        if len(ended) == len(self.requests):
            self.requests, ended = [], []
        for index in reversed(ended):
            if self.state is not None:
                self.state.remove(index)
            self._remove(index)
        if ended:
            self._after_leaving()

    def _remove(self, row: int) -> None:
        """Remove a row, except from the proposer's state. The last row takes its place."""
        self.cache.remove(row)
        self.newest = without_row(self.newest, row)
        self.requests[row] = self.requests[-1]
        self.requests.pop()

    def _after_leaving(self) -> None:
        self.cache.sync([request.length for request in self.requests])  # the longest row may have left
        self._gather()


@dataclass(frozen=True, eq=False)
class Round:
    """A round of a batch that was dispatched, to be collected or canceled."""

    batch: Batch
    plan: Plan
    cancel: Callable[[], None]  # undoes the round, which must be the newest of its batch
    draft: Draft
    answer: list[mx.array]
    """On the device, all int32: [B] a `NaN`; [B] accepted drafts; [B] draft tokens of a chain or levels of a tree;
    [B, n+1] tokens; for trees also [B, n+1] nodes, where 0 is the last token."""
    aux: tuple[mx.array, ...]  # hidden states of the proposer's aux layers at the answer's tokens, each [B, n+1, H]
    logprobs: Logprobs | None
    drafters: Sequence[Drafter | None]
    draft_seconds: float | None  # seconds of drafting, if measured
    forced: Sequence[bool]  # as in `RoundResult`, of each row

    def collect(self) -> RoundResult:
        """Wait for the round and give every request its tokens. Only here does the host read from the device. The
        result's seconds and group are not set yet."""
        mx.eval(self.answer)
        batch, requests = self.batch, self.batch.requests
        nan, accepted, drafted, tokens, *nodes = [cast(list[Any], x.tolist()) for x in self.answer]
        emitted = [row[: count + 1] for row, count in zip(tokens, accepted, strict=True)]
        steps = nodes[0] if nodes else [[]] * len(accepted)
        paths = [[node - 1 for node in row[1 : count + 1]] for row, count in zip(steps, accepted, strict=True)]
        starts, taken = [request.length for request in requests], []
        batch.cache.keep(paths, starts)
        logprobs = self.logprobs.read(emitted) if self.logprobs else {}
        for index, request in enumerate(requests):
            if nan[index] in _NAN_ERRORS:
                request.fail(_NAN_ERRORS[nan[index]])
            taken.append(request.take(emitted[index], drafted[index], logprobs.get(index, ()), self.forced[index]))
            if nan[index] == NaN.REJECTED:
                batch.cache.zero(index, request.length)
        if self.draft.tokens.shape[1]:
            batch.cache.sync([request.length for request in requests])
        batch.observe(emitted, starts, taken, tuple(map(mx.nan_to_num, self.aux)) if any(nan) else self.aux)
        return RoundResult(
            self.plan,
            drafted=drafted,
            accepted=accepted,
            taken=taken,
            seconds=0.0,
            paths=paths if self.plan.is_tree else (),
            confidences=self.draft.confidences,
            trials=batch.state.trials(self.drafters) if batch.state is not None else (),
            forced=self.forced if any(self.forced) else (),
        )


def _nan_in(logits: mx.array, verdict: Verdict, spoiled: mx.array | None) -> mx.array:
    """Return [B] int32, a `NaN` per row. logits: [B, n+1, V]; spoiled: [B, n+1] bool, never for a tree."""
    nan = mx.any(mx.isnan(logits), axis=-1)
    taken = nan if verdict.path is None else mx.take_along_axis(nan, verdict.path, axis=1)
    emitted = mx.arange(taken.shape[1]) <= verdict.accepted[:, None]
    place = mx.any(nan, axis=1).astype(mx.int32) + mx.any(taken & emitted, axis=1).astype(mx.int32)
    if spoiled is not None:
        place = mx.where((place < NaN.KEPT) & mx.any(spoiled & emitted, axis=1), int(NaN.PROCESSED), place)
    return place
