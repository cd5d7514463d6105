"""Recurrent and convolutional states: what such layers keep instead of keys, and how rejected tokens are removed.

Unlike keys, a state cannot be cut: after a verify it includes all the draft tokens. So we keep the state from before,
which costs nothing because arrays are immutable. Once it is known how many tokens each row accepts, we call the layer
again from there with the same arguments, for the accepted tokens only. MLX evaluates lazily: the second call computes
only the state, not the layer's output, its MLP or any other layer, and reuses the projections of the first call.

If a layer respects the lengths of rows (`MASKED`), one call gives every row its own state. Otherwise the layer is
called token by token, and each row takes the state after its last accepted token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from eagle_mlx.cache.full import RaggedList, copied
from eagle_mlx.cache.lengths import RowLengths, without_row
from eagle_mlx.errors import TargetError
from eagle_mlx.hooks import CallListener, Projections

MASKED = frozenset(
    {
        "bailing_hybrid",
        "bailing_moe_v3",
        "falcon_h1",
        "gear",
        "granitemoehybrid",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba2",
        "plamo2",
        "qwen3_5",
        "qwen3_next",
    }
)
"""mlx-lm model files whose recurrent layers keep padding out of their state."""


@dataclass(frozen=True)
class _Call:
    """The arguments of a layer's call in a verify, and its state before the call."""

    layer: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: list[mx.array | None]
    rows: int
    width: int
    projections: Projections = field(default_factory=Projections)

    def replay(self, replace: Callable[[Any], Any]) -> None:
        with self.projections.replaying(lambda outputs, number: outputs[number] if number < len(outputs) else None):
            self.layer(*map(replace, self.args), **{name: replace(value) for name, value in self.kwargs.items()})

    def replay_at(self, step: int, replace: Callable[[Any], Any]) -> None:
        """Call the layer again for one position: [B, L, ...] -> [B, 1, ...]."""

        def cut(value: Any) -> Any:
            ours = isinstance(value, mx.array) and value.ndim > 1 and value.shape[1] == self.width
            return value[:, step : step + 1] if ours else value

        def output_at(outputs: Sequence[mx.array], number: int) -> mx.array | None:
            """Return a position's part of a projection: a slice of [B, L, n], or the output of a separate call."""
            if len(outputs) == self.width and all(x.ndim == 2 for x in outputs):
                return outputs[step]
            if number >= len(outputs) or outputs[number].ndim != 3 or outputs[number].shape[1] != self.width:
                return None
            return outputs[number][:, step : step + 1]

        kwargs = {name: value + step if name == "offset" else cut(value) for name, value in self.kwargs.items()}
        with self.projections.replaying(output_at):
            self.layer(*map(replace, map(cut, self.args)), **{name: replace(x) for name, x in kwargs.items()})


_ArraysCache: Any = ArraysCache  # its annotations are narrower than what it holds


class RecurrentState(_ArraysCache, CallListener):  # type: ignore[misc]  # some layers ask whether it is an ArraysCache
    """The arrays [B, ...] that one layer carries from token to token, in mlx-lm's cache protocol."""

    def __init__(self, rows: RowLengths, size: int, masked: bool):
        self.rows = rows
        self.masked = masked
        self.cache: list[mx.array | None] = [None] * size
        self.left_padding = None
        self._call: _Call | None = None
        self._accepted: mx.array | None = None

    @property
    def lengths(self) -> mx.array | None:
        """[B] int32, the number of real positions in each row of the current forward; None for all."""
        return self.rows.valid if self._accepted is None else self._accepted

    def make_mask(self, count: int) -> mx.array | None:
        return self.rows.valid_mask(count)

    def advance(self, count: int) -> None:
        """Do nothing: the lengths hold for one forward only."""

    def note(self, layer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Projections | None:
        """Remember a call if some of its positions may be rejected."""
        rows, width = next(x.shape[:2] for x in (*args, *kwargs.values()) if isinstance(x, mx.array))
        may_be_rejected = width > 1 and self.rows.valid is None
        self._call = _Call(layer, args, kwargs, list(self.cache), rows, width) if may_be_rejected else None
        return self._call.projections if self._call is not None else None

    def commit(self, count: int | mx.array) -> None:
        """Keep the state after `count` of the positions last read: an int for all rows, or [B] int32."""
        call, self._call = self._call, None
        if self.rows.valid is not None or (isinstance(count, int) and (call is None or count == call.width)):
            return
        if call is None:
            raise TargetError("this model keeps a state outside of its layers, which cannot be rolled back")
        if isinstance(count, int):
            count = mx.full((call.rows,), count, mx.int32)
        self._accepted = count
        if self.masked:
            self.cache = list(call.before)
            mask = mx.arange(call.width) < count[:, None]
            call.replay(lambda value: self._replaced(value, mask))
        else:
            self._read_stepwise(call, count)
        self._accepted = None

    def _read_stepwise(self, call: _Call, count: mx.array) -> None:
        after = self.state
        self.cache = list(call.before)
        states = [[mx.zeros_like(new) if old is None else old for old, new in zip(call.before, after, strict=True)]]
        for step in range(call.width):
            call.replay_at(step, lambda value: self._replaced(value, None))
            states.append(self.state)
        columns = [mx.stack(list(column), axis=1) for column in zip(*states, strict=True)]  # [B, width + 1, ...]
        self.cache = [x[mx.arange(call.rows), count] for x in columns]

    def _replaced(self, value: Any, mask: mx.array | None) -> Any:
        """Convert an argument for the second call: use this state's mask and hide cached keys from attention."""
        if isinstance(value, RaggedList):
            return [x if x is self else _PassThrough(x.offset) for x in value.caches]
        if isinstance(value, mx.array) and value.dtype == mx.bool_:
            return mask if value.ndim == 2 else None
        return value

    def append(self, other: RecurrentState) -> None:
        """Append the other's rows. Call this before `rows.append`, because it needs the old number of rows."""
        mine, theirs = self.rows.rows, other.rows.rows
        joined = [joined_rows(a, mine, b, theirs) for a, b in zip(self.cache, other.cache, strict=True)]
        self.cache = joined if mine else list(other.cache)

    def remove(self, row: int, last: RecurrentState | None) -> None:
        self.cache = [x if x is None else without_row(x, row) for x in self.cache]

    def fork(self, row: int, length: int, lengths: RowLengths) -> RecurrentState:
        """Copy one row's state, which always covers all its positions."""
        other = RecurrentState(lengths, 0, self.masked)
        other.cache = [x if x is None else copied(x[row : row + 1]) for x in self.cache]
        return other

    def shortest(self, row: int) -> int:
        return self.rows.bounds[row]

    @property
    def state(self) -> list[mx.array]:
        return [x for x in self.cache if x is not None]


@dataclass(frozen=True)
class _PassThrough:
    """An attention cache that stores nothing, for calls whose attention output is not used."""

    offset: int | mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def joined_rows(a: mx.array | None, rows_a: int, b: mx.array | None, rows_b: int) -> mx.array | None:
    """Concatenate arrays of two batches; a missing one counts as zeros."""
    like = a if a is not None else b
    if like is None:
        return None
    a = mx.zeros((rows_a, *like.shape[1:]), like.dtype) if a is None else a
    b = mx.zeros((rows_b, *like.shape[1:]), like.dtype) if b is None else b
    return mx.concatenate([a, b], axis=0)
