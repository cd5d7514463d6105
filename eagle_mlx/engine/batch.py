"""The rows that decode together, and one round of theirs: propose, verify, commit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from time import perf_counter
from typing import cast

import mlx.core as mx

from eagle_mlx.cache import RaggedCache, Saved, without_row
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.logprobs import Logprobs
from eagle_mlx.decoding.processors import Processors
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.decoding.tree import Tree, along
from eagle_mlx.decoding.verify import Verdict, verify, verify_tree
from eagle_mlx.engine.prefix import Prefix
from eagle_mlx.plan import PLAIN, Abilities, Plan, RoundResult
from eagle_mlx.proposers.base import Forkable, Observation, Proposer, ProposerState
from eagle_mlx.proposers.check import Asked, check_draft
from eagle_mlx.request import Request
from eagle_mlx.target import Forward, Target

_ANSWERED = 128
"""Positions, over all rows, that a forward may read of prompts to give their first tokens too: what the last layer
costs is then less than a forward of its own for the last token.
"""


@dataclass(frozen=True)
class Round:
    """A round that the device may still be working on."""

    plan: Plan
    width: int
    """Tokens of the verdict: one more than the draft is deep."""
    answer: mx.array
    """[B, width + 3] int32: where logits are no numbers (`_NaN`), the accepted count, the draft's length, and the
    tokens of the verdict; behind them, for trees, the nodes of the path, [B, width]."""
    logprobs: Logprobs | None
    aux: tuple[mx.array, ...]
    before: _Before
    draft_seconds: float | None = None
    """What drafting took, where that was measured."""
    confidences: Sequence[Sequence[float]] = ()
    """As of the draft."""


class _NaN(IntEnum):
    """Where a row's logits of a round are no numbers."""

    NOWHERE = 0
    REJECTED = 1
    """Only where a draft was rejected, or there was none."""
    KEPT = 2
    """Where a token was drawn that the row is to emit."""


class _Answer:
    """One row of `Round.answer`."""

    def __init__(self, width: int, nan: int, accepted: int, drafted: int, *rest: int):
        self.nan = _NaN(nan)
        self.emitted = rest[: accepted + 1]
        """Nothing where the row sat the round out."""
        self.accepted, self.drafted = (accepted, drafted) if self.emitted else (0, 0)
        self.kept = [node - 1 for node in rest[width + 1 : width + accepted + 1]]


@dataclass(frozen=True)
class _Before:
    """What a round changed on the device, as it was."""

    cache: Saved
    last: mx.array
    counts: mx.array | None


