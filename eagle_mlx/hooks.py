"""Hooks on modules of mlx-lm's models, the only changes that this library makes to them.

A hooked module's class becomes a subclass of its old class and the hook's. It passes the same type checks and keeps
its parameters. The running forward decides what the hook does. Any number of targets can therefore share a model, and a
target that is deleted leaves nothing behind.
"""

from __future__ import annotations

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.cpu import RopeCache, fastmath, use_shortcuts


class Hook:
    """The base class of all hooks."""


def hook(module: nn.Module, how: type[Hook]) -> None:
    """Change a module's class to a subclass of it and of `how`, unless that is done already."""
    if not isinstance(module, how):
        base = type(module)
        module.__class__ = type(base.__name__, (how, base), {"__module__": base.__module__})


# Record layers' outputs, which heads read, and compute logits only for the requested positions.


@dataclass
class Recording:
    """What hooked modules record in one forward of a model."""

    ends: mx.array | None = None  # [B, 1, 1] int32, the positions whose logits are requested; None for all
    last: nn.Module | None = None  # the last layer
    norm: object = None  # the final norm
    cut: bool = False  # whether the final norm passes on only the positions in `ends`
    hidden: mx.array | None = None  # the input of the last call of the final norm
    outputs: dict[int, mx.array] = field(default_factory=dict)  # the layers' outputs, by the id of the layer
    starts: Collection[int] = ()
    """The ids of the layers at whose output the device starts, while Python builds the next layers."""
    normed: list[bool] = field(default_factory=list)
    """For each call of the final norm, whether the last layer had run before it."""

    def running(self) -> AbstractContextManager[None]:
        """Make this the recording of all hooked modules within the block."""
        return _within(_RUNNING, self)


