"""A batch of requests that decode together, and the steps of a round: draft, verify, commit."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import mlx.core as mx

from eagle_mlx.cache import RaggedCache, Saved, without_row
from eagle_mlx.decoding.draft import Draft, Tree
from eagle_mlx.decoding.processors import Processors
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.decoding.verify import Verdict, judge_pending, verify, verify_tree
from eagle_mlx.engine.prefix import Prefix
from eagle_mlx.engine.prefix_tree import Past
from eagle_mlx.plan import PLAIN, Abilities, Plan, Trial
from eagle_mlx.proposers.base import Proposer, ProposerState, check_draft
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import Drafter
from eagle_mlx.target import Forward, Target

log = logging.getLogger("eagle_mlx.engine")


@dataclass(frozen=True)
class Checkpoint:
    """The device state before a round, for everything that a round changes."""

    cache: Saved
    newest: mx.array
    counts: mx.array | None  # of the processors


class Batch:
    """Requests with their KV caches and proposer state. Row i of every array belongs to `requests[i]`."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        requests: Sequence[RequestState],
        past: Prefix | None = None,
        kv_bits: int | None = None,
    ):
        """`past`: the cached prefix of a single request's prompt. The batch takes ownership of it."""
        self.target, self.proposer = target, proposer
        self.requests = list(requests)
        self.cache = past.cache if past else RaggedCache.of(target.model, len(self.requests), kv_bits)
        self.state: ProposerState | None = past.state if past and proposer else None
        """None without a proposer, and after it raised, until the texts have been read again."""
        texts = [request.text for request in self.requests]
        if self.state is None and proposer:
            self.state = proposer.open(texts)
            if past and past.draft is not None:
                self.state.resume(past.draft)
        self.drafter: Drafter | None = None
        """See `Engine.drafter`."""
        self.exact = False
        """Whether a forward reads at least two positions; see `Engine`."""
        self._gather()
        self.newest = mx.array([text[-1:] for text in texts], mx.int32).reshape(-1, 1)
        """[B, 1] int32: the newest token of each row, not yet in the caches."""

    def _gather(self) -> None:
        """Collect the requests' sampling settings after some joined or left. No round may be in progress."""
        self.sampling = SamplingBatch.of(
            [request.params for request in self.requests], [request.request.seed for request in self.requests]
        )
        self.processors = Processors.of(self.requests, self.target.vocab_size)
        if self.processors is not None and self.processors.on_device:
            self.sampling = replace(self.sampling, changes=self.processors.change_draft)
        self.wants_logprobs = any(request.params.wants_logprobs for request in self.requests)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.proposer.aux_layers if self.proposer is not None and self.state is not None else ()

    @property
    def draft_cache(self) -> RaggedCache | None:
        """The cache of the draft model, if one drafts, alone or together with n-grams."""
        return self.state.draft_cache if self.state is not None else None

    @property
    def caches(self) -> list[RaggedCache]:
        """The target's cache, and that of a draft model."""
        return [self.cache, *([self.draft_cache] if self.draft_cache is not None else [])]

    @property
    def abilities(self) -> Abilities:
        """The kinds of drafts that the proposer can make and the requests allow. Trees need the target's own draws."""
        if self.proposer is None:
            return Abilities()
        drawn = self.processors is None and self.sampling.rules <= {"greedy", "coupled"}
        lookup = self.state is not None and self.state.can_look_up(self._drafters)
        return replace(self.proposer.abilities, trees=self.proposer.abilities.trees and drawn, lookup=lookup)

    def trials(self) -> list[Trial]:
        """Return the trials of n-grams that ended since the last call."""
        return self.state.trials(self._drafters) if self.state is not None else []

    @property
    def _drafters(self) -> list[Drafter | None]:
        return [request.params.drafter or self.drafter for request in self.requests]

    @property
    def wants_drafts(self) -> bool:
        """Whether any request may have drafts."""
        return self.proposer is not None and any(drafter != "none" for drafter in self._drafters)

    def rooms(self, plan: Plan) -> list[int]:
        """Return the useful draft tokens per request; 0 if it excludes the plan's drafter."""
        assert self.state is not None
        drafting = [self.state.may_draft(drafter, plan.lookup) for drafter in self._drafters]
        return [request.room * drafts for request, drafts in zip(self.requests, drafting, strict=True)]

    def fitted(self, plan: Plan) -> Plan:
        """Return the plan cut to what the requests can use: n-grams or nothing if no request wants the model."""
        if self.state is None:
            return PLAIN
        if not any(self.state.may_draft(drafter, lookup=False) for drafter in self._drafters):
            plan = replace(plan, lookup=True, stop_below=None) if self.state.can_look_up(self._drafters) else PLAIN
        return plan.cut(max(self.rooms(plan)))

    @property
    def lost_state(self) -> bool:
        """Whether the proposer raised, so that the texts must be read again."""
        return self.proposer is not None and self.state is None

    @property
    def may_run_ahead(self) -> bool:
        """Whether all requests could use a plain round that is dispatched before the previous one is collected."""
        if self.lost_state or (self.processors is not None and self.processors.on_host):
            return False
        return all(
            request.finish_reason is None and request.pending is None and len(request.tokens) + 1 < request.limit
            for request in self.requests
        )

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.cache.save(), self.newest, self.processors.save() if self.processors else None)

    def _no_draft(self) -> Draft:
        return Draft(mx.zeros((len(self.requests), 0), mx.int32), mx.zeros((len(self.requests),), mx.int32))

    def draft(self, plan: Plan) -> Draft:
        """Return the proposer's draft for a plan, checked and cut to what each request can use.

        If the proposer raises, its state is dropped (`lost_state`), and this round drafts nothing. Raises ProposerError
        if the draft is malformed.
        """
        if self.state is None or not plan.depth:
            return self._no_draft()
        assert self.proposer is not None
        try:
            draft = self.state.draft(plan, self.sampling, self._positions(1)[:, 0])
        except Exception:
            if not all(request.draft_failures for request in self.requests):  # once for each request
                log.exception(
                    "the proposer %r raised; its %d rows are read again for it", self.proposer.name, len(self.requests)
                )
            for request in self.requests:
                request.draft_ended(failed=True)
            self.state = None
            return self._no_draft()
        for request in self.requests:
            request.draft_ended()
        rejects = self.sampling.rejects if "rejection" in self.sampling.rules else None
        by, vocab = self.proposer.name, self.target.vocab_size
        return check_draft(draft, by, plan, self.rooms(plan), vocab, self.newest, rejects)

    def forward(self, draft: Draft) -> Forward:
        """Run the target over each row's newest token and its draft."""
        tokens = mx.concatenate([self.newest, draft.tokens], axis=1)
        if draft.tree is not None:
            self.cache.branch(draft.tree.branches())
        if tokens.shape[1] > 1 or not self.exact:
            return self.target.forward(tokens, self.cache, self.aux_layers)
        out = self.target.forward(mx.repeat(tokens, 2, axis=1), self.cache, self.aux_layers)
        return Forward(out.logits[:, :1], tuple(x[:, :1] for x in out.aux))  # `commit` rolls the second back

    def verify(self, logits: mx.array, draft: Draft) -> Verdict:
        """Verify a draft with the target's logits [B, n+1, V] and the requests' sampling settings."""
        if self.processors:
            logits = self.processors.apply(logits, draft)
        if draft.tree is not None:
            return self._verify_tree(logits, draft, draft.tree)
        sampling, pending = self.sampling, [request.pending for request in self.requests]
        if any(pending):
            logits, sampling = judge_pending(logits, sampling, pending)
        positions = self._positions(logits.shape[1])
        return verify(logits, draft.tokens, draft.lengths, draft.probs, sampling, positions)

    def _verify_tree(self, logits: mx.array, draft: Draft, tree: Tree) -> Verdict:
        branches = self.cache.lengths.branches
        assert branches is not None
        count = draft.tokens.shape[1]
        room = mx.array([[request.room] for request in self.requests], mx.int32)
        depths = branches.depths[:, 1:]
        # If a tree is deeper than its `levels`, some nodes do not attend to all their ancestors.
        whole = (depths == 1 + mx.take_along_axis(branches.depths, tree.parents, axis=1)) & (depths <= tree.levels)
        valid = (mx.arange(count) < draft.lengths[:, None]) & (depths <= room) & whole
        positions = self.cache.lengths.places(count + 1) + 1
        return verify_tree(logits, draft.tokens, valid, tree, branches, self.sampling, positions)

    def commit(self, verdict: Verdict, before: Checkpoint | None = None) -> None:
        """Advance each row past its accepted tokens. Entries after its new length count as rolled back.

        Accepted entries of a tree stay in place until the host knows which they are. Rows that skip the round, with an
        accepted count of -1, keep their state from `before`.
        """
        width = verdict.tokens.shape[1]
        self.newest = mx.take_along_axis(verdict.tokens, mx.maximum(verdict.accepted, 0)[:, None], axis=1)
        if before is not None and width > 1:
            self.newest = mx.where(verdict.accepted[:, None] < 0, before.newest, self.newest)
        if width == 1:
            self.cache.advance(1)
        else:
            self.cache.advance(verdict.accepted + 1, at_most=width)
        if self.processors:
            self.processors.commit(verdict)

    def _positions(self, count: int) -> mx.array:
        """Return [B, count] int32: the positions of each row's next `count` tokens, which key the sampling noise."""
        return self.cache.lengths.positions(count) + 1

    def restore(self, before: Checkpoint) -> None:
        self.cache.restore(before.cache)
        self.newest = before.newest
        if self.processors:
            self.processors.restore(before.counts)

    def pasts(self, index: int, length: int | None = None) -> Iterator[Past]:
        """Yield a row's cached states, or their first `length` positions, for the prefix cache. The target's is last,
        because it must stay if there is memory for one."""
        request, draft = self.requests[index], self.draft_cache
        known = request.length if length is None else length
        if self.state is not None and draft is not None and not request.error:
            read = min(known, self.state.length(index))
            yield Past(read, draft, index, namespace=request.request.namespace, of_draft_model=True)
        if (past := self._past(index, known)) is not None:
            yield past

    def _past(self, index: int, known: int) -> Past | None:
        """Return a row's first positions in the caches of the target and of a head; None if unavailable."""
        request = self.requests[index]
        if request.error or not request.may_draft or (request.overran and self.cache.recurrent):
            return None
        if self.proposer is None or not self.proposer.aux_layers:
            return Past(known, self.cache, index, namespace=request.request.namespace)
        if self.state is None:
            return None
        return Past(min(known, self.state.length(index)), self.cache, index, self.state, request.request.namespace)

    def take(self, rows: Sequence[int]) -> Batch:
        """Split off some rows, but not all, as a new batch. No round may be in progress."""
        taken, *others = [self._alone(row) for row in sorted(rows, reverse=True)]
        for other in others:
            taken.append(other)
        self._after_leaving()
        return taken

    def _alone(self, row: int) -> Batch:
        """Remove one row and return it as a batch of its own."""
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
            self.requests = []
            return
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
