"""The rows that decode together, and one round of theirs: propose, verify, commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from eagle_mlx.cache import RaggedCache, Saved, without_row
from eagle_mlx.proposers.base import Draft, Observation, Proposer, ProposerState
from eagle_mlx.sampling import SamplingBatch, SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.verify import verify


@dataclass
class Row:
    """One request while it decodes."""

    index: int
    """Its place among the requests of the engine."""
    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int
    """Tokens that it may emit."""
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        """Tokens in the caches: all but the newest."""
        return len(self.prompt) + len(self.tokens) - 1

    def take(self, tokens: Sequence[int], drafted: int) -> None:
        """Take a round's tokens in order, up to the first that ends the row; count only what was taken."""
        self.rounds += 1
        taken = 0
        for token in tokens:
            self.tokens.append(token)
            taken += 1
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.limit:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        self._count(drafted, min(taken, len(tokens) - 1))

    def _count(self, drafted: int, accepted: int) -> None:
        new = max(0, drafted - len(self.drafted_by_position))
        self.drafted_by_position += [0] * new
        self.accepted_by_position += [0] * new
        for position in range(drafted):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted


@dataclass(frozen=True)
class Round:
    """A round that the device may still be working on."""

    answer: mx.array
    """[B, k + 3] int32: the accepted count, the draft's length, and the k + 1 tokens of the verdict."""
    aux: tuple[mx.array, ...]
    cache_before: Saved
    last_before: mx.array


class Batch:
    """Rows with their caches and their proposer's state. Row i of every array is `rows[i]`."""

    def __init__(self, target: Target, proposer: Proposer | None, rows: Sequence[Row]):
        self.target, self.proposer = target, proposer
        self.rows = list(rows)
        self.cache = RaggedCache.of(target.model, len(self.rows))
        self.state: ProposerState | None = proposer.open([row.prompt for row in self.rows]) if proposer else None
        self._arrange()
        self.last = mx.array([[row.prompt[-1]] for row in self.rows], mx.int32).reshape(-1, 1)
        """[B, 1] int32, the newest token of each row, which the caches do not hold yet."""

    def _arrange(self) -> None:
        self.sampling = SamplingBatch.of([row.params for row in self.rows], [row.seed for row in self.rows])

    def prefill(self, chunk: int) -> None:
        """Read all of each prompt but its last token, `chunk` positions at a time."""
        aux_layers = self.proposer.aux_layers if self.proposer else ()
        longest = max(len(row.prompt) for row in self.rows) - 1
        for start in range(0, longest, chunk):
            pieces = [row.prompt[:-1][start : start + chunk] for row in self.rows]
            counts = [len(piece) for piece in pieces]
            width = max(counts)
            tokens = mx.array([piece + [0] * (width - len(piece)) for piece in pieces], mx.int32)
            self.cache.expect(counts)
            aux = self.target.forward(tokens, self.cache, aux_layers).aux
            if self.state is not None and self.proposer is not None and aux_layers:
                following = [
                    row.prompt[start + 1 : start + 1 + len(p)] for row, p in zip(self.rows, pieces, strict=True)
                ]
                self.state.prefill(Observation(following, aux))
            self.cache.advance(width if min(counts) == width else mx.array(counts, mx.int32), at_most=width)
            self.cache.settle([min(start + chunk, len(row.prompt) - 1) for row in self.rows])
            mx.eval(self.cache.state)
        self.cache.compact()

    def launch(self, depth: int) -> Round:
        """Start a round on the device: draft, verify, move the lengths. Nothing is waited for."""
        before = self.cache.save(), self.last
        draft = self._draft(depth)
        tokens = mx.concatenate([self.last, draft.tokens], axis=1)
        width = tokens.shape[1]
        out = self.target.forward(tokens, self.cache, self.proposer.aux_layers if self.proposer else ())
        verdict = verify(out.logits, draft.tokens, draft.lengths, draft.probs, self.sampling, self._positions(width))
        self.last = mx.take_along_axis(verdict.tokens, verdict.accepted[:, None], axis=1)
        if width == 1:
            self.cache.advance(1)
        else:
            self.cache.advance(verdict.accepted + 1, at_most=width)
        answer = mx.concatenate([verdict.accepted[:, None], draft.lengths[:, None], verdict.tokens], axis=1)
        mx.async_eval(answer, self.last, *out.aux)
        mx.async_eval(self.cache.recurrent_state)  # after the answer, which does not wait for it
        return Round(answer, out.aux, *before)

    def _draft(self, depth: int) -> Draft:
        """A proposal of at most `depth` tokens, cut where a row has no use for so many."""
        room = [row.limit - len(row.tokens) - 1 for row in self.rows]
        depth = min(depth, max(room))
        if self.state is None or depth < 1:
            return Draft(mx.zeros((len(self.rows), 0), mx.int32), mx.zeros((len(self.rows),), mx.int32))
        draft = self.state.propose(depth, self.sampling, self._positions(1)[:, 0])
        if min(room) < depth:
            draft = Draft(draft.tokens, mx.minimum(draft.lengths, mx.array(room, mx.int32)), draft.probs)
        return draft

    def _positions(self, count: int) -> mx.array:
        """[B, count] int32: the places in each row's sequence of the next `count` tokens, which key the noise."""
        return self.cache.lengths.positions(count) + 1

    def land(self, landed: Round) -> None:
        """Wait for a round and give every row its tokens: the one place where the host reads the device."""
        emitted = []
        answers = cast(list[list[int]], landed.answer.tolist())
        for row, (accepted, drafted, *tokens) in zip(self.rows, answers, strict=True):
            emitted.append(tokens[: accepted + 1])
            row.take(emitted[-1], drafted)
        if landed.answer.shape[1] > 3:
            self.cache.settle([row.length for row in self.rows])
        if self.state is not None and not all(row.finish_reason for row in self.rows):
            self.state.observe(Observation(emitted, landed.aux))

    def cancel(self, launched: Round) -> None:
        """Forget a round that was launched and is not wanted."""
        self.cache.restore(launched.cache_before)
        self.last = launched.last_before

    def append(self, other: Batch) -> None:
        """Another batch's rows join behind this one's."""
        if self.state is not None and other.state is not None:
            self.state.append(other.state)
        self.cache.append(other.cache)
        self.last = mx.concatenate([self.last, other.last], axis=0)
        self.rows.extend(other.rows)
        self._arrange()

    def release(self) -> list[Row]:
        """Let the finished rows leave; the last row moves into each gap."""
        ended = [index for index, row in enumerate(self.rows) if row.finish_reason]
        released = [self.rows[index] for index in ended]
        if len(ended) == len(self.rows):
            self.rows = []
            return released
        for index in reversed(ended):
            if self.state is not None:
                self.state.remove(index)
            self.cache.remove(index)
            self.last = without_row(self.last, index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()
        if ended:
            self._arrange()
        return released