@contextmanager
def _within(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_RUNNING: ContextVar[Recording | None] = ContextVar("recording", default=None)


class RecordsOutput(Hook):
    """A layer that records its output: mlx-lm's models return only logits."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        recording = _RUNNING.get()
        if recording is not None:
            recording.outputs[id(self)] = hidden = out[0] if isinstance(out, tuple) else out
            if id(self) in recording.starts:
                mx.async_eval(hidden)
        return out


class CutNorm(Hook):
    """A final norm that records its input. If the model calls it once, after all layers, it can pass on only `ends`."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        recording = _RUNNING.get()
        if recording is not None and recording.norm is self:
            recording.hidden = x
            if recording.ends is not None:
                recording.normed.append(id(recording.last) in recording.outputs)
                x = mx.take_along_axis(x, recording.ends, axis=1) if recording.cut else x
        return super().__call__(x, *args, **kwargs)  # type: ignore[misc]


# Logits of given hidden states: the model runs without what comes before them.


class Skipped(Hook):
    """A module that returns a given value without computing its output, within `skipping`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, value = _SKIPPED.get()
        return value if module is self else super().__call__(*args, **kwargs)  # type: ignore[misc]


_SKIPPED: ContextVar[tuple[object, Any]] = ContextVar("skipped", default=(None, None))


def skipping(module: nn.Module, value: mx.array) -> AbstractContextManager[None]:
    """Let a module return this value within the block, whatever it is called with."""
    hook(module, Skipped)
    return _within(_SKIPPED, (module, value))


# RoPE with a position per input: a tree's nodes are at their depths, not at consecutive positions.


def place_one_by_one(model: nn.Module) -> RopeCache:
    """Let a model's RoPE modules also accept an offset [B, L], a position for each of L inputs.

    Other offsets work as before. On a CPU, while the returned cache is `sharing`, chains are rotated like trees, by
    angles that are computed once instead of in every layer.
    """
    rotary = [module for module in model.modules() if _is_rotary(module)]
    cache = next((module.rope_cache for module in rotary if isinstance(module, PlacesOneByOne)), RopeCache())
    for module in rotary:
        if not isinstance(module, PlacesOneByOne):
            hook(module, PlacesOneByOne)
            module.rope_cache = cache
    return cache


class PlacesOneByOne(Hook):
    """A RoPE module that treats [B, ..., L, D] with offsets [B, L] as B * L inputs of one position each."""

    rope_cache: RopeCache

    def __call__(self, x: mx.array, offset: Any = 0, *args: Any, **kwargs: Any) -> mx.array:
        plain: Any = super().__call__  # type: ignore[misc]
        dims = offset.ndim if isinstance(offset, mx.array) else 0
        if dims < 2 and not self.rope_cache.shared:
            out: mx.array = plain(x, offset, *args, **kwargs)
            return out
        known = isinstance(offset, int) or dims > 0
        if known and x.dtype == mx.float32 and not args and not kwargs and use_shortcuts():
            rotation = self.rope_cache.rotation(self, plain, x.shape[-1])  # type: ignore[arg-type]
            if rotation is not None and (dims > 1 or rotation.suits_chains):
                return rotation(x, offset)
        return self._apart(plain, x, offset, *args, **kwargs) if dims > 1 else plain(x, offset, *args, **kwargs)

    def _apart(self, plain: Any, x: mx.array, offset: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rows, count = offset.shape
        moved = mx.moveaxis(x, -2, 1)
        shape = moved.shape
        each = moved.reshape(rows * count, *shape[2:-1], 1, shape[-1])
        turned: mx.array = plain(each, offset.reshape(-1), *args, **kwargs)
        return mx.moveaxis(turned.reshape(*shape[:-1], turned.shape[-1]), 1, -2)


def _is_rotary(module: nn.Module) -> bool:
    """Return whether a module is RoPE, by its name and arguments: mlx-lm has several kinds, and some models too."""
    name = type(module).__name__.lower()
    return ("rope" in name or "rotary" in name) and "offset" in inspect.signature(type(module).__call__).parameters


# Learned positions: an index past the end of the table would read other memory.


def bound_positions(backbone: nn.Module) -> int | None:
    """Let the table of learned positions clamp its indices. Return its size, None if there is no table.

    Rows near the end of their context share forwards with rows that draft more. What is read past a context is never
    kept, but must not be NaN, because masked attention multiplies by 0.
    """
    table = getattr(backbone, "wpe", None)  # its name in mlx-lm's gpt2 and gpt_bigcode
    if not isinstance(table, nn.Embedding | nn.QuantizedEmbedding):
        return None
    hook(table, BoundedTable)
    return int(table.weight.shape[0])


class BoundedTable(Hook):
    """An embedding that clamps its indices to its size."""

    def __call__(self, positions: mx.array) -> Any:
        return super().__call__(mx.minimum(positions, self.weight.shape[0] - 1))  # type: ignore[misc, attr-defined]


# Attention over slices of the queries: of a verify, for Metal's kernel for few queries; of a prompt, on a CPU.

_ATTENTION = "scaled_dot_product_attention"
"""The name under which each of mlx-lm's model files has attention."""
MOST_QUERIES = 8
_MOST_HEADS = 32
"""Queries times heads that share keys. Both limits are those of Metal's kernel (mlx, backend/metal,
scaled_dot_product_attention.cpp, `use_fallback`)."""
_LONG_KERNEL = (64, 80, 128)
"""Head widths for which Metal has a kernel for more queries."""
_LONG_KERNEL_FROM = 17
"""Queries from which that kernel is faster than slices: 12 to 48 queries take it 2.3 times as long as 8 take the other
kernel, with 16,384 keys of width 128 on an M5 Max (mlx#3826)."""
_LONGEST_VERIFY = 64
"""Forwards with more queries are prompts, for which attention scores are a small part of the work."""
_TILE = 128
"""Queries of a prompt that attend together on a CPU, only to earlier keys. Otherwise MLX computes all scores there, and
their exponentials take most of the time (docs/decisions.md). Smaller tiles cost more in overhead."""


def suit_attention(model: nn.Module) -> None:
    """Adapt the attention of a model's file to the device: for a verify on Metal, for a prompt on a CPU."""
    if mx.metal.is_available() and mx.default_device() == mx.gpu:
        wrap_attention(model, sliced)
    elif mx.default_device() == mx.cpu:
        wrap_attention(model, tiled)


def wrap_attention(model: nn.Module, wrap: Callable[[Callable[..., mx.array]], Callable[..., mx.array]]) -> None:
    """Replace the attention in a model's file, unless `wrap` has done so already."""
    for name in {type(module).__module__ for module in model.modules()}:
        file = sys.modules.get(name)
        attention = getattr(file, _ATTENTION, None)
        if attention is not None and getattr(attention, "wrapped_by", None) is not wrap:
            wrapped: Any = wrap(attention)
            wrapped.wrapped_by = wrap
            setattr(file, _ATTENTION, wrapped)


def queries_at_once(length: int, sharing: int, width: int) -> int:
    """Return how many of `length` queries one call should take, with `sharing` heads per key head of size `width`."""
    if length == 1 or length > _LONGEST_VERIFY or (length >= _LONG_KERNEL_FROM and width in _LONG_KERNEL):
        return length
    return min(length, MOST_QUERIES, max(1, _MOST_HEADS // sharing))


def sliced(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return mlx-lm's `scaled_dot_product_attention`, with a verify's queries in slices that fit the fused kernel.

    Its values do not change. Otherwise the scores of all heads are written to memory and read again. Plain decoding and
    prompts do not change.
    """

    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        # queries: [B, heads, L, D]; keys, values: [B, key heads, T, D]; mask: [..., L, T], "causal" or None
        length = queries.shape[2]
        quantized = hasattr(cache, "bits")
        most = length if quantized else queries_at_once(length, queries.shape[1] // keys.shape[1], queries.shape[3])
        if most >= length:
            return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        past, parts = keys.shape[2] - length, []
        for start in range(0, length, most):
            end = min(start + most, length)
            seen = past + end if isinstance(mask, str) else keys.shape[2]  # "causal" counts from the last key
            part = mask[..., start:end, :] if isinstance(mask, mx.array) and mask.shape[-2] == length else mask
            some = queries[:, :, start:end], keys[:, :, :seen], values[:, :, :seen]
            parts.append(attention(*some, cache=cache, scale=scale, mask=part, sinks=sinks))
        return mx.concatenate(parts, axis=2)

    return attend


def tiled(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return mlx-lm's `scaled_dot_product_attention`, with prompts processed in tiles of queries."""

    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        length, plain = queries.shape[2], sinks is None and not hasattr(cache, "bits")
        if plain and length > _LONGEST_VERIFY and _is_causal(cache, keys, mask, length):
            return _in_tiles(queries, keys, values, scale, mask)
        return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return attend


def _is_causal(cache: Any, keys: mx.array, mask: Any, length: int) -> bool:
    """Return whether, on a CPU, key s is at position s, so that query i sees no key after `past + i`.

    That holds in this library's caches unless a ring has wrapped, when there are fewer keys than positions.
    """
    if not (mx.default_device() == mx.cpu and use_shortcuts() and isinstance(mask, mx.array)):
        return False
    lengths = getattr(cache, "lengths", None)
    is_whole = mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[-2:] == (length, keys.shape[2])
    return is_whole and lengths is not None and lengths.branches is None and lengths.upper + length == keys.shape[2]


def _in_tiles(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array) -> mx.array:
    """Compute a prompt's causal attention on a CPU, one tile of queries at a time.

    queries: [B, heads, L, D]; keys, values: [B, key heads, T, D]; mask: [B or 1, 1 or heads, L, T] bool.
    """
    rows, heads, length, width = queries.shape
    sharing, past, parts = heads // keys.shape[1], keys.shape[2] - length, []
    for start in range(0, length, _TILE):
        end = min(start + _TILE, length)
        some = (queries[:, :, start:end] * scale).reshape(rows, -1, sharing * (end - start), width)
        scores = some @ keys[:, :, : past + end].swapaxes(-1, -2)
        split = scores.reshape(rows, heads, end - start, past + end)
        weights = fastmath.softmax(mx.where(mask[..., start:end, : past + end], split, -math.inf))
        out = weights.reshape(scores.shape) @ values[:, :, : past + end]
        parts.append(out.reshape(rows, heads, end - start, values.shape[-1]))
    return mx.concatenate(parts, axis=2)


# Calls of layers, which a recurrent state repeats for accepted tokens only.

Project = Callable[[nn.Module, Callable[[], mx.array]], mx.array]
"""Returns a linear projection's output, computed or recorded."""


class CallListener(ABC):
    """A cache that is notified of each call of a layer it is passed to."""

    @abstractmethod
    def note(self, layer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Projections | None:
        """Record a layer's coming call; calling `layer` itself does not notify again.

        Returns an object to record the layer's projections; None if they will not be needed.
        """


class Projections:
    """The outputs of a layer's linear projections in one call, so that a second call need not read their weights."""

    def __init__(self) -> None:
        self._outputs: dict[int, list[mx.array]] = {}
        """By the id of the projection, in the order of its calls."""

    def recording(self) -> AbstractContextManager[None]:
        """Record the projections' outputs within the block."""
        return _within(_PROJECT, self._record)

    def replaying(self, choose: Callable[[Sequence[mx.array], int], mx.array | None]) -> AbstractContextManager[None]:
        """In the block, let projections return what `choose` takes from their recorded outputs; if None, they compute.

        `choose` takes a projection's recorded outputs and the index of its current call in this block.
        """
        calls: dict[int, int] = {}

        def replay(projection: nn.Module, compute: Callable[[], mx.array]) -> mx.array:
            kept, number = self._outputs.get(id(projection), []), calls.get(id(projection), 0)
            calls[id(projection)] = number + 1
            found = choose(kept, number) if kept else None
            return compute() if found is None else found

        return _within(_PROJECT, replay)

    def _record(self, projection: nn.Module, compute: Callable[[], mx.array]) -> mx.array:
        output = compute()
        self._outputs.setdefault(id(projection), []).append(output)
        return output


_PROJECT: ContextVar[Project | None] = ContextVar("project", default=None)


class KeepsProjection(Hook):
    """A linear projection in a layer whose call may be repeated."""

    def __call__(self, x: mx.array) -> mx.array:
        plain: Any = super().__call__  # type: ignore[misc]
        how = _PROJECT.get()
        return plain(x) if how is None else how(self, lambda: plain(x))  # type: ignore[arg-type]


class NotesCalls(Hook):
    """A layer that notifies the cache in its arguments of each call, which may be repeated."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super().__call__  # type: ignore[misc]
        listener = next((x for x in (*args, *kwargs.values()) if isinstance(x, CallListener)), None)
        projections = listener.note(plain, args, kwargs) if listener is not None else None
        if projections is None:
            return plain(*args, **kwargs)
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, nn.Linear | nn.QuantizedLinear):
                hook(module, KeepsProjection)
        with projections.recording():
            return plain(*args, **kwargs)
