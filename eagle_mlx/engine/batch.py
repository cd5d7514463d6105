"""The requests that decode together: their caches, and what a round does with them: draft, verify, commit."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import mlx.core as mx

from eagle_mlx.cache import RaggedCache, Saved, without_row
from eagle_mlx.decoding.draft import Draft, Tree
from eagle_mlx.decoding.masks import PATIENCE
from eagle_mlx.decoding.processors import Processors
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.decoding.verify import Verdict, judge_pending, verify, verify_tree
from eagle_mlx.engine.prefix import Prefix
from eagle_mlx.engine.prefix_tree import Past
from eagle_mlx.plan import PLAIN, Abilities, Plan
from eagle_mlx.proposers.base import (
    Asked,
    CanJoin,
    Movable,
    Proposer,
    ProposerState,
    Separable,
    check_draft,
)
from eagle_mlx.proposers.hybrid import HybridState
from eagle_mlx.request_state import RequestState
from eagle_mlx.target import Forward, Target

log = logging.getLogger("eagle_mlx.engine")


@dataclass(frozen=True)
class Checkpoint:
    """What a round changes on the device, as it was before."""

    cache: Saved
    newest: mx.array
    counts: mx.array | None
    """Of the processors."""


class Batch:
    """Requests with their caches and their proposer's state. Row i of every array belongs to `requests[i]`."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        requests: Sequence[RequestState],
        past: Prefix | None = None,
        kv_bits: int | None = None,
    ):
        """`past`: what is known already of the beginning of the prompt of a single request; the batch takes it over."""
        self.target, self.proposer = target, proposer
        self.requests = list(requests)
        self.cache = past.cache if past else RaggedCache.of(target.model, len(self.requests), kv_bits)
        self.state: ProposerState | None = past.state if past else None
        texts = [request.text for request in self.requests]
        if self.state is None and proposer:
            self.state = proposer.open(texts)
        self._gather()
        self.newest = mx.array([text[-1:] for text in texts], mx.int32).reshape(-1, 1)
        """[B, 1] int32, the newest token of each row, which the caches do not hold yet."""

    def _gather(self) -> None:
        """Gather what the requests ask for; they have joined or left, and no round is under way."""
        self.sampling = SamplingBatch.of(
            [request.params for request in self.requests], [request.request.seed for request in self.requests]
        )
        self.processors = Processors.of(self.requests, self.target.vocab_size)
        self.wants_logprobs = any(request.params.wants_logprobs for request in self.requests)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers that the proposer reads."""
        return self.proposer.aux_layers if self.proposer is not None and self.state is not None else ()

    @property
    def abilities(self) -> Abilities:
        """What the proposer can draft, and the requests can be verified by: a tree by the target's own draws alone."""
        if self.proposer is None:
            return Abilities()
        drawn = self.processors is None and not (self.sampling.any_rejection or self.sampling.any_threshold)
        lookup = isinstance(self.state, HybridState) and self.state.can_look_up
        return replace(self.proposer.abilities, trees=self.proposer.abilities.trees and drawn, lookup=lookup)

    @property
    def most_drafts(self) -> int:
        """Draft tokens that the request with the most use for them could take."""
        return max(0, max(request.room for request in self.requests)) if self.state is not None else 0

    def rooms(self, plan: Plan) -> list[int]:
        """Return how many draft tokens each request has a use for: none of a model's if it wants n-grams alone."""
        by_model = isinstance(self.state, HybridState) and not plan.lookup
        return [0 if by_model and request.params.ngrams_only else request.room for request in self.requests]

    def fitted(self, plan: Plan) -> Plan:
        """Return the plan cut to what the requests have a use for: n-grams or nothing if no request wants the model."""
        if isinstance(self.state, HybridState) and all(request.params.ngrams_only for request in self.requests):
            plan = PLAIN if plan.lookup is None else replace(plan, lookup=True, stop_below=None)
        return plan.cut(self.most_drafts)

    @property
    def may_run_ahead(self) -> bool:
        """Whether a plain round can be dispatched before the one in front of it is read, and all have a use for it."""
        if self.processors is not None and self.processors.on_host:
            return False
        return all(
            request.finish_reason is None and request.pending is None and len(request.tokens) + 1 < request.limit
            for request in self.requests
        )

    def may_decode(self, patience: float) -> bool:
        """Whether a round gives anything, now or after so many seconds: not every request's masks are late."""
        return self.processors is None or self.processors.may_decode(patience)

    def checkpoint(self) -> Checkpoint:
        """What a round will change, to be put back by `restore`."""
        return Checkpoint(self.cache.save(), self.newest, self.processors.save() if self.processors else None)

    def no_draft(self) -> Draft:
        return Draft(mx.zeros((len(self.requests), 0), mx.int32), mx.zeros((len(self.requests),), mx.int32))

    def draft(self, plan: Plan) -> Draft:
        """What the proposer drafts by a plan, cut where a request has no use for so much, or where it is none.

        If the proposer raises, its state is dropped, and the batch goes on plainly: the target has read nothing yet.
        Raises ProposerError where the draft cannot be read at all.
        """
        if self.state is None or not plan.depth:
            return self.no_draft()
        assert self.proposer is not None
        try:
            draft = self.state.draft(plan, self.sampling, self._positions(1)[:, 0])
        except Exception:
            log.exception(
                "the proposer %r raised; its %d rows go on without drafts", self.proposer.name, len(self.requests)
            )
            self.state = None
            return self.no_draft()
        asked = Asked(self.proposer.name, plan, self.rooms(plan), self.target.vocab_size)
        return check_draft(draft, asked, self.newest, self.sampling.rejects if self.sampling.any_rejection else None)

    def forward(self, draft: Draft) -> Forward:
        """The target's forward over each row's newest token and its draft."""
        tokens = mx.concatenate([self.newest, draft.tokens], axis=1)
        if draft.tree is not None:
            self.cache.branch(draft.tree.branches())
        return self.target.forward(tokens, self.cache, self.aux_layers)

    def verify(
        self, logits: mx.array, draft: Draft, positions: mx.array | None = None, patience: float = PATIENCE
    ) -> Verdict:
        """What stands of a draft by the target's logits [B, n+1, V], as the requests want them.

        positions: [B, n+1] int32, where they are not those behind the caches' entries. patience: seconds that late
        masks of grammars are waited for.
        """
        if self.processors:
            logits = self.processors.apply(logits, draft, patience)
        if draft.tree is not None:
            return self._verify_tree(logits, draft, draft.tree)
        if positions is None:
            positions = self._positions(logits.shape[1])
        sampling, pending = self.sampling, [request.pending for request in self.requests]
        if any(pending):
            logits, sampling = judge_pending(logits, sampling, pending)
        reach = self.processors.reach if self.processors else None
        lengths = draft.lengths if reach is None else mx.minimum(draft.lengths, mx.maximum(reach, 0))
        verdict = verify(logits, draft.tokens, lengths, draft.probs, sampling, positions)
        return verdict if reach is None else replace(verdict, accepted=mx.where(reach < 0, -1, verdict.accepted))

    def _verify_tree(self, logits: mx.array, draft: Draft, tree: Tree) -> Verdict:
        branches = self.cache.lengths.branches
        assert branches is not None
        count = draft.tokens.shape[1]
        room = mx.array([[request.room] for request in self.requests], mx.int32)
        depths = branches.depths[:, 1:]
        # A tree deeper than it says has nodes that do not see all that is above them.
        whole = (depths == 1 + mx.take_along_axis(branches.depths, tree.parents, axis=1)) & (depths <= tree.levels)
        valid = (mx.arange(count) < draft.lengths[:, None]) & (depths <= room) & whole
        positions = self.cache.lengths.places(count + 1) + 1
        return verify_tree(logits, draft.tokens, valid, tree, branches, self.sampling, positions)

    def commit(self, verdict: Verdict, before: Checkpoint | None = None) -> None:
        """Move each row on by what it keeps; the rest is rolled back by being behind its length.

        What is kept of a tree lies between what is not, until the host knows which it is. Rows that sit the round out,
        whose accepted count is -1, stay as they were `before`.
        """
        width = verdict.tokens.shape[1]
        self.newest = mx.take_along_axis(verdict.tokens, mx.maximum(verdict.accepted, 0)[:, None], axis=1)
        late = self.processors is not None and self.processors.reach is not None
        if before is not None and (late or width > 1):
            self.newest = mx.where(verdict.accepted[:, None] < 0, before.newest, self.newest)
        if before is not None and late:
            self.cache.advance_some(verdict.accepted + 1, width, before.cache)
        elif width == 1:
            self.cache.advance(1)
        else:
            self.cache.advance(verdict.accepted + 1, at_most=width)
        if self.processors:
            self.processors.commit(verdict)

    def _positions(self, count: int) -> mx.array:
        """[B, count] int32: the places in each row's sequence of the next `count` tokens, which key the noise."""
        return self.cache.lengths.positions(count) + 1

    def restore(self, before: Checkpoint) -> None:
        """Undo what was done since a checkpoint."""
        self.cache.restore(before.cache)
        self.newest = before.newest
        if self.processors:
            self.processors.restore(before.counts)

    def past(self, index: int, length: int | None = None) -> Past | None:
        """What a row's caches hold, or so many positions of it, for prompts that begin like it; None where it cannot
        be had."""
        request = self.requests[index]
        if request.error or (request.overran and self.cache.recurrent):
            return None
        known = request.length if length is None else length
        if self.proposer is None or not self.proposer.aux_layers:
            return Past(known, self.cache, index, namespace=request.request.namespace)
        if not isinstance(self.state, Separable) or not isinstance(self.proposer, CanJoin):
            return None
        return Past(min(known, self.state.length(index)), self.cache, index, self.state, request.request.namespace)

    @property
    def may_part(self) -> bool:
        """Whether rows may leave for another batch."""
        return self.state is None or isinstance(self.state, Movable)

    def take(self, rows: Sequence[int]) -> Batch:
        """Some rows leave, though not all of them, and are a batch of their own. No round is under way."""
        taken: Batch | None = None
        for row in sorted(rows, reverse=True):
            alone = self._alone(row)
            if taken is None:
                taken = alone
            else:
                taken.append(alone)
        assert taken is not None
        self._after_leaving()
        return taken

    def _alone(self, row: int) -> Batch:
        """A row that leaves, with copies of what is kept of it."""
        other = copy(self)
        other.requests = [self.requests[row]]
        other.cache = self.cache.fork(row, self.requests[row].length)
        other.newest = self.newest[row : row + 1]
        mx.eval(other.newest, other.cache.state)  # as long as they are to be computed they hold the buffers
        if isinstance(self.state, Movable):
            other.state = self.state.take(row)
        other._gather()
        self._remove(row)
        return other

    def ended_pasts(self) -> Iterator[tuple[list[int], Past]]:
        """Yield the texts of requests that are about to leave, and what the caches hold of them, if it can be kept."""
        for index, request in enumerate(self.requests):
            past = self.past(index) if request.leaves else None
            if past is not None:
                yield request.text, past

    def append(self, other: Batch) -> None:
        """Another batch's rows join behind this one's."""
        if self.state is None or other.state is None:
            self.state = None  # of rows whose proposer has raised nothing is known
        else:
            self.state.append(other.state)
        self.cache.append(other.cache)
        self.newest = mx.concatenate([self.newest, other.newest], axis=0)
        self.requests.extend(other.requests)
        self._gather()

    def release(self) -> list[RequestState]:
        """Let the rows leave that have ended or are paused; the last row moves into each gap."""
        ended = [index for index, request in enumerate(self.requests) if request.leaves]
        released = [self.requests[index] for index in ended]
        for request in released:
            if request.finish_reason is not None:
                request.close()
        if len(ended) == len(self.requests):
            self.requests = []
            return released
        for index in reversed(ended):
            if self.state is not None:
                self.state.remove(index)
            self._remove(index)
        if ended:
            self._after_leaving()
        return released

    def _remove(self, row: int) -> None:
        """A row leaves, whose state has left; the last one takes its place."""
        self.cache.remove(row)
        self.newest = without_row(self.newest, row)
        self.requests[row] = self.requests[-1]
        self.requests.pop()

    def _after_leaving(self) -> None:
        self.cache.sync([request.length for request in self.requests])  # the longest may have left, and rounds only add
        self._gather()