class Batch:
    """Rows with their caches and their proposer's state. Request i of every array is `rows[i]`."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        requests: Sequence[Request],
        past: Prefix | None = None,
        kv_bits: int | None = None,
    ):
        """`past`: what is known already of the beginning of the prompt of a single row."""
        self.target, self.proposer = target, proposer
        self.requests = list(requests)
        self.cache = (
            past.cache.fork(0, past.length) if past else RaggedCache.of(target.model, len(self.requests), kv_bits)
        )
        self.state: ProposerState | None = None
        if past and past.state:
            self.state = past.state.fork(0, past.length)
        elif proposer:
            self.state = proposer.open([request.prompt for request in self.requests])
        self._read = past.length if past else 0
        self._arrange()
        self.last = mx.array([[request.prompt[-1]] for request in self.requests], mx.int32).reshape(-1, 1)
        """[B, 1] int32, the newest token of each row, which the caches do not hold yet."""

    def _arrange(self) -> None:
        """Gather what the rows ask for; they have joined or left, and no round is under way."""
        self.sampling = SamplingBatch.of(
            [request.params for request in self.requests], [request.seed for request in self.requests]
        )
        self.processors = Processors.of(self.requests, self.target.vocab_size)

    @property
    def abilities(self) -> Abilities:
        """What the proposer can draft, and the rows can be judged by: a tree by the target's own draws alone."""
        if self.proposer is None:
            return Abilities()
        drawn = self.processors is None and not (self.sampling.any_rejection or self.sampling.any_threshold)
        return replace(self.proposer.abilities, trees=self.proposer.abilities.trees and drawn)

    def may_decode(self) -> bool:
        """Whether a round gives anything, now or after a short wait: not every row's masks are late."""
        return self.processors is None or self.processors.may_decode()

    @property
    def may_run_ahead(self) -> bool:
        """Whether a plain round can be launched before the one in front of it is read."""
        return self.processors is None or not self.processors.on_host

    def read_prompts(self, chunk: int) -> bool:
        """Read `chunk` further positions of each prompt; whether the rows can decode now.

        What is short is read to its last token, and gives the rows their first tokens. Of the rest the last token is
        left to the first round.
        """
        longest = max(len(request.prompt) for request in self.requests) - 1
        if self._read < longest:
            left = longest - self._read
            if left <= chunk and len(self.requests) * (left + 1) <= _ANSWERED:
                self._answer()
            else:
                self._read_chunk(self._read, chunk)
            self._read += chunk
        if self._read < longest:
            return False
        self.cache.compact()
        return True

    def _read_chunk(self, start: int, chunk: int) -> None:
        pieces = [request.prompt[:-1][start : start + chunk] for request in self.requests]
        counts = [len(piece) for piece in pieces]
        aux = self._forward(pieces, counts).aux
        self._show(start, counts, aux)
        width = max(counts)
        self.cache.advance(width if min(counts) == width else mx.array(counts, mx.int32), at_most=width)
        self.cache.sync([min(start + chunk, len(request.prompt) - 1) for request in self.requests])
        mx.eval(self.cache.state)

    def _answer(self) -> None:
        """Read the rest of each prompt and draw the token behind it: a forward less until the first token."""
        start, before = self._read, self._before()
        pieces = [request.prompt[start:] for request in self.requests]
        counts = [len(piece) for piece in pieces]
        ends = [count - 1 for count in counts]
        out = self._forward(pieces, counts, ends)
        nothing = self._no_draft()
        logits = self.processors.apply(out.logits, nothing, math.inf) if self.processors else out.logits
        read = mx.array(counts, mx.int32)
        positions = (self.cache.lengths.offset + read)[:, None]
        verdict = verify(logits, nothing.tokens, nothing.lengths, None, self.sampling, positions)
        self.last = verdict.tokens
        self.cache.advance(counts[0] if len(set(counts)) == 1 else read, at_most=max(counts))
        if self.processors:
            self.processors.commit(verdict)
        newest = tuple(mx.take_along_axis(x, (read - 1)[:, None, None], axis=1) for x in out.aux)
        answered = self._sent(PLAIN, before, nothing, verdict, out.logits, newest, _nan_in(out.logits, verdict))
        self._show(start, ends, tuple(x[:, : max(ends)] for x in out.aux))
        self.land(answered)
        self.cache.sync([request.length for request in self.requests])

    def _forward(self, pieces: list[list[int]], counts: list[int], ends: list[int] | None = None) -> Forward:
        """The target's forward over a piece of each prompt; with `ends`, the logits of these positions alone."""
        width = max(counts)
        # The padding is a token that is read anyway: one that reads as no number would spoil what is behind it.
        ends_of = [request.prompt[-1:] for request in self.requests]
        padded = [piece + end * (width - len(piece)) for piece, end in zip(pieces, ends_of, strict=True)]
        tokens = mx.array(padded, mx.int32)
        self.cache.expect(counts)
        return self.target.forward(tokens, self.cache, self.proposer.aux_layers if self.proposer else (), ends)

    def _show(self, start: int, counts: list[int], aux: tuple[mx.array, ...]) -> None:
        """Let the proposer see the prompts' positions from `start` on, counts[i] of them in row i."""
        if self.state is not None and aux:
            following = [
                request.prompt[start + 1 : start + 1 + n] for request, n in zip(self.requests, counts, strict=True)
            ]
            self.state.prefill(Observation(following, aux))

    def launch(self, plan: Plan, timed: bool = False) -> Round:
        """Start a round on the device, at most `most_drafts` deep.

        Nothing is waited for but a draft that is to be timed, and the confidences of one that may exit early.
        """
        before = self._before()
        started = perf_counter()
        draft = self.draft(plan)
        if timed:
            mx.eval(draft.tokens)
        draft_seconds = perf_counter() - started if timed else None
        out = self.read(draft)
        _, verdict = self.judge(out, draft)
        self.commit(verdict, before)
        said = (out.logits, *out.aux) if verdict.path is None else along((out.logits, *out.aux), verdict.path)
        nan = _nan_in(out.logits, verdict)
        return self._sent(plan, before, draft, verdict, said[0], said[1:], nan, draft_seconds)

    def _before(self) -> _Before:
        return _Before(self.cache.save(), self.last, self.processors.save() if self.processors else None)

    def _sent(
        self,
        plan: Plan,
        before: _Before,
        draft: Draft,
        verdict: Verdict,
        logits: mx.array,
        aux: tuple[mx.array, ...],
        nan: mx.array,
        draft_seconds: float | None = None,
    ) -> Round:
        """A round with its verdict, on its way to the host. logits, aux: of the positions of the verdict."""
        logprobs = Logprobs.of(self.requests, logits, verdict.tokens)
        drafted = draft.lengths if draft.tree is None else mx.minimum(draft.lengths, draft.tree.levels)
        counts = mx.stack([nan, verdict.accepted, drafted], axis=1)
        answer = mx.concatenate(
            [counts, verdict.tokens] if verdict.path is None else [counts, verdict.tokens, verdict.path], axis=1
        )
        mx.async_eval(answer, self.last, *aux, *(logprobs.arrays if logprobs else ()))
        mx.async_eval(self.cache.recurrent_state)  # after the answer, which does not wait for it
        width = verdict.tokens.shape[1]
        return Round(plan, width, answer, logprobs, aux, before, draft_seconds, draft.confidences)

    def _no_draft(self) -> Draft:
        return Draft(mx.zeros((len(self.requests), 0), mx.int32), mx.zeros((len(self.requests),), mx.int32))

    def draft(self, plan: Plan) -> Draft:
        """What the proposer drafts by a plan, cut where a row has no use for so much, or where it is none.

        Raises ProposerError where it cannot be read at all.
        """
        if self.state is None or not plan.depth:
            return self._no_draft()
        assert self.proposer is not None
        draft = self.state.draft(plan, self.sampling, self._positions(1)[:, 0])
        asked = Asked(self.proposer.name, plan, [request.room for request in self.requests], self.target.vocab_size)
        return check_draft(draft, asked, self.last, self.sampling.rejects if self.sampling.any_rejection else None)

    def read(self, draft: Draft) -> Forward:
        """The target's forward over each row's newest token and its draft."""
        tokens = mx.concatenate([self.last, draft.tokens], axis=1)
        if draft.tree is not None:
            self.cache.branch(draft.tree.branches())
        return self.target.forward(tokens, self.cache, self.proposer.aux_layers if self.proposer else ())

    def judge(self, out: Forward, draft: Draft) -> tuple[mx.array, Verdict]:
        """The logits as the rows want them, [B, k+1, V], and what stands of the draft by them."""
        logits = self.processors.apply(out.logits, draft) if self.processors else out.logits
        if draft.tree is not None:
            return logits, self._judge_tree(logits, draft, draft.tree)
        positions = self._positions(logits.shape[1])
        reach = self.processors.reach if self.processors else None
        lengths = draft.lengths if reach is None else mx.minimum(draft.lengths, mx.maximum(reach, 0))
        verdict = verify(logits, draft.tokens, lengths, draft.probs, self.sampling, positions)
        late = None if reach is None else replace(verdict, accepted=mx.where(reach < 0, -1, verdict.accepted))
        return logits, late or verdict

    def _judge_tree(self, logits: mx.array, draft: Draft, tree: Tree) -> Verdict:
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

    def commit(self, verdict: Verdict, before: _Before | None = None) -> None:
        """Move each row on by what it keeps; the rest is rolled back by being behind its length.

        What is kept of a tree lies between what is not, until the host knows which it is. Rows that sit the round out,
        whose accepted count is -1, stay as they were `before`.
        """
        width = verdict.tokens.shape[1]
        self.last = mx.take_along_axis(verdict.tokens, mx.maximum(verdict.accepted, 0)[:, None], axis=1)
        if before is not None and self.processors is not None and self.processors.reach is not None:
            self.last = mx.where(verdict.accepted[:, None] < 0, before.last, self.last)
            self.cache.advance_some(verdict.accepted + 1, width, before.cache)
        elif width == 1:
            self.cache.advance(1)
        else:
            self.cache.advance(verdict.accepted + 1, at_most=width)
        if self.processors:
            self.processors.commit(verdict)

    @property
    def most_drafts(self) -> int:
        """Draft tokens that the row with the most use for them could take."""
        return max(0, max(request.room for request in self.requests)) if self.state is not None else 0

    def _positions(self, count: int) -> mx.array:
        """[B, count] int32: the places in each row's sequence of the next `count` tokens, which key the noise."""
        return self.cache.lengths.positions(count) + 1

    def land(self, landed: Round) -> RoundResult:
        """Wait for a round and give every row its tokens: the one place where the host reads the device.

        The result has no seconds yet.
        """
        answers = [_Answer(landed.width, *answer) for answer in cast(list[list[int]], landed.answer.tolist())]
        sat_out = any(not answer.emitted for answer in answers)
        emitted = [answer.emitted for answer in answers]
        self.cache.keep([answer.kept for answer in answers], [request.length for request in self.requests])
        logprobs = landed.logprobs.read(emitted) if landed.logprobs else {}
        taken = []
        for index, (request, answer) in enumerate(zip(self.requests, answers, strict=True)):
            if answer.nan == _NaN.KEPT:
                request.fail("the model's logits are not numbers (NaN)")
                self.cache.zero(index)
            taken.append(request.take(answer.emitted, answer.drafted, logprobs.get(index, ())))
            if answer.nan == _NaN.REJECTED:
                self.cache.zero(index, request.length)
        if landed.width > 1 or sat_out:
            self.cache.sync([request.length for request in self.requests])
        if self.state is not None and any(emitted):
            numbers = all(answer.nan == _NaN.NOWHERE for answer in answers)
            self.state.observe(Observation(emitted, landed.aux if numbers else tuple(map(mx.nan_to_num, landed.aux))))
        return RoundResult(
            landed.plan,
            drafted=[answer.drafted for answer in answers],
            accepted=[answer.accepted for answer in answers],
            taken=taken,
            seconds=0.0,
            draft_seconds=landed.draft_seconds,
            paths=[answer.kept for answer in answers] if landed.plan.is_tree else (),
            confidences=landed.confidences,
        )

    def cancel(self, launched: Round) -> None:
        """Forget a round that was launched and is not wanted."""
        self.cache.restore(launched.before.cache)
        self.last = launched.before.last
        if self.processors:
            self.processors.restore(launched.before.counts)

    def past(self, index: int) -> Prefix | None:
        """What a row's caches hold, for prompts that begin like it; None where it cannot be had."""
        request, length = self.requests[index], self.requests[index].length
        if request.error or (request.overran and self.cache.recurrent):
            return None
        reads = self.proposer is not None and bool(self.proposer.aux_layers)
        if reads and not isinstance(self.state, Forkable):
            return None
        state = self.state if reads and isinstance(self.state, Forkable) else None
        known = length if state is None else min(length, state.length(index))
        if known < self.cache.shortest(index):
            return None
        return Prefix(known, self.cache.fork(index, known), state.fork(index, known) if state is not None else None)

    def append(self, other: Batch) -> None:
        """Another batch's rows join behind this one's."""
        if self.state is not None and other.state is not None:
            self.state.append(other.state)
        self.cache.append(other.cache)
        self.last = mx.concatenate([self.last, other.last], axis=0)
        self.requests.extend(other.requests)
        self._arrange()

    def release(self) -> list[Request]:
        """Let the finished rows leave; the last row moves into each gap."""
        ended = [index for index, request in enumerate(self.requests) if request.finish_reason]
        released = [self.requests[index] for index in ended]
        for request in released:
            request.grammar = None  # it may hold a process
        if len(ended) == len(self.requests):
            self.requests = []
            return released
        for index in reversed(ended):
            if self.state is not None:
                self.state.remove(index)
            self.cache.remove(index)
            self.last = without_row(self.last, index)
            self.requests[index] = self.requests[-1]
            self.requests.pop()
        if ended:
            self.cache.sync(
                [request.length for request in self.requests]
            )  # the longest may have left, and plain rounds only add
            self._arrange()
        return released


def _nan_in(logits: mx.array, verdict: Verdict) -> mx.array:
    """[B] int32, a `_NaN` for each row. logits: [B, n+1, V], of all positions of a verify."""
    nan = mx.any(mx.isnan(logits), axis=-1)
    said = nan if verdict.path is None else mx.take_along_axis(nan, verdict.path, axis=1)
    kept = said & (mx.arange(said.shape[1]) <= verdict.accepted[:, None])
    return mx.any(nan, axis=1).astype(mx.int32) + mx.any(kept, axis=1).astype(mx.int32)
