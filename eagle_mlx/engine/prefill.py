"""The prompts of new requests, read by the target a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.prefix import LEAST, PrefixCache
from eagle_mlx.engine.round import Round
from eagle_mlx.plan import PLAIN
from eagle_mlx.proposers.base import Observation
from eagle_mlx.target import Forward

PREFILL_CHUNK = 2048
"""Positions of prompts, over all rows, that one forward reads: mlx-lm's `prefill_step_size` (0.32, `generate_step`)."""
PREFILL_MS = 400
"""Milliseconds that a chunk may take while others decode. A chunk and a round then stay below the second after which a
reader's flow of thought is interrupted (Nielsen 1993, Usability Engineering, chapter 5).
"""
LEAST_CHUNK = 128
"""Positions that a chunk has in any case: fewer would read the weights too often for what they read."""
_FIRST_TOKENS = 128
"""Positions, over all rows, that a forward may read of prompts to give their first tokens too: what the last layer
costs is then less than a forward of its own for the last token.
"""


class ChunkSize:
    """Positions that the next chunk may read: as many as fit the time if others decode, else as many as memory allows.

    The speed is that of the latest chunk of at least `LEAST_CHUNK` positions.
    """

    def __init__(self, most: int, seconds: float):
        self.most, self.seconds = most, seconds
        self._speed = 0.0
        """Positions a second; 0 until a chunk has been timed."""

    def now(self, decoding: bool) -> int:
        """Positions over all rows."""
        return min(self.most, max(LEAST_CHUNK, int(self._speed * self.seconds))) if decoding else self.most

    def took(self, positions: int, seconds: float) -> None:
        """Learn from a chunk. A short one says little: most of its time is that of reading the weights."""
        if positions >= min(LEAST_CHUNK, self.most) and seconds > 0:
            self._speed = positions / seconds


