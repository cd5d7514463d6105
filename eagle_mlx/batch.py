"""The rows that decode together, and one round of theirs: propose, verify, commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from eagle_mlx.cache import RaggedCache, Saved, without_row
from eagle_mlx.logprobs import Logprobs
from eagle_mlx.processors import Processors
from eagle_mlx.proposers.base import Draft, Observation, Proposer, ProposerState
from eagle_mlx.row import Row
from eagle_mlx.sampling import SamplingBatch
from eagle_mlx.target import Target
from eagle_mlx.verify import verify


@dataclass(frozen=True)
class Round:
    """A round that the device may still be working on."""

    depth: int
    """Draft tokens that were asked for each row."""
    answer: mx.array
    """[B, k + 3] int32: the accepted count, the draft's length, and the k + 1 tokens of the verdict."""
    logprobs: Logprobs | None
    aux: tuple[mx.array, ...]
    before: _Before


@dataclass(frozen=True)
class _Before:
    """What a round changed on the device, as it was."""

    cache: Saved
    last: mx.array
    counts: mx.array | None


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
        """Gather what the rows ask for; they have joined or left, and no round is under way."""
        self.sampling = SamplingBatch.of([row.params for row in self.rows], [row.seed for row in self.rows])
        self.processors = Processors.of(self.rows, self.target.vocab_size)

    @property
    def may_run_ahead(self) -> bool:
        """Whether a plain round can be launched before the one in front of it is read."""
        return self.processors is None or not self.processors.on_host

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
        before = _Before(self.cache.save(), self.last, self.processors.save() if self.processors else None)
        depth = max(0, min(depth, max(self._room()))) if self.state is not None else 0
        draft = self._draft(depth)
        tokens = mx.concatenate([self.last, draft.tokens], axis=1)
        width = tokens.shape[1]
        out = self.target.forward(tokens, self.cache, self.proposer.aux_layers if self.proposer else ())
        logits = self.processors.apply(out.logits, draft) if self.processors else out.logits
        verdict = verify(logits, draft.tokens, draft.lengths, draft.probs, self.sampling, self._positions(width))
        logprobs = Logprobs.of(self.rows, out.logits, verdict.tokens)
        self.last = mx.take_along_axis(verdict.tokens, verdict.accepted[:, None], axis=1)
        if width == 1:
            self.cache.advance(1)
        else:
            self.cache.advance(verdict.accepted + 1, at_most=width)
        if self.processors:
            self.processors.commit(verdict)
        answer = mx.concatenate([verdict.accepted[:, None], draft.lengths[:, None], verdict.tokens], axis=1)
        mx.async_eval(answer, self.last, *out.aux, *(logprobs.arrays if logprobs else ()))
        mx.async_eval(self.cache.recurrent_state)  # after the answer, which does not wait for it
        return Round(depth, answer, logprobs, out.aux, before)

    def _room(self) -> list[int]:
        """Draft tokens that each row has a use for."""
        return [row.limit - len(row.tokens) - 1 for row in self.rows]

    def _draft(self, depth: int) -> Draft:
        """A proposal of at most `depth` tokens, cut where a row has no use for so many."""
        if self.state is None or not depth:
            return Draft(mx.zeros((len(self.rows), 0), mx.int32), mx.zeros((len(self.rows),), mx.int32))
        draft = self.state.propose(depth, self.sampling, self._positions(1)[:, 0])
        room = self._room()
        if min(room) < depth:
            draft = Draft(draft.tokens, mx.minimum(draft.lengths, mx.array(room, mx.int32)), draft.probs)
        return draft

    def _positions(self, count: int) -> mx.array:
        """[B, count] int32: the places in each row's sequence of the next `count` tokens, which key the noise."""
        return self.cache.lengths.positions(count) + 1

    def land(self, landed: Round) -> tuple[list[int], list[int]]:
        """Wait for a round and give every row its tokens: the one place where the host reads the device.

        Returns each row's draft tokens and how many of them the verify kept.
        """
        answers = cast(list[list[int]], landed.answer.tolist())
        emitted = [tokens[: accepted + 1] for accepted, _, *tokens in answers]
        logprobs = landed.logprobs.read(emitted) if landed.logprobs else {}
        for index, (row, (_, drafted, *_)) in enumerate(zip(self.rows, answers, strict=True)):
            row.take(emitted[index], drafted, logprobs.get(index, ()))
        if landed.answer.shape[1] > 3:
            self.cache.settle([row.length for row in self.rows])
        if self.state is not None and not all(row.finish_reason for row in self.rows):
            self.state.observe(Observation(emitted, landed.aux))
        return [drafted for _, drafted, *_ in answers], [accepted for accepted, *_ in answers]

    def cancel(self, launched: Round) -> None:
        """Forget a round that was launched and is not wanted."""
        self.cache.restore(launched.before.cache)
        self.last = launched.before.last
        if self.processors:
            self.processors.restore(launched.before.counts)

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
