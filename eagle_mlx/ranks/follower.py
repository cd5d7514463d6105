"""The ranks other than 0: they run rank 0's forwards on their part of the target."""

from __future__ import annotations

import signal
from typing import Any

import mlx.core as mx
import numpy as np

from eagle_mlx.cache import RaggedCache
from eagle_mlx.errors import RanksError
from eagle_mlx.memory import FreedBuffers
from eagle_mlx.ranks.channel import Channel, State, decode
from eagle_mlx.ranks.leader import is_mirrored, lengths_of, size_of
from eagle_mlx.target import Target

_ROUNDING = 0.05
"""Relative difference allowed in the hidden states' mean square. Chips round differently, in bfloat16 by 0.4 % per
layer; with other tokens, or without a rank's part, the difference is far larger."""


class Follower:
    """Executes rank 0's commands on copies of its caches, which have the same numbers."""

    def __init__(self, target: Target):
        self.target = target
        self._objects: dict[int, Any] = {}
        self._hidden: mx.array | None = None  # the last layer's output in the last forward
        self._freed = FreedBuffers()
        self.differs: str | None = None  # how this rank differs from rank 0; None if it does not

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
        if name == "compare":
            self._compare(self._objects.get(number) if number is not None else None, *args)
            return
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
        self._hidden = self.target.forward(mx.array(tokens, mx.int32), cache).hidden
        mx.async_eval(self._hidden, [] if cache is None else cache.state)
        self._freed.after_step()

    def _compare(self, cache: RaggedCache | None, lengths: mx.array, size: mx.array) -> None:
        assert self._hidden is not None
        own, wanted = np.array(lengths_of(cache)).tolist(), np.array(lengths).tolist()
        if own != wanted:
            self.differs = f"this rank's texts have {own} tokens, rank 0's {wanted}"
        mine, its = (float(np.array(x)) for x in (size_of(self._hidden), size))
        if not abs(mine - its) <= _ROUNDING * abs(its):
            self.differs = f"this rank's hidden states are of mean square {mine:.6g}, rank 0's of {its:.6g}"


def follow(target: Target, channel: Channel) -> None:
    """Execute rank 0's commands until it ends. On SIGTERM, ask rank 0 to stop; work under way is finished first.

    Raises RanksError if the connection is lost or if this rank's results differ.
    """
    signal.signal(signal.SIGTERM, lambda *_: _report(channel, State.WANTS_TO_STOP))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals all ranks; rank 0 decides
    follower = Follower(target)
    try:
        goes_on = True
        while goes_on:
            message = channel.receive()
            goes_on = message is None or follower.do(message)
            if follower.differs is not None:
                _report(channel, State.DIFFERS)
                channel.receive()
                raise RanksError(f"rank {channel.world.rank}: {follower.differs}")
    finally:
        channel.close()
        channel.join()


def _report(channel: Channel, state: State) -> None:
    """Report a state to rank 0 with the next message."""
    channel.state = state
