"""The ranks other than 0: they run rank 0's forwards on their part of the target."""

from __future__ import annotations

import signal
from typing import Any

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.errors import RanksError
from eagle_mlx.memory import FreedBuffers
from eagle_mlx.ranks.channel import Channel, decode
from eagle_mlx.ranks.leader import is_mirrored
from eagle_mlx.target import Target


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
        goes_on = True
        while goes_on:
            message = channel.receive()
            goes_on = message is None or follower.do(message)
    finally:
        channel.close()
        channel.join()
