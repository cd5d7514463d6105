"""Prefill: the target reads the prompts of new requests in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.prefix import LEAST, PrefixCache
from eagle_mlx.plan import LEAST_CHUNK
from eagle_mlx.vision.tower import ImageInput


class Prefill:
    """Reads the prompts of a batch together until its requests can decode."""

    def __init__(self, batch: Batch, cached: int = 0, prefixes: PrefixCache | None = None):
        """`cached`: positions of a single prompt that are already in the batch's cache. `prefixes`: takes snapshots at
        the boundaries of prompts, if the cache holds more than keys and values."""
        self.batch = batch
        self._texts = [request.text for request in batch.requests]
        self._read = cached
        self._prefixes = None if all(cache.is_positional for cache in batch.caches) else prefixes
        boundaries = [request.request.boundaries for request in batch.requests]
        self._stops = [stops(ends, len(text), cached) for ends, text in zip(boundaries, self._texts, strict=True)]
        images = batch.requests[0].request.images  # such a prompt is read alone
        self._blocks = [(span.start, span.end) for span in images if span.image.is_block]

    @property
    def left(self) -> int:
        longest = max(map(len, self._texts)) - 1
        return len(self.batch.requests) * max(0, longest - self._read)

    def step(self, chunk: int) -> None:
        """Read the next positions of each prompt without its last token, which the first round reads.

        Reads at most `chunk` positions, including padding, but at least one of each prompt. The rest is divided
        evenly, because others wait for a whole chunk and for the last one. Forwards end at the snapshots of recurrent
        states; other snapshots are taken after a forward.
        """
        rows, longest = len(self._texts), max(map(len, self._texts)) - 1
        chunk = room = min(chunk, max(LEAST_CHUNK, rows * evenly(longest - self._read, chunk // rows)))
        while self._read < longest and (room == chunk or room >= rows):
            width = min(max(1, room // rows), self._next_stop() - self._read)
            width = self._whole(self._read + width) - self._read
            self._read_chunk(width)
            self._keep(self._read, self._read + width)
            self._read += width
            room -= rows * width
        self.batch.cache.compact()
        mx.async_eval(self.batch.cache.state)  # until computed, it refers to the larger rings

    def _next_stop(self) -> int:
        """Return where the next forward must end at the latest, because recurrent states cannot be cut."""
        end = max(map(len, self._texts))
        if self._prefixes is None or not any(cache.recurrent for cache in self.batch.caches):
            return end
        return min((stop for row in self._stops for stop in row if stop > self._read), default=end)

    def _whole(self, end: int) -> int:
        """Return where a forward ends that should end here: an image whose tokens see one another is read at once."""
        for start, image_end in self._blocks:
            if start < end < image_end:
                return start if start > self._read else image_end
        return end

    def _keep(self, before: int, after: int) -> None:
        """Keep snapshots at the boundaries just passed, before ring buffers are cut to their windows."""
        if self._prefixes is None:
            return
        for row, (text, ends) in enumerate(zip(self._texts, self._stops, strict=True)):
            for stop in ends:
                for past in self.batch.pasts(row, stop) if before < stop <= after else ():
                    self._prefixes.keep(text, past)

    def _read_chunk(self, width: int) -> None:
        batch, start = self.batch, self._read
        ends = [min(start + width, len(text) - 1) for text in self._texts]
        counts = [max(0, end - start) for end in ends]
        width, reads = max(counts), list(zip(self._texts, counts, strict=True))
        # Pad with a token of the text: another token might give NaN, which would spread to later positions.
        padded = [text[start : start + count] + text[-1:] * (width - count) for text, count in reads]
        batch.cache.expect(counts)
        if self._blocks:
            batch.cache.lengths.see_blocks(self._blocks)
        tokens = mx.array(padded, mx.int32)
        embed, spans = batch.target.embed, batch.requests[0].request.images
        images = ImageInput.of(embed, tokens, start, spans)
        aux = batch.target.forward(tokens, batch.cache, batch.aux_layers, images=images).aux
        following = [text[start + 1 : start + 1 + count] for text, count in reads]
        head = batch.proposer.head if batch.proposer is not None and spans else None
        reads_images = head is not None and head.reads_images
        shown = ImageInput.of(embed, mx.array(following), start + 1, spans) if reads_images else None
        embeddings = shown.embeddings if shown is not None else None
        batch.observe(following, [start] * len(counts), counts, aux, in_prompts=True, embeddings=embeddings)
        batch.cache.advance(width if min(counts) == width else mx.array(counts, mx.int32), at_most=width)
        batch.cache.sync(ends)
        mx.eval([cache.state for cache in batch.caches])


def evenly(total: int, most: int) -> int:
    """Return the size of the largest part if a total is divided evenly into as few parts of at most `most` as possible,
    but of at least 1."""
    return -(-total // max(1, -(-total // max(1, most))))


def stops(boundaries: Sequence[int], prompt: int, cached: int = 0) -> list[int]:
    """Return the positions after which to take snapshots, in order.

    boundaries: lengths of prefixes that other prompts may share; the whole prompt of `prompt` tokens is always one.
    cached: positions that need not be read. A snapshot leaves out a boundary's last token, and a prompt's last two,
    because a cached position depends on the token after it. Of two positions closer than `LEAST`, the first is used
    because it serves more prompts.
    """
    places = [cached]
    for boundary in sorted({*boundaries, prompt}):
        stop = min(boundary - 1, prompt - 2)
        if stop >= places[-1] + LEAST:
            places.append(stop)
    return places[1:]
