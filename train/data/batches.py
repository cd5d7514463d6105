"""Batches: short conversations share rows, rows of similar length form a batch, in the order of (seed, epoch).

mlx-data reads them; a thread prefetches them.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.hidden_states import Bits, read_states
from eagle_mlx.target import Target

from ..distributed import SINGLE_PROCESS, World
from .examples import Examples

T = TypeVar("T")
_END = object()
MIN_TOKENS = 3  # minimum tokens of a piece for one draft step: two to read and one to predict
_WINDOW = 256
"""Rows that are filled from one window, sorted by length: enough to fill them, few enough to keep batches mixed.

With windows of 1,024 pieces, `make demo`'s head had τ 2.38, 1.99 and 2.17 by seed instead of 2.52, 2.22 and 2.31."""
_FULL_SHARE = 32  # a row is full if less than 1/32 of it is left


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start..stop of a sample."""

    sample: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Row = tuple[Piece, ...]


def order_of(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def cut_into_pieces(sample: int, tokens: int, length: int) -> list[Piece]:
    """Cut a sample into pieces of at most `length` tokens; a rest too short to learn from is dropped."""
    pieces = (Piece(sample, start, min(start + length, tokens)) for start in range(0, tokens, length))
    return [piece for piece in pieces if len(piece) >= MIN_TOKENS]


def pack(lengths: Sequence[int], order: Sequence[int] | NDArray[np.int64], length: int) -> list[Row]:
    """Cut samples into pieces of at most `length` tokens and pack them into rows of at most `length` tokens.

    In each window, the longest pieces come first, and each goes to the fullest row with enough room. So no two rows
    would fit into one, and at most one row is less than half full.
    """
    rows: list[list[Piece]] = []
    open_rows: list[tuple[int, int]] = []  # remaining room and number of each row that is not full, in ascending order
    for window in _windows(lengths, order, length):
        for piece in sorted(window, key=len, reverse=True):
            at = bisect.bisect_left(open_rows, (len(piece), 0))
            if at < len(open_rows):
                room, row = open_rows.pop(at)
                rows[row].append(piece)
            else:
                room, row = length, len(rows)
                rows.append([piece])
            if room - len(piece) >= MIN_TOKENS:
                bisect.insort(open_rows, (room - len(piece), row))
    return [tuple(row) for row in rows]


def _windows(lengths: Sequence[int], order: Sequence[int] | NDArray[np.int64], length: int) -> list[list[Piece]]:
    """Return the pieces in this order, in windows of at least the tokens of `_WINDOW` rows; the last may have fewer."""
    windows: list[list[Piece]] = [[]]
    total = 0
    for sample in order:
        for piece in cut_into_pieces(int(sample), lengths[int(sample)], length):
            if total >= _WINDOW * length:
                windows.append([])
                total = 0
            windows[-1].append(piece)
            total += len(piece)
    return windows


@dataclass(frozen=True)
class PackedBatch:
    rows: tuple[Row, ...]
    width: int  # length of the padded rows

    @property
    def tokens(self) -> int:
        return sum(len(piece) for row in self.rows for piece in row)


def batches_of(
    lengths: Sequence[int], rows: int, length: int, seed: int, epoch: int, first: int = 0
) -> list[PackedBatch]:
    """Return the batches of (seed, epoch), of `rows` rows each; the last may have fewer.

    Samples from index `first` on come first; other samples fill up their last batch.
    """
    batches = _batches_of(range(first, len(lengths)), lengths, rows, length, seed, epoch)
    others = [row for batch in _batches_of(range(first), lengths, rows, length, seed, epoch) for row in batch.rows]
    if batches and others and (missing := rows - len(batches[-1].rows)):
        batches[-1] = _batch([*batches[-1].rows, *others[-missing:]], length)
        del others[-missing:]
    return [*batches, *(_batch(others[at : at + rows], length) for at in range(0, len(others), rows))]


def _batch(rows: Sequence[Row], length: int) -> PackedBatch:
    """Pad the rows to the length of the longest, rounded up to limit the number of different widths."""
    multiple = max(1, length // (2 * _FULL_SHARE))
    fullest = max(sum(map(len, row)) for row in rows)
    return PackedBatch(tuple(rows), min(length, -(-fullest // multiple) * multiple))


def _batches_of(
    samples: range, lengths: Sequence[int], rows: int, length: int, seed: int, epoch: int
) -> list[PackedBatch]:
    """Return batches of these samples. Full rows are grouped at random, the others by how full they are.

    A batch is as wide as its fullest row, rounded up to a 64th of `length`, so padding is at most 1/32 of the total
    plus one batch. The order of batches is random, with the short one last.
    """
    packed = pack(lengths, samples.start + order_of(seed, epoch, len(samples)), length)
    fills = np.array([sum(map(len, row)) for row in packed], np.int64)
    order = order_of(seed + 1, epoch, len(packed))
    left = length - fills[order]
    left[left * _FULL_SHARE < length] = 0
    order = order[np.argsort(left, kind="stable")]
    groups = [order[at : at + rows] for at in range(0, len(packed), rows)]
    whole = len(packed) // rows
    groups = [groups[i] for i in order_of(seed + 2, epoch, whole)] + groups[whole:]
    return [_batch([packed[row] for row in group.tolist()], length) for group in groups]


def count_learned(lengths: Sequence[int], pieces: Iterable[Piece]) -> tuple[int, int]:
    """Return the number of samples and tokens in these pieces. A dropped rest of a sample counts too."""
    learned: Counter[int] = Counter()
    for piece in pieces:
        learned[piece.sample] += len(piece)
    tokens = sum(lengths[i] if lengths[i] - seen < MIN_TOKENS else seen for i, seen in learned.items())
    return len(learned), tokens


@dataclass(frozen=True)
class Rows:
    """A batch of B rows of L tokens on the host. Padding has segment 0."""

    tokens: NDArray[np.int32]  # [B, L]
    loss_mask: NDArray[np.uint8]  # [B, L], 1 on the tokens to learn
    segments: NDArray[np.int32]  # [B, L]: 1, 2, … for a row's first, second, … conversation
    states: Bits | None  # [B, L, (n + 1) * H]: `HiddenStates.whole`; None before capture
    first: int = 0  # index of the first row in the batch of all processes
    samples: tuple[tuple[int, ...], ...] = ()  # the samples in each row; empty in a part of a batch
    texts: tuple[tuple[NDArray[np.int32], ...], ...] = ()
    """Before capture, for each row and segment: the conversation's tokens from its beginning to the end of its piece.
    Empty if each segment is a conversation's beginning."""

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
    """The batches of an epoch. Of several processes that train together, each reads its own `rows` of a batch."""

    def __init__(self, samples: Examples, rows: int, length: int, seed: int, world: World = SINGLE_PROCESS):
        self.samples = samples
        self._rows, self._length = rows, length
        self._seed, self._world = seed, world
        self._packed: dict[int, list[PackedBatch]] = {}  # of the latest epoch
        self._first = 0, 0

    def put_first(self, epoch: int, sample: int) -> None:
        """Put the samples from index `sample` on before all others in this epoch."""
        self._first, self._packed = (epoch, sample), {}

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

        All processes get the same number of batches; some get no rows of a last one that is too small. Raises the
        errors of reading a sample, such as ShardError.
        """
        batches = self._batches(epoch)[skip:]
        parts = [self._world.part(len(batch.rows)) for batch in batches]
        own = [(batch.rows[at], batch.width) for batch, at in zip(batches, parts, strict=True)]
        none = np.zeros((0, self._length), np.int32)
        with contextlib.closing(self._prefetched([(row, width) for rows, width in own for row in rows])) as stream:
            for at, (rows, _) in zip(parts, own, strict=True):
                own_rows = next(stream) if rows else Rows(none, none.astype(np.uint8), none, None)
                samples = tuple(tuple(piece.sample for piece in row) for row in rows)
                texts: tuple[tuple[NDArray[np.int32], ...], ...] = ()
                if not self.samples.has_states:
                    texts = tuple(tuple(self.samples[p.sample].tokens[: p.stop] for p in row) for row in rows)
                yield dataclasses.replace(own_rows, first=at.start, samples=samples, texts=texts)

    def learned(self, begin: int, until: tuple[int, int], count: int | None = None, first: int = 0) -> set[Piece]:
        """Return what was learned from the first `count` samples, or all, from epoch `begin` up to an epoch and batch.

        In epoch `begin`, the samples from index `first` on came first.
        """
        lengths, (epoch, end) = self.samples.lengths[:count], until
        if epoch > begin:
            every = (cut_into_pieces(sample, tokens, self._length) for sample, tokens in enumerate(lengths))
            return {piece for pieces in every for piece in pieces}
        batches = self._pack(lengths, epoch, first)[:end]
        return {piece for batch in batches for row in batch.rows for piece in row}

    def _prefetched(self, rows: list[tuple[Row, int]]) -> Generator[Rows, None, None]:
        import mlx.data as dx  # not at the top, so that `eagle-train --help` works without it

        buffer = dx.buffer_from_vector([{"row": i} for i in range(len(rows))])
        stream = buffer.sample_transform(lambda at: self._read(*rows[int(at["row"])])).batch(self._rows).to_stream()
        with contextlib.closing(prefetch(iter(stream), 4)) as batches:
            for batch in batches:
                states = batch["states"].view(np.uint16) if self.samples.has_states else None
                yield Rows(batch["tokens"], batch["loss_mask"], batch["segments"], states)

    def _batches(self, epoch: int) -> list[PackedBatch]:
        if epoch not in self._packed:
            first = self._first[1] if epoch == self._first[0] else 0
            self._packed = {epoch: self._pack(self.samples.lengths, epoch, first)}
        return self._packed[epoch]

    def _pack(self, lengths: Sequence[int], epoch: int, first: int) -> list[PackedBatch]:
        return batches_of(lengths, self._rows * self._world.size, self._length, self._seed, epoch, first)

    def _read(self, pieces: Row, width: int) -> dict[str, NDArray[Any]]:
        """Return one row for mlx-data. Hidden states travel as bytes, since mlx-data has no 16-bit numbers."""
        samples = [(self.samples[piece.sample], slice(piece.start, piece.stop)) for piece in pieces]
        row: dict[str, NDArray[Any]] = {
            "tokens": _joined([sample.tokens[at] for sample, at in samples], width),
            "loss_mask": _joined([sample.loss_mask[at] for sample, at in samples], width),
            "segments": _joined([np.full(len(p), i, np.int32) for i, p in enumerate(pieces, 1)], width),
        }
        if self.samples.has_states:
            parts = [sample.states[at].whole for sample, at in samples if sample.states is not None]
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
        coming: deque[Future[Any]] = deque(pool.submit(next, items, _END) for _ in range(count))
        while (item := coming.popleft().result()) is not _END:
            coming.append(pool.submit(next, items, _END))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def capture_rows(target: Target, aux_layers: Sequence[int], rows: Rows) -> mx.array:
    """Compute the hidden states [B, L, (n + 1) * H] of packed rows lazily: aux layers, then the last layer.

    The target reads each conversation separately, right-padded, so none attends to another, and from its beginning.
    Those of similar length are read together.
    """
    batches, places = unpack(rows)
    states = [read_states(target, mx.array(tokens), aux_layers) for tokens in batches]
    return mx.concatenate([x.reshape(-1, x.shape[-1]) for x in states])[mx.array(places)]


def unpack(rows: Rows) -> tuple[list[NDArray[np.int32]], NDArray[np.int32]]:
    """Unpack rows into the texts that the target reads, in padded batches [N, T] of at most the rows' B * L tokens.

    Also return each position's index [B, L] in the flattened and concatenated batches; padding has index 0.
    """
    row, at = np.nonzero(rows.segments)
    starts = np.flatnonzero(np.diff(row, prepend=-1) | np.diff(rows.segments[row, at], prepend=-1))
    pieces = list(zip(np.split(row, starts[1:]), np.split(at, starts[1:]), strict=True)) if len(row) else []
    texts = [text for of_row in rows.texts for text in of_row] or [rows.tokens[piece] for piece in pieces]
    order, first, read = sorted(range(len(texts)), key=lambda i: -len(texts[i])), 0, 0
    batches, places = [], np.zeros(rows.tokens.shape, np.int32)
    while first < len(order):
        width = len(texts[order[first]])
        group = order[first : first + max(1, rows.tokens.size // width)]
        tokens = np.zeros((len(group), width), np.int32)
        for number, i in enumerate(group):
            length = len(texts[i])
            tokens[number, :length] = texts[i]
            end = read + number * width + length
            places[pieces[i]] = np.arange(end - len(pieces[i][0]), end)
        batches.append(tokens)
        first, read = first + len(group), read + tokens.size
    return batches, places
