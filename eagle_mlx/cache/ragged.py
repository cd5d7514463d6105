"""The caches of a whole model for a batch of rows, pieces of them for reuse, and their size in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from eagle_mlx.cache.full import RaggedChunked, RaggedKV, RaggedList, copied, most_slots
from eagle_mlx.cache.kinds import ragged
from eagle_mlx.cache.lengths import Moves, RowLengths, SavedLengths
from eagle_mlx.cache.recurrent import RecurrentState
from eagle_mlx.cache.window import RaggedWindow
from eagle_mlx.decoding.draft import Branches
from eagle_mlx.hooks import Hooks, NotesCalls


@dataclass(frozen=True)
class KVPiece:
    """Keys and values of some positions of one row, for all layers that keep every position."""

    layers: list[list[mx.array]]  # each layer's keys and values [1, heads, L, D]; empty if nothing was written

    @property
    def arrays(self) -> list[mx.array]:
        return [x for layer in self.layers for x in layer]

    def split(self, at: int) -> tuple[KVPiece, KVPiece]:
        """Return the first `at` positions and the rest. This piece is consumed: at most one array is held twice."""
        rest = KVPiece([[] for _ in self.layers])
        for layer, tails in zip(self.layers, rest.layers, strict=True):
            for index, x in enumerate(layer):
                head, tail = copied(x[:, :, :at]), copied(x[:, :, at:])
                mx.eval(head, tail)
                layer[index] = head
                tails.append(tail)
        return KVPiece(self.layers), rest


@dataclass(frozen=True)
class Saved:
    """The state of a cache to return to after a rollback."""

    lengths: SavedLengths
    states: list[list[mx.array | None]]  # the arrays of every recurrent state


class RaggedCache(Sequence[Any]):
    """The caches of all layers of one model for a batch of rows; pass it to the model as `cache`."""

    def __init__(self, layers: int | Sequence[Callable[[RowLengths], Any]], rows: int):
        """`layers`: a factory for each layer's cache, or the number of full-attention layers."""
        lengths = RowLengths(rows)
        makers = [RaggedKV] * layers if isinstance(layers, int) else layers
        self._hold(lengths, [make(lengths) for make in makers])

    @classmethod
    def of(cls, model: nn.Module, rows: int, kv_bits: int | None = None) -> RaggedCache:
        """Return the ragged counterparts of the caches that mlx-lm would make for this model. A model spread over
        several machines makes its own (`make_ragged_cache`). Raises TargetError if unsupported."""
        make: Callable[[int, int | None], RaggedCache] | None = getattr(model, "make_ragged_cache", None)
        return cls.local(model, rows, kv_bits) if make is None else make(rows, kv_bits)

    @classmethod
    def local(cls, model: nn.Module, rows: int, kv_bits: int | None = None) -> Self:
        """Return such a cache for this process only, even if the model is spread over several."""
        self = cls.__new__(cls)
        lengths = RowLengths(rows)
        self._hold(lengths, [ragged(cache, lengths, model, kv_bits) for cache in make_prompt_cache(model)])
        if self.recurrent:
            hooks = Hooks.of(model)  # the target's, which keep them
            for layer in model.layers:
                hooks.add(layer, NotesCalls)
        return self

    def _hold(self, lengths: RowLengths, layers: list[Any]) -> None:
        self.lengths, self.layers = lengths, layers
        self.parts: list[Any] = RaggedList(layers).parts  # the caches of all layers, with lists of caches flattened
        self.recurrent = [part for part in self.parts if isinstance(part, RecurrentState)]
        self.windows = [part for part in self.parts if isinstance(part, RaggedWindow)]
        self.buffered = [part for part in self.parts if isinstance(part, RaggedKV)]
        self.positional = [part for part in self.buffered if not isinstance(part, RaggedWindow)]
        """The caches that keep every position and can be cut anywhere."""

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]

    def expect(self, counts: Sequence[int]) -> None:
        """Set, before a forward, how many of its positions are real in each row; the rest is padding."""
        if len(set(counts)) > 1:
            self.lengths.expect(mx.array(list(counts), mx.int32))

    def advance(self, count: int | mx.array, at_most: int | None = None) -> None:
        """Accept `count` of the positions last read: an int for all rows, or [B] int32 of at most `at_most`."""
        for state in self.recurrent:
            state.commit(count)
        self.lengths.advance(count, at_most)

    def branch(self, branches: Branches) -> None:
        """Set, before a forward, the tree that its positions form."""
        self.lengths.branch(branches)

    def keep(self, kept: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """Move the accepted entries of a tree to where a chain's would be; call this after the verify. kept: each row's
        accepted draft tokens, numbered from 0; starts: each row's number of entries before the verify."""
        moves = Moves.of(kept, starts)
        if moves is not None:
            for part in self.buffered:
                part.keep(moves)

    @property
    def is_positional(self) -> bool:
        """Whether every layer keeps every position."""
        return not self.recurrent and not self.windows

    @property
    def may_branch(self) -> bool:
        """Whether draft trees can be read: every layer keeps keys and values, and none uses chunks."""
        return all(isinstance(part, RaggedKV) and not isinstance(part, RaggedChunked) for part in self.parts)

    def sync(self, lengths: Sequence[int]) -> None:
        self.lengths.sync(lengths)

    def save(self) -> Saved:
        return Saved(self.lengths.save(), [list(state.cache) for state in self.recurrent])

    def restore(self, saved: Saved) -> None:
        self.lengths.restore(saved.lengths)
        for state, arrays in zip(self.recurrent, saved.states, strict=True):
            state.cache = list(arrays)

    def compact(self) -> None:
        for window in self.windows:
            window.compact()

    def append(self, other: RaggedCache) -> None:
        """Append the other's rows. Buffers without space for them are copied."""
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.append(theirs)
        self.lengths.append(other.lengths)

    def remove(self, row: int) -> None:
        """Remove a row; the last row moves into the gap. The others are copied if that frees much memory."""
        last = self.fork(self.lengths.rows - 1, self.lengths.upper) if row < self.lengths.rows - 1 else None
        if last is not None:
            mx.eval(last.state)  # until computed, it refers to the buffers, and writing to those would copy them
        for index, part in enumerate(self.parts):
            part.remove(row, None if last is None else last.parts[index])
        self.lengths.remove(row)
        # Until a smaller copy is computed, it refers to the larger buffer.
        mx.async_eval([x for part in self.buffered for x in part.fit()])

    def drop(self, counts: Sequence[int]) -> None:
        """Remove `counts` entries of each row after the sink of a draft window."""
        for part in self.parts:
            part.drop(counts)
        self.lengths.drop(counts)

    def fork(self, row: int, length: int) -> RaggedCache:
        """Return a cache with the first `length` positions of one row, at least `shortest(row)`."""
        other = RaggedCache.__new__(RaggedCache)
        lengths = RowLengths(1)
        lengths.sync([length])
        lengths.dropped = [self.lengths.dropped[row]]
        lengths.shift([self.lengths.shifts[row]])
        other._hold(lengths, [layer.fork(row, length, lengths) for layer in self.layers])
        return other

    def piece(self, row: int, start: int, end: int) -> KVPiece:
        """Copy positions `start` to `end` of a row from the layers that keep every position."""
        return KVPiece([[copied(x[row : row + 1, :, start:end]) for x in part.state] for part in self.positional])

    def outline(self, row: int, length: int) -> RaggedCache:
        """Return the part of a fork that `piece` leaves out: windows, as small as possible, and recurrent states."""
        other = self.fork(row, length)
        for window in other.windows:
            window.zero(0, length)  # the row may have read tokens past the end of this text
        other.compact()
        for part in other.positional:
            part.keys = part.values = None
        return other

    def joined(self, pieces: Sequence[KVPiece], length: int) -> RaggedCache:
        """Return a cache of `length` positions from this outline and the pieces that cover them, in order."""
        other = self.fork(0, length)
        for part, *layers in zip(other.positional, *(piece.layers for piece in pieces), strict=True):
            if layers[0]:
                joined = [mx.concatenate(list(x), axis=2)[:, :, :length] for x in zip(*layers, strict=True)]
                part.keys, part.values = joined
        return other

    def shortest(self, row: int) -> int:
        """Return the fewest positions a fork of a row may have: the next position must find all that it attends to. It
        may exceed the row's length if a recurrent state has read further."""
        return max((part.shortest(row) for part in self.parts), default=0)

    def zero(self, row: int, start: int = 0) -> None:
        """Zero a row from position `start` on, after a rejected draft led to NaN: a mask multiplies by 0, which keeps
        NaN. `append` clears the slots of rows that have left, and states never include rejected tokens."""
        for part in self.buffered:
            part.zero(row, start)

    @property
    def state(self) -> list[mx.array]:
        return [x for part in self.parts for x in part.state]


@dataclass(frozen=True)
class CacheSize:
    """Bytes that the caches of a batch need, by the number of rows and the longest of them."""

    position: int = 0  # per row and position, over all layers of full attention
    windows: tuple[tuple[int, int], ...] = ()  # for each layer with a window, its slots and the bytes per row and slot
    row: int = 0  # per row of any length: recurrent and convolutional states

    @classmethod
    def of(cls, cache: RaggedCache) -> CacheSize:
        """Compute the size from one row's cache that has read something, or is about to; only shapes are needed."""
        position, windows, row = 0, [], 0
        for part in cache.parts:
            if not isinstance(part, RaggedKV):
                row += sum(x.nbytes for x in part.state)
            elif part.most is not None:
                windows.append((part.most, _slot_bytes(part.state)))
            else:
                position += _slot_bytes(part.state)
        return cls(position, tuple(windows), row)

    def nbytes(self, rows: int, longest: int) -> int:
        """Return the most bytes that `rows` rows can take, the longest of which has `longest` positions."""
        if not rows:
            return 0
        windows = sum(most_slots(rows, min(longest, slots)) * nbytes for slots, nbytes in self.windows)
        return most_slots(rows, longest) * self.position + windows + rows * self.row

    def __add__(self, other: CacheSize) -> CacheSize:
        return CacheSize(self.position + other.position, self.windows + other.windows, self.row + other.row)


def _slot_bytes(buffers: Iterable[mx.array]) -> int:
    """Return the bytes of one slot of one row, over buffers [1, heads, capacity, D]."""
    return sum(x.nbytes // x.shape[2] for x in buffers)
