"""Prefill: the target reads the prompts of new requests in chunks."""

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
"""Prompt positions per forward, over all rows: mlx-lm's `prefill_step_size` (0.32, `generate_step`)."""
PREFILL_MS = 400
"""Milliseconds that a chunk may take while others decode. With a round, that is less than the one second after which
a reader loses the train of thought (Nielsen 1993, Usability Engineering, chapter 5)."""
LEAST_CHUNK = 128
"""Minimum positions of a chunk. With fewer, reading the weights would cost too much per position."""
_FIRST_TOKENS = 128
"""Maximum positions, over all rows, of a forward that also draws the first tokens. For more, reading the last token in
another forward is cheaper."""


class Prefill:
    """Reads the prompts of a batch together until its requests can decode."""

    def __init__(self, batch: Batch, known: int = 0, prefixes: PrefixCache | None = None):
        """`known`: positions of a single prompt that are already in the batch's cache.

        `prefixes`: takes snapshots at the boundaries of prompts, if the cache holds more than keys and values.
        """
        self.batch = batch
        self._texts = [request.text for request in batch.requests]
        self._read = known
        self._prefixes = None if batch.cache.is_positional else prefixes
        self._stops = [
            stops(each.request.boundaries, len(text), known)
            for each, text in zip(batch.requests, self._texts, strict=True)
        ]
        self._count()

    @property
    def left(self) -> int:
        """Positions left to read, over all rows."""
        longest = max(map(len, self._texts)) - 1
        return len(self.batch.requests) * max(0, longest - self._read)

    def step(self, chunk: int) -> None:
        """Read the next positions of each prompt. The requests can decode when nothing is `left`.

        Reads at most `chunk` positions, including padding, but at least one of each prompt. If few positions are left,
        they are read to the last token, and the requests get their first tokens. Otherwise the first round reads the
        last token. Forwards end at the snapshots of recurrent states; other snapshots are taken after a forward.
        """
        prompts = self._texts
        longest, room = max(map(len, prompts)) - 1, chunk
        while self._read < longest and (room == chunk or room >= len(prompts)):
            left, width = longest - self._read, max(1, room // len(prompts))
            stop = self._next_stop()
            ended = self._read >= min(map(len, prompts))  # one row has only its last token left
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
        """Return where the next forward must end, because recurrent states cannot be cut; None if anywhere."""
        if self._prefixes is None or not self.batch.cache.recurrent:
            return None
        return min((stop for row in self._stops for stop in row if stop > self._read), default=None)

    def _keep(self, before: int, after: int) -> None:
        """Keep snapshots at the boundaries just passed, before ring buffers are cut to their windows."""
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
        """Read the rest of each prompt and draw the next token, which saves one forward before the first token."""
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
        """Run the target over a piece of each prompt. With `ends`, compute logits at these positions only."""
        batch, counts = self.batch, [len(piece) for piece in pieces]
        width = max(counts)
        # Pad with a token of the text: another token might give NaN, which would spread to later positions.
        last = [text[-1:] for text in self._texts]
        padded = [piece + end * (width - len(piece)) for piece, end in zip(pieces, last, strict=True)]
        batch.cache.expect(counts)
        return batch.target.forward(mx.array(padded, mx.int32), batch.cache, batch.aux_layers, ends)

    def _show(self, counts: list[int], aux: tuple[mx.array, ...]) -> None:
        """Pass the next positions of the prompts to the proposer, counts[i] of them in row i."""
        batch, start = self.batch, self._read + 1
        if batch.state is not None:
            following = [text[start : start + count] for text, count in zip(self._texts, counts, strict=True)]
            batch.state.prefill(Observation(following, aux))


def stops(boundaries: Sequence[int], prompt: int, known: int = 0) -> list[int]:
    """Return the positions after which to take snapshots, in order.

    boundaries: lengths of prefixes that other prompts may share; the whole prompt of `prompt` tokens is always one.
    known: positions that need not be read. A snapshot leaves out a boundary's last token, and a prompt's last two,
    because a cached position depends on the token after it (`PrefixCache.find`). Of two positions closer than `LEAST`,
    the first is used because it serves more prompts.
    """
    found = list[int]()
    for boundary in sorted({*boundaries, prompt}):
        stop = min(boundary - 1, prompt - 2)
        if stop >= (found[-1] if found else known) + LEAST:
            found.append(stop)
    return found
