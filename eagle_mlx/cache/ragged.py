"""The caches of a whole model for a batch of rows, what they hold of some positions, and what they take of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from eagle_mlx.cache.full import RaggedChunked, RaggedKV, copied, most_slots
from eagle_mlx.cache.kinds import ragged
from eagle_mlx.cache.lengths import Moves, RowLengths, SavedLengths
from eagle_mlx.cache.quantized import RaggedQuantized
from eagle_mlx.cache.recurrent import RaggedList, RecurrentState
from eagle_mlx.cache.window import RaggedWindow
from eagle_mlx.decoding.draft import Branches
from eagle_mlx.hooks import NotesCalls, hook


@dataclass(frozen=True)
class KVPiece:
    """Keys and values of some positions of one row, of all layers that keep every position."""

    layers: list[list[mx.array]]
    """Layer by layer [1, heads, L, D], keys before values; empty for a layer that nothing was written to."""

    @property
    def arrays(self) -> list[mx.array]:
        return [x for layer in self.layers for x in layer]

    def split(self, at: int) -> tuple[KVPiece, KVPiece]:
        """The first `at` positions and the others. This piece is given away: at most one array is there twice."""
        heads, tails = KVPiece([]), KVPiece([])
        for layer in self.layers:
            heads.layers.append([])
            tails.layers.append([])
            for index, x in enumerate(layer):
                head, tail = copied(x[:, :, :at]), copied(x[:, :, at:])
                mx.eval(head, tail)
                layer[index] = head
                heads.layers[-1].append(head)
                tails.layers[-1].append(tail)
        return heads, tails


@dataclass(frozen=True)
class Saved:
    """What a cache is restored to."""

    lengths: SavedLengths
    states: list[list[mx.array | None]]
    """The arrays of every recurrent state."""


class RaggedCache(Sequence[Any]):
    """The caches of all layers of one model for a batch of rows; goes into the model as its `cache`."""

    def __init__(self, layers: int | Sequence[Callable[[RowLengths], Any]], rows: int):
        """`layers`: what makes each layer's cache from the rows' lengths; a number for so many of full attention."""
        lengths = RowLengths(rows)
        makers = [RaggedKV] * layers if isinstance(layers, int) else layers
        self._hold(lengths, [make(lengths) for make in makers])

    @classmethod
    def of(cls, model: nn.Module, rows: int, kv_bits: int | None = None) -> RaggedCache:
        """What mlx-lm would make for this model, row by row. Raises TargetError where that is not supported.

        A model may make its own, as mlx-lm's do with `make_cache`: one that is spread over several machines does.
        """
        make: Callable[[int, int | None], RaggedCache] | None = getattr(model, "make_ragged_cache", None)
        return cls.local(model, rows, kv_bits) if make is None else make(rows, kv_bits)

    @classmethod
    def local(cls, model: nn.Module, rows: int, kv_bits: int | None = None) -> Self:
        """The same of this process alone."""
        self = cls.__new__(cls)
        lengths = RowLengths(rows)
        self._hold(lengths, [ragged(cache, lengths, model, kv_bits) for cache in make_prompt_cache(model)])
        if self.recurrent:
            for layer in model.layers:
                hook(layer, NotesCalls)
        return self

    def _hold(self, lengths: RowLengths, layers: list[Any]) -> None:
        self.lengths, self.layers = lengths, layers
        parts = self.parts
        self.recurrent = [part for part in parts if isinstance(part, RecurrentState)]
        self.windows = [part for part in parts if isinstance(part, RaggedWindow)]
        split = [part for cache in parts for part in (cache.parts if isinstance(cache, RaggedQuantized) else (cache,))]
        self.positional = [x for x in split if isinstance(x, RaggedKV) and not isinstance(x, RaggedWindow)]
        """What keeps every position, and can be cut anywhere."""

    @property
    def parts(self) -> list[Any]:
        """The caches of all layers, those of lists one by one."""
        return [part for layer in self.layers for part in (layer.caches if isinstance(layer, RaggedList) else (layer,))]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def expect(self, counts: Sequence[int]) -> None:
        """Before a forward: how many of its positions count in each row, where that is known; the rest is padding."""
        if len(set(counts)) > 1:
            self.lengths.expect(mx.array(list(counts), mx.int32))

    def advance(self, count: int | mx.array, at_most: int | None = None) -> None:
        """Accept `count` of the positions last read: the same in every row, or [B] int32, bounded by `at_most`."""
        for state in self.recurrent:
            state.commit(count)
        self.lengths.advance(count, at_most)

    def advance_some(self, count: mx.array, at_most: int, saved: Saved) -> None:
        """The same where count [B] int32 may be 0: these rows stay as they were in `saved`, before the forward."""
        for state, before in zip(self.recurrent, saved.states, strict=True):
            state.commit(1 if at_most == 1 else mx.maximum(count, 1))
            state.restore_rows(count == 0, before)
        self.lengths.advance(count, at_most)

    def put_back(self, rows: mx.array, saved: Saved) -> None:
        """After `advance`: give some rows, [B] bool, the recurrent states that they had in `saved`."""
        for state, before in zip(self.recurrent, saved.states, strict=True):
            state.restore_rows(rows, before)

    def branch(self, branches: Branches) -> None:
        """Before a forward: its positions are those of a tree."""
        self.lengths.branch(branches)

    def keep(self, kept: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """After a tree's verify: move the entries of the branches that are kept to where a chain's would lie.

        kept: row by row the draft tokens of the branch, by their numbers from 0 on; starts: how many entries each row
        had before.
        """
        moves = Moves.of(kept, starts)
        if moves is not None:
            for layer in self.layers:
                layer.keep(moves)

    @property
    def is_positional(self) -> bool:
        """Whether every layer keeps every position."""
        return not self.recurrent and not self.windows

    @property
    def may_branch(self) -> bool:
        """Whether trees can be read: every layer keeps keys and values, whatever their place."""
        kinds = (RaggedKV, RaggedQuantized)
        return all(isinstance(part, kinds) and not isinstance(part, RaggedChunked) for part in self.parts)

    def sync(self, lengths: Sequence[int]) -> None:
        """The host has read the rows' real lengths."""
        self.lengths.sync(lengths)

    def save(self) -> Saved:
        return Saved(self.lengths.save(), [list(state.cache) for state in self.recurrent])

    def restore(self, saved: Saved) -> None:
        """Back to what `save` gave."""
        self.lengths.restore(saved.lengths)
        for state, arrays in zip(self.recurrent, saved.states, strict=True):
            state.cache = list(arrays)

    def compact(self) -> None:
        """Give up the room that only the wide forwards of a prompt needed."""
        for window in self.windows:
            window.compact()

    def append(self, other: RaggedCache) -> None:
        """The other's rows join behind this one's, which are copied where there is no place left for more."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append(theirs)
        self.lengths.append(other.lengths)

    def remove(self, row: int) -> None:
        """A row leaves; the last one moves into the gap. The others are copied where that gives much room back."""
        last = self.fork(self.lengths.rows - 1, self.lengths.upper) if row < self.lengths.rows - 1 else None
        if last is not None:
            mx.eval(last.state)  # as long as it is to be computed it holds the buffers, which would then be copied
        for index, layer in enumerate(self.layers):
            layer.remove(row, None if last is None else last.layers[index])
        self.lengths.remove(row)
        # Until a smaller copy is computed it holds the larger buffer.
        mx.async_eval([x for layer in self.layers for x in layer.fit()])

    def fork(self, row: int, length: int) -> RaggedCache:
        """A cache of one row that holds the first `length` positions of one of these, at least `shortest(row)`."""
        other = RaggedCache.__new__(RaggedCache)
        lengths = RowLengths(1)
        lengths.sync([length])
        other._hold(lengths, [layer.fork(row, length, lengths) for layer in self.layers])
        return other

    def piece(self, row: int, start: int, end: int) -> KVPiece:
        """What positions `start` to `end` of a row have in layers that keep every position, in arrays of its own."""
        return KVPiece([[copied(x[row : row + 1, :, start:end]) for x in part.state] for part in self.positional])

    def outline(self, row: int, length: int) -> RaggedCache:
        """All that a fork holds beside what `piece` gives: windows, as small as they can be, and states."""
        other = self.fork(row, length)
        for window in other.windows:
            window.forget_after(length)  # the row may have read further, tokens that are no part of this text
        other.compact()
        for part in other.positional:
            part.keys = part.values = None
        return other

    def joined(self, pieces: Sequence[KVPiece], length: int) -> RaggedCache:
        """Of an outline, and pieces that begin with a text and hold at least its first `length` positions: a cache of
        these positions."""
        other = self.fork(0, length)
        for part, layers in zip(other.positional, zip(*(piece.layers for piece in pieces), strict=True), strict=True):
            if layers[0]:
                part.keys, part.values = (
                    mx.concatenate(list(x), axis=2)[:, :, :length] for x in zip(*layers, strict=True)
                )
        return other

    def shortest(self, row: int) -> int:
        """The fewest positions that a fork of a row may hold: those whose next position sees only what is still here.

        It can be more than the row's length, where a state has read further than the row's text goes.
        """
        return max((layer.shortest(row) for layer in self.layers), default=0)

    def zero(self, row: int, start: int = 0) -> None:
        """Forget what a row holds from position `start` on, which is no number: masks multiply by 0, and NaN stays.

        For what lies behind its length after a draft that reads as no number was rejected. `append` clears the slots of
        rows that have left.
        """
        for layer in self.layers:
            layer.zero(row, start)

    @property
    def state(self) -> list[mx.array]:
        return [x for layer in self.layers for x in layer.state]

    @property
    def recurrent_state(self) -> list[mx.array]:
        return [x for state in self.recurrent for x in state.state]


@dataclass(frozen=True)
class CacheSize:
    """Bytes that the caches of a batch take, by its rows and the longest of them.

    It is worked out from one row's caches, before there are others.
    """

    position: int = 0
    """Of a row and position, over all layers of full attention."""
    windows: tuple[tuple[int, int], ...] = ()
    """For each layer that sees a window: its slots, and the bytes of a row and slot."""
    row: int = 0
    """Of a row, whatever its length: recurrent and convolutional states."""

    @classmethod
    def of(cls, cache: RaggedCache) -> CacheSize:
        """Of caches of one row that has read something, or is about to: shapes are enough, nothing is computed."""
        position, windows, row = 0, [], 0
        for part in cache.parts:
            if isinstance(part, RaggedWindow):
                windows.append((part.ring, _slot_bytes(part.state)))
            elif isinstance(part, (RaggedKV, RaggedQuantized)):
                position += _slot_bytes(part.state)
            else:
                row += sum(x.nbytes for x in part.state)
        return cls(position, tuple(windows), row)

    def nbytes(self, rows: int, longest: int) -> int:
        """The most that so many rows ever take, of which the longest has so many positions."""
        if not rows:
            return 0
        windows = sum(most_slots(rows, min(longest, slots)) * each for slots, each in self.windows)
        return most_slots(rows, longest) * self.position + windows + rows * self.row

    def __add__(self, other: CacheSize) -> CacheSize:
        return CacheSize(self.position + other.position, self.windows + other.windows, self.row + other.row)


def _slot_bytes(buffers: Iterable[mx.array]) -> int:
    """Of one slot of one row, over buffers [1, heads, capacity, D]."""
    return sum(x.nbytes // x.shape[2] for x in buffers)
