"""Rank 0's target, whose forwards and whose caches' calls are sent as commands, and the ranks that execute them."""

from __future__ import annotations

import inspect
import signal
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
from eagle_mlx.memory import FreedBuffers
from eagle_mlx.ranks.channel import Channel, decode, encode, end_process
from eagle_mlx.target import Forward, Target
from eagle_mlx.vision.tower import ImageInput

_READ_ONLY = ("shortest",)  # methods of caches that change and make nothing


class Calls:
    """Records calls for the other ranks; they are sent with the next forward."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.noted: list[tuple[Any, ...]] = []
        """Recorded calls: the object's number, the method, its arguments, and the numbers of its results."""
        self._gone: deque[int] = deque()  # numbers of deleted objects; any thread may add one at any time
        self._numbers = count()
        self._inside = False  # whether a recorded call is running, so that the calls it makes are not recorded

    def call(self, called: Any, name: str, do: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call here and record it for the other ranks."""
        with self.channel.lock:  # one thread at a time
            if self._inside:
                return do(*args, **kwargs)
            self._inside = True
            try:
                made = do(*args, **kwargs)
            finally:
                self._inside = False
            result = tuple(map(self._numbered, made)) if isinstance(made, tuple) else self._numbered(made)
            results = result if isinstance(result, tuple) else (result,)
            numbers = [other.number for other in results if other is not None]
            self.noted.append((called.number, name, args, kwargs, numbers))
            return result

    def new_cache(self, target: Target, rows: int, kv_bits: int | None) -> RaggedCache:
        """Return a new cache that the other ranks have, too."""
        with self.channel.lock:
            cache: RaggedCache = self._numbered(RaggedCache.local(target.model, rows, kv_bits))
            self.noted.append((None, "new", (rows, kv_bits), {}, [cache.number]))  # type: ignore[attr-defined]  # numbered
        return cache

    def send(self, *more: Any) -> None:
        """Send all recorded calls to the other ranks, and then a command."""
        noted, self.noted = self.noted, []
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        calls = [
            [number, name, encode(args), {key: encode(value) for key, value in kwargs.items()}, made]
            for number, name, args, kwargs, made in noted
        ]
        self.channel.send({"calls": calls, "gone": gone, "then": more})

    def _numbered(self, made: Any) -> Any:
        """Give a call's result a number, by which messages refer to it; return it."""
        led = _MIRRORED.get(type(made))
        if led is None:
            return made
        other: Any = object.__new__(led)
        other.__dict__.update(made.__dict__, calls=self, number=next(self._numbers))
        weakref.finalize(other, self._gone.append, other.number)
        return other


def _mirrored(kind: type, name: str) -> Callable[..., Any]:
    own = getattr(kind, name)
    return wraps(own)(lambda self, *args, **kwargs: self.calls.call(self, name, partial(own, self), args, kwargs))


def is_mirrored(kind: type, name: str) -> bool:
    """Return whether all ranks make the calls of a method: each public one that changes or makes something."""
    return inspect.isfunction(vars(kind).get(name)) and not name.startswith("_") and name not in _READ_ONLY


_MIRRORED: dict[type, type] = {
    kind: type(
        f"Mirrored{kind.__name__}",
        (kind,),
        {name: _mirrored(kind, name) for name in vars(kind) if is_mirrored(kind, name)},
    )
    for kind in (RaggedCache, KVPiece, Saved)
}
"""Subclasses of caches and of their results whose calls are recorded for the other ranks."""


class LeadingTarget(Target):
    """A target that is split over ranks. It is used like any other target.

    Rank 0 decides what to read, to draft and to keep. Each forward sends one message with its tokens and the caches'
    calls since the last forward. The other ranks read the tokens with their part of each layer, or with their layers.
    Nothing after the last layer is shared: logits are computed only here, and only if they are used.
    """

    channel: Channel
    calls: Calls
    has_all_layers = True  # whether this rank has the output of every layer
    _least_free: int | None = None

    @classmethod
    def of(
        cls, target: Target, channel: Channel, free_memory: int | None = None, layers: int | None = None
    ) -> LeadingTarget:
        """Return a target for rank 0 that leads; the other ranks must call `follow`.

        free_memory: bytes free on the rank that has the least; by default this rank's. layers: the total number of
        layers, if each rank has some of them.
        """
        self = cls.__new__(cls)
        self.__dict__.update(target.__dict__)
        self.channel, self.calls = channel, Calls(channel)
        channel.on_lost = lambda reason: (self.on_lost or end_process)(reason)
        self._least_free = free_memory
        if layers is not None:
            self.num_layers, self.has_all_layers = layers, False
        self.model.make_ragged_cache = partial(self.calls.new_cache, self)
        return self

    @property
    def free_memory(self) -> int:
        """Bytes that are free on every rank; all ranks store the same number of keys and values."""
        own = super().free_memory
        return own if self._least_free is None else min(own, self._least_free)

    @property
    def ranks(self) -> int:
        return self.channel.world.size

    def forward(
        self,
        tokens: mx.array,
        cache: Sequence[Any] | None = None,
        aux_layers: Sequence[int] = (),
        ends: Sequence[int] | None = None,
        images: ImageInput | None = None,
    ) -> Forward:
        """Run a forward on all ranks, without `images`: a sharded target has no vision.

        Raises TargetError for other caches and for layers on other ranks, RanksError if the connection is lost.
        """
        if aux_layers and not self.has_all_layers:
            raise TargetError(
                "with --shard pipeline the layers are on several machines, so a head cannot read them; draft with "
                "n-grams or a draft model, or use --shard tensor"
            )
        if cache is not None and not isinstance(cache, tuple(_MIRRORED.values())):
            raise TargetError("a target over several ranks needs its own caches: RaggedCache.of(target.model, …)")
        number = None if cache is None else cache.number  # type: ignore[attr-defined]  # of `_numbered`
        # Nothing is computed yet, so unreadable input raises here before other ranks start.
        out = super().forward(tokens, cache, aux_layers, ends)
        assert out.hidden is not None  # `load_over_ranks` has checked it
        read = np.array(tokens).tolist()
        with self.channel.lock:
            self.calls.send("forward", number, read)
            try:
                # Wait here: a message from another thread could overtake the layers' communication.
                mx.eval(out.hidden)
            except RuntimeError as e:
                self.channel.fail(e)
        return out

    def close(self) -> None:
        """End the other ranks, if they are connected, and restore the model."""
        super().close()
        vars(self.model).pop("make_ragged_cache", None)
        if self.channel.lost is not None:  # a thread that waits for them still uses the connection
            return
        with self.channel.lock, suppress(RanksError):
            if not self.channel.closed:
                self.calls.send("end")  # still watched, in case they are lost unnoticed
                self.channel.close()
        self.channel.join()


class Follower:
    """Executes rank 0's commands on copies of its caches, which have the same numbers."""

    def __init__(self, target: Target):
        self.target = target
        self._objects: dict[int, Any] = {}
        self._freed = FreedBuffers()

    def do(self, message: dict[str, Any]) -> bool:
        """Execute a message; return whether another will come."""
        for number, name, args, kwargs, made in message["calls"]:
            named = self._objects.__getitem__
            args, kwargs = decode(args, named), {key: decode(value, named) for key, value in kwargs.items()}
            self._call(number, name, args, kwargs, made)
        for number in message["gone"]:
            del self._objects[number]
        what, *more = message["then"]
        if what == "forward":
            self._forward(*more)
        return bool(what != "end")

    def _call(self, number: int | None, name: str, args: list[Any], kwargs: dict[str, Any], made: list[int]) -> None:
        if name == "new":
            result: Any = RaggedCache.of(self.target.model, *args)
        elif number is not None and is_mirrored(type(self._objects[number]), name):
            result = getattr(self._objects[number], name)(*args, **kwargs)
        else:
            raise RanksError(f"rank 0 asks for {name!r}; does it run another version?")
        results = result if isinstance(result, tuple) else (result,)
        self._objects.update(zip(made, results, strict=False))
        if made and name != "save":
            mx.eval([other.state if isinstance(other, RaggedCache) else other.arrays for other in results])

    def _forward(self, number: int | None, tokens: list[list[int]]) -> None:
        cache = None if number is None else self._objects[number]
        hidden = self.target.forward(mx.array(tokens, mx.int32), cache).hidden
        mx.async_eval(hidden, [] if cache is None else cache.state)
        self._freed.after_step()


def follow(target: Target, channel: Channel) -> None:
    """Execute rank 0's commands until it ends. On SIGTERM, ask rank 0 to stop; work under way is finished first.

    Raises RanksError if the connection is lost.
    """

    def stop(*_: object) -> None:
        channel.shall_stop = True

    signal.signal(signal.SIGTERM, stop)
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal signals all ranks; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    follower = Follower(target)
    try:
        while (message := channel.receive()) is None or follower.do(message):
            pass
    finally:
        channel.close()
        channel.join()