class Prefill:
    """Reads the prompts of a batch side by side, until its requests can decode."""

    def __init__(self, batch: Batch, known: int = 0, prefixes: PrefixCache | None = None):
        """`known`: positions of a single prompt that the batch's cache holds already.

        `prefixes`: what takes snapshots at the boundaries of prompts, where keys and values alone are not all.
        """
        self.batch = batch
        self._texts = [request.text for request in batch.requests]
        """Of a request that was paused, what it has said too."""
        self._read = known
        self._prefixes = None if batch.cache.is_positional else prefixes
        self._stops = [
            stops(each.request.boundaries, len(text), known)
            for each, text in zip(batch.requests, self._texts, strict=True)
        ]
        self._count()

    @property
    def left(self) -> int:
        """Positions that are to be read, over all rows."""
        longest = max(map(len, self._texts)) - 1
        return len(self.batch.requests) * max(0, longest - self._read)

    def step(self, chunk: int) -> None:
        """Read the next positions of each prompt; the requests can decode when nothing is `left`.

        At most `chunk` positions are read, the rows' padding included, but at least one of each prompt. What is short
        is read to its last token, and gives the requests their first tokens. Of the rest the last token is left to the
        first round. A recurrent state has its snapshots taken between two forwards, any other behind one.
        """
        prompts = self._texts
        longest, room = max(map(len, prompts)) - 1, chunk
        while self._read < longest and (room == chunk or room >= len(prompts)):
            left, width = longest - self._read, max(1, room // len(prompts))
            stop = self._next_stop()
            ended = self._read >= min(map(len, prompts))  # a row's last token is behind what has been read
            if stop is None and not ended and len(prompts) * (left + 1) <= min(room, _FIRST_TOKENS):
                self._read_to_end(prompts)
            else:
                width = width if stop is None else min(width, stop - self._read)
                self._read_chunk([prompt[:-1][self._read : self._read + width] for prompt in prompts])
            self._keep(self._read, self._read + width)
            self._read += width
            room -= len(prompts) * width
        self._count()
        if not self.left:
            self.batch.cache.compact()

    def _count(self) -> None:
        for request in self.batch.requests:
            request.read(self._read)

    def _next_stop(self) -> int | None:
        """Where the next forward must end, because a state cannot be cut."""
        if self._prefixes is None or not self.batch.cache.recurrent:
            return None
        return min((stop for row in self._stops for stop in row if stop > self._read), default=None)

    def _keep(self, before: int, after: int) -> None:
        """Keep snapshots at what has been passed; rings have not been cut to their windows yet."""
        if self._prefixes is None:
            return
        for row, (text, found) in enumerate(zip(self._texts, self._stops, strict=True)):
            for stop in found:
                past = self.batch.past(row, stop) if before < stop <= after else None
                if past is not None:
                    self._prefixes.keep(text, past)

    def _read_chunk(self, pieces: list[list[int]]) -> None:
        batch, counts = self.batch, [len(piece) for piece in pieces]
        aux = self._forward(pieces).aux
        self._show(counts, aux)
        width = max(counts)
        batch.cache.advance(width if min(counts) == width else mx.array(counts, mx.int32), at_most=width)
        ends = [min(self._read + width, len(text) - 1) for text in self._texts]
        batch.cache.sync(ends)
        mx.eval(batch.cache.state)

    def _read_to_end(self, prompts: list[list[int]]) -> None:
        """Read the rest of each prompt and draw the token behind it: a forward less until the first token."""
        batch, draft, first = self.batch, self.batch.no_draft(), Round(self.batch, PLAIN)
        pieces = [prompt[self._read :] for prompt in prompts]
        counts = [len(piece) for piece in pieces]
        out = self._forward(pieces, [count - 1 for count in counts])
        read = mx.array(counts, mx.int32)
        positions = (batch.cache.lengths.offset + read)[:, None]
        verdict = batch.verify(out.logits, draft, positions, patience=math.inf)
        batch.newest = verdict.tokens
        batch.cache.advance(counts[0] if len(set(counts)) == 1 else read, at_most=max(counts))
        if batch.processors:
            batch.processors.commit(verdict)
        at_end = tuple(mx.take_along_axis(x, (read - 1)[:, None, None], axis=1) for x in out.aux)
        first.send(draft, verdict, Forward(out.logits, at_end))
        self._show([count - 1 for count in counts], tuple(x[:, : max(counts) - 1] for x in out.aux))
        first.collect()
        batch.cache.sync([request.length for request in batch.requests])

    def _forward(self, pieces: list[list[int]], ends: list[int] | None = None) -> Forward:
        """The target's forward over a piece of each prompt; with `ends`, the logits of these positions alone."""
        batch, counts = self.batch, [len(piece) for piece in pieces]
        width = max(counts)
        # The padding is a token that is read anyway: one that reads as no number would spoil what is behind it.
        last = [text[-1:] for text in self._texts]
        padded = [piece + end * (width - len(piece)) for piece, end in zip(pieces, last, strict=True)]
        batch.cache.expect(counts)
        return batch.target.forward(mx.array(padded, mx.int32), batch.cache, batch.aux_layers, ends)

    def _show(self, counts: list[int], aux: tuple[mx.array, ...]) -> None:
        """Let the proposer see the next positions of the prompts, counts[i] of them in row i."""
        batch, start = self.batch, self._read + 1
        if batch.state is not None:
            following = [text[start : start + count] for text, count in zip(self._texts, counts, strict=True)]
            batch.state.prefill(Observation(following, aux))


def stops(boundaries: Sequence[int], prompt: int, known: int = 0) -> list[int]:
    """Positions after which snapshots are to be taken, in order.

    boundaries: tokens that other prompts are expected to have in common with this one; all `prompt` tokens of it are
    always one. known: positions that need not be read. The last token of each is left out, as are a prompt's last two:
    what is kept of a position depends on the token after it (`PrefixCache.find`). Of two that are closer than `LEAST`
    the first is taken, which serves more prompts.
    """
    found = list[int]()
    for boundary in sorted({*boundaries, prompt}):
        stop = min(boundary - 1, prompt - 2)
        if stop >= (found[-1] if found else known) + LEAST:
            found.append(stop)
    return found
