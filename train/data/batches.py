"""Batches of packed rows in the order of (seed, epoch), read with mlx-data and prefetched in the background."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from eagle_mlx.hidden_states import Bits

from ..distributed import SINGLE_PROCESS, World
from .examples import Examples
from .packing import PackedBatch, Piece, Row, batches_of, cut_into_pieces

T = TypeVar("T")
_END = object()


@dataclass(frozen=True)
class Rows:
    """A batch of B rows of L tokens on the host. Padding has segment 0."""

    tokens: NDArray[np.int32]  # [B, L]
    loss_mask: NDArray[np.uint8]  # [B, L], 1 on the tokens to learn
    segments: NDArray[np.int32]  # [B, L]: 1, 2, … for a row's first, second, … conversation
    states: Bits | None
    """[B, L, (n + 1) * H]: features and last layer concatenated (`HiddenStates.whole`); None before capture."""
    first: int = 0  # index of the first row in the batch of all processes
    samples: tuple[tuple[int, ...], ...] = ()  # the samples in each row; empty in a part of a batch
    texts: tuple[tuple[NDArray[np.int32], ...], ...] = ()
    """Before capture, for each row and segment: the conversation's tokens up to the end of its piece. The target must
    read its beginning too. Empty if each segment is a conversation's beginning."""

    @classmethod
    def empty(cls, length: int) -> Rows:
        none = np.zeros((0, length), np.int32)
        return cls(none, none.astype(np.uint8), none, None)

    def split(self, parts: int) -> list[Rows]:
        """Split the rows into at most `parts` smaller batches, none of them empty."""
        cuts = [index for index in np.array_split(np.arange(len(self.tokens)), parts) if len(index)]
        states = [None if self.states is None else self.states[i] for i in cuts]
        texts = [self.texts[i[0] : i[-1] + 1] for i in cuts]
        return [
            Rows(self.tokens[i], self.loss_mask[i], self.segments[i], part, self.first + int(i[0]), texts=own)
            for i, part, own in zip(cuts, states, texts, strict=True)
        ]


