"""Rank 0's target: what is read with it, and what its caches do, is told to the others."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np

from eagle_mlx.cache import RaggedCache, Saved
from eagle_mlx.cache.ragged import KVPiece
from eagle_mlx.errors import RanksError, TargetError
from eagle_mlx.ranks.channel import Channel, encode, end_process
from eagle_mlx.target import Forward, Target

CACHE_CALLS = (
    *("expect", "branch", "advance", "advance_some", "put_back", "keep", "sync", "save", "restore"),
    *("compact", "zero", "append", "remove", "fork", "piece", "outline", "joined"),
)
"""What changes a RaggedCache, or makes something of one."""
PIECE_CALLS = ("split",)
"""The same of a KVPiece."""


class Calls:
    """What has been called since the last message, which goes with the next forward."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self._noted: list[tuple[Any, ...]] = []
        self._gone: deque[int] = deque()
        """Numbers of objects that nobody has any more; a thread may add one at any time."""
        self._numbers = count()
        self._inside = False
        """Whether a call is under way that has been noted, so that those within it are part of it."""

    def call(self, called: Any, name: str, do: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Do what is called, and have the others do it."""
        with self.channel.lock:  # of several threads one calls at a time
            if self._inside:
                return do(*args, **kwargs)
            self._inside = True
            try:
                made = do(*args, **kwargs)
            finally:
                self._inside = False
            result = tuple(map(self._numbered, made)) if isinstance(made, tuple) else self._numbered(made)
            numbers = [each.number for each in (result if isinstance(result, tuple) else (result,)) if each is not None]
            self._noted.append((called.number, name, args, kwargs, numbers))
            return result

    def new_cache(self, target: Target, rows: int, kv_bits: int | None) -> RaggedCache:
        """A cache that the others have too."""
        with self.channel.lock:
            cache: RaggedCache = self._numbered(RaggedCache.local(target.model, rows, kv_bits))
            self._noted.append((None, "new", (rows, kv_bits), {}, [cache.number]))  # type: ignore[attr-defined]
        return cache

    def compare(self, cache: int | None, lengths: mx.array, size: mx.array) -> None:
        """Have the others look, behind their next message, whether they have come to the same."""
        self._noted.append((cache, "compare", (lengths, size), {}, []))

    def send(self, *more: Any) -> None:
        """Tell the others all that was called, and something to do behind it."""
        noted, self._noted = self._noted, []
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        calls = [
            [number, name, encode(args), {key: encode(value) for key, value in kwargs.items()}, made]
            for number, name, args, kwargs, made in noted
        ]
        self.channel.send({"calls": calls, "gone": gone, "then": more})

    def _numbered(self, made: Any) -> Any:
        """What a call made, with a number of its own by which it is named."""
        led = _MIRRORED.get(type(made))
        if led is None:
            return made
        other: Any = object.__new__(led)
        other.__dict__.update(made.__dict__, calls=self, number=next(self._numbers))
        weakref.finalize(other, self._gone.append, other.number)
        return other


def _mirrored(kind: type, name: str) -> Callable[..., Any]:
    """A method that the others are told of."""
    own = getattr(kind, name)

    @wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.calls.call(self, name, partial(own, self), args, kwargs)

    return method


_MIRRORED: dict[type, type] = {
    kind: type(f"Mirrored{kind.__name__}", (kind,), {name: _mirrored(kind, name) for name in names})
    for kind, names in ((RaggedCache, CACHE_CALLS), (KVPiece, PIECE_CALLS), (Saved, ()))
}
"""Caches, and what is made of them, whose calls are told to the others."""


class LeadingTarget(Target):
    """A target of which every rank has a part. Whoever uses it need not know: a forward is a forward.

    All that is decided is decided here: what is read, drafted and kept. The others are told what a forward reads, and
    what has become of the caches since the one before, in one message. They read it with their part of each layer, or
    with their layers. Behind the last layer nothing is shared, so that logits are computed here alone, and only where
    they are used.
    """

    calls: Calls
    has_all_layers = True
    """Whether this rank sees what every layer returns."""
    compared = 64
    """Of so many forwards the others compare one with this rank's."""
    _forwards = 0
    _least_free: int | None = None

    @classmethod
    def of(
        cls, target: Target, channel: Channel, free_memory: int | None = None, layers: int | None = None
    ) -> LeadingTarget:
        """The same target, which leads from now on. The others `follow`.

        free_memory: bytes that the rank with the least has free; by default as many as this one.
        layers: how many all ranks have together, where each has some of them.
        """
        self = cls.__new__(cls)
        self.__dict__.update(target.__dict__)
        self.calls = Calls(channel)
        channel.on_lost = self._lose
        self._least_free = free_memory
        if layers is not None:
            self.num_layers, self.has_all_layers = layers, False
        self.model.make_ragged_cache = partial(self.calls.new_cache, self)
        return self

    @property
    def channel(self) -> Channel:
        return self.calls.channel

    @property
    def free_memory(self) -> int:
        """Bytes that are free on every rank: all keep as many keys and values."""
        own = super().free_memory
        return own if self._least_free is None else min(own, self._least_free)

    @property
    def rank_waits(self) -> tuple[float, ...]:
        return tuple(status.waited for status in self.channel.statuses)

    def forward(
        self,
        tokens: mx.array,
        cache: Sequence[Any] | None = None,
        aux_layers: Sequence[int] = (),
        ends: Sequence[int] | None = None,
    ) -> Forward:
        """As of any target.

        Raises TargetError for caches of another kind and for layers of other ranks, RanksError where another rank is
        gone.
        """
        if aux_layers and not self.has_all_layers:
            raise TargetError(
                "with --shard pipeline the layers are on several machines, where no head can read them; draft with "
                "n-grams or a draft model, or use --shard tensor"
            )
        if cache is not None and not isinstance(cache, tuple(_MIRRORED.values())):
            raise TargetError("a target over several ranks keeps caches of its own: RaggedCache.of(target.model, …)")
        number = None if cache is None else cache.number  # type: ignore[attr-defined]
        # Nothing of it is computed yet, so that what cannot be read raises before others begin to.
        out = super().forward(tokens, cache, aux_layers, ends)
        assert out.hidden is not None  # `load_over_ranks` has looked
        read = np.array(tokens).tolist()
        with self.channel.lock:
            self.calls.send("forward", number, read)
            try:
                # Waited for: a message from another thread could overtake what the layers exchange.
                mx.eval(out.hidden)
            except RuntimeError as e:
                self.channel.fail(e)
            self._forwards += 1
            if self._forwards % self.compared == 0:
                self.calls.compare(number, lengths_of(cache), size_of(out.hidden))
        return out

    def close(self) -> None:
        """Let the others go, if they are there."""
        if self.channel.lost is not None:  # whoever waits for them still holds on to what is spoken with
            return
        with self.channel.lock, suppress(RanksError):
            if not self.channel.closed:
                self.calls.send("end")  # still watched: they may be gone, which nobody has noticed
                self.channel.close()

    def _lose(self, reason: str) -> None:
        (self.on_lost or end_process)(reason)


def lengths_of(cache: Any) -> mx.array:
    """[B] int32, the lengths of a cache's rows; none for no cache."""
    return mx.zeros((0,), mx.int32) if cache is None else cache.lengths.offset


def size_of(hidden: mx.array) -> mx.array:
    """The mean square of hidden states, float32."""
    return mx.mean(mx.square(hidden.astype(mx.float32)))