class Batches:
    """The batches of an epoch, determined by the seed, the epoch and the samples.

    If several processes train together, a batch has `rows` rows for each, and each process reads its own.
    """

    def __init__(self, samples: Examples, rows: int, length: int, seed: int, world: World = SINGLE_PROCESS):
        self.samples = samples
        self._rows, self._length, self._seed, self._world = rows, length, seed, world
        self._packed: tuple[int, list[PackedBatch]] | None = None
        self._first = 0, 0

    def put_first(self, epoch: int, sample: int) -> None:
        """Put the samples from index `sample` on before all others in this epoch."""
        self._first, self._packed = (epoch, sample), None

    def steps_per_epoch(self) -> int:
        return len(self._batches(0))

    @property
    def padding(self) -> float:
        """The share of padding in the first epoch, 0 to 1."""
        batches = self._batches(0)
        places = sum(len(batch.rows) * batch.width for batch in batches)
        return 1 - sum(batch.tokens for batch in batches) / max(1, places)

    def epoch(self, epoch: int, skip: int = 0) -> Generator[Rows, None, None]:
        """Yield the epoch's batches, without the first `skip`. Close the generator to stop its thread.

        All processes get the same number of batches. If the last one has fewer rows than there are processes, some get
        no rows. Raises the errors of reading a sample, such as ShardError.
        """
        batches = self._batches(epoch)[skip:]
        parts = [self._world.part(len(batch.rows)) for batch in batches]
        own = [(batch.rows[at], batch.width) for batch, at in zip(batches, parts, strict=True)]
        with contextlib.closing(self._prefetched([(row, width) for rows, width in own for row in rows])) as stream:
            for at, (rows, _) in zip(parts, own, strict=True):
                found = next(stream) if rows else Rows.empty(self._length)
                samples = tuple(tuple(piece.sample for piece in row) for row in rows)
                yield dataclasses.replace(found, first=at.start, samples=samples, texts=self._texts(rows))

    def learned(self, begin: int, until: tuple[int, int], count: int | None = None, first: int = 0) -> set[Piece]:
        """Return what was learned from the first `count` samples, or all, from epoch `begin` up to an epoch and batch.

        In epoch `begin`, the samples from index `first` on came first.
        """
        lengths, (epoch, batch) = self.samples.lengths[:count], until
        if epoch > begin:
            every = (cut_into_pieces(sample, tokens, self._length) for sample, tokens in enumerate(lengths))
            return {piece for pieces in every for piece in pieces}
        rows = self._rows * self._world.size
        batches = batches_of(lengths, rows, self._length, self._seed, epoch, first)[:batch] if batch else []
        return {piece for one in batches for row in one.rows for piece in row}

    def _prefetched(self, rows: list[tuple[Row, int]]) -> Generator[Rows, None, None]:
        import mlx.data as dx  # not at the top, so that `eagle-train --help` works without it

        stream = (
            dx.buffer_from_vector([{"row": i} for i in range(len(rows))])
            .sample_transform(lambda sample: self._read(*rows[int(sample["row"])]))
            .batch(self._rows)
            .to_stream()
        )
        with contextlib.closing(prefetch(iter(stream), 4)) as batches:
            for batch in batches:
                states = batch["states"].view(np.uint16) if self.samples.has_states else None
                yield Rows(batch["tokens"], batch["loss_mask"], batch["segments"], states)

    def _texts(self, rows: Sequence[Row]) -> tuple[tuple[NDArray[np.int32], ...], ...]:
        """Return what the target must read of these rows' conversations; nothing if their states are captured."""
        if self.samples.has_states:
            return ()
        return tuple(tuple(self.samples[piece.sample].tokens[: piece.stop] for piece in row) for row in rows)

    def _batches(self, epoch: int) -> list[PackedBatch]:
        """Return the epoch's batches. The last result is cached."""
        if self._packed is None or self._packed[0] != epoch:
            first = self._first[1] if epoch == self._first[0] else 0
            rows = self._rows * self._world.size
            batches = batches_of(self.samples.lengths, rows, self._length, self._seed, epoch, first)
            self._packed = epoch, batches
        return self._packed[1]

    def _read(self, pieces: Row, width: int) -> dict[str, NDArray[Any]]:
        """Return one row for mlx-data. Hidden states travel as bytes, since mlx-data has no 16-bit numbers."""
        samples = [(self.samples[piece.sample], slice(piece.start, piece.stop)) for piece in pieces]
        row: dict[str, NDArray[Any]] = {
            "tokens": _joined([sample.tokens[at] for sample, at in samples], width),
            "loss_mask": _joined([sample.loss_mask[at] for sample, at in samples], width),
            "segments": _joined([np.full(len(p), i, np.int32) for i, p in enumerate(pieces, 1)], width),
        }
        if self.samples.has_states:
            parts = [one.states[at].whole for one, at in samples if one.states is not None]
            row["states"] = _joined(parts, width).view(np.uint8)
        return row


def _joined(parts: Sequence[NDArray[Any]], width: int) -> NDArray[Any]:
    """Concatenate arrays [T, ...] and pad with zeros up to `width`."""
    joined = np.zeros((width, *parts[0].shape[1:]), parts[0].dtype)
    np.concatenate(parts, out=joined[: sum(map(len, parts))])
    return joined


def prefetch(items: Iterator[T], count: int) -> Generator[T, None, None]:
    """Yield the items, fetching up to `count` ahead in one thread. Close the generator to join the thread.

    mlx-data's own prefetching changes OpenBLAS's number of threads during a step, and so the last bits of products.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        coming = deque(pool.submit(next, items, _END) for _ in range(count))
        while (item := coming.popleft().result()) is not _END:
            coming.append(pool.submit(next, items, _END))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)
