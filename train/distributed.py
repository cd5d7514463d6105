"""Several processes that train one head together, each on its part of every batch."""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError, EagleError

T = TypeVar("T")

_BUCKET = 1 << 23
"""Numbers that are summed in one message, up to a parameter more: 32 MB of float32."""


@dataclass(frozen=True)
class World:
    """The processes of a run. What is summed is the same in all of them, bit by bit.

    Every process must call the same methods in the same order: each waits for the others.
    """

    rank: int
    size: int
    group: mx.distributed.Group | None = None

    @classmethod
    def single(cls) -> World:
        """One process, which sends nothing."""
        return cls(0, 1)

    @classmethod
    def init(cls) -> World:
        """The processes that `mlx.launch` has started; one where it has not.

        Raises ConfigError where they cannot reach one another.
        """
        rank = int(os.environ.get("MLX_RANK", "0"))
        wanted = int(os.environ.get("MLX_WORLD_SIZE", rank + 1))
        try:
            group = mx.distributed.init()
        except RuntimeError as e:
            raise ConfigError(f"the other processes cannot be reached: {e}; look at the hosts and their ports") from e
        if group.size() < wanted:
            raise ConfigError(
                f"process {rank} of at least {wanted} sees {group.size()} of them; does the installed MLX have the "
                "backend that mlx.launch was told? (`--backend ring` works everywhere)"
            )
        return cls(group.rank(), group.size(), group if group.size() > 1 else None)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes the files and reports progress."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Which of `count` rows are this process's: as many as the others have, or one more for the first ones."""
        each, more = divmod(count, self.size)
        begin = self.rank * each + min(self.rank, more)
        return slice(begin, begin + each + (self.rank < more))

    def all_sum(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Whole numbers below 2**31, added over all processes."""
        if self.group is None:
            return numbers
        return np.array(self._sum(mx.array(numbers, mx.int32))).astype(numbers.dtype)

    def any(self, flag: bool) -> bool:
        """Whether it is so in one process at least, such as that it has been asked to stop."""
        return bool(self.all_sum(np.array([flag], np.int32))[0])

    def in_turn(self, work: Callable[[], T]) -> T:
        """Do something of which the processes on one machine would get in one another's way; returns its result."""
        host = zlib.crc32(socket.gethostname().encode()) >> 1
        hosts = np.zeros(self.size, np.int64)
        hosts[self.rank] = host
        known = self.all_sum(hosts).tolist()
        for turn in range(max(known.count(each) for each in known)):
            if turn == known[: self.rank].count(host):
                done = work()
            self.all_sum(np.zeros(1, np.int64))
        return done

    def all_sum_arrays(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """float32 arrays of the same names and shapes, added over all processes."""
        if self.group is None:
            return dict(arrays)
        summed: dict[str, mx.array] = {}
        waiting: list[str] = []
        for name in sorted(arrays):
            waiting.append(name)
            if sum(arrays[each].size for each in waiting) >= _BUCKET:
                summed |= self._sum_bucket({each: arrays[each] for each in waiting})
                waiting = []
        if waiting:
            summed |= self._sum_bucket({each: arrays[each] for each in waiting})
        return summed

    def all_sum_tree(self, tree: Any) -> Any:
        """The same for a tree of arrays."""
        if self.group is None:
            return tree
        flat = dict(cast(list[tuple[str, mx.array]], tree_flatten(tree)))
        return tree_unflatten(list(self.all_sum_arrays(flat).items()))

    def broadcast_arrays(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Rank 0's arrays, bit by bit; those given elsewhere say their names, shapes and types."""
        if self.group is None:
            return dict(arrays)
        found = {}
        for name in sorted(arrays):
            array = arrays[name]
            sent = np.array(array.reshape(-1).view(mx.uint8)) if self.is_rank_zero else np.zeros(array.nbytes, np.uint8)
            received = np.array(self._sum(mx.array(sent)))
            found[name] = mx.array(received).view(array.dtype).reshape(array.shape)
        return found

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value in all processes; plain values as JSON has them."""
        if self.group is None:
            return value
        text = np.frombuffer(json.dumps(value).encode() if self.is_rank_zero else b"", np.uint8)
        size = int(self.all_sum(np.array([len(text)], np.int32))[0])
        sent = text if self.is_rank_zero else np.zeros(size, np.uint8)
        return json.loads(np.array(self._sum(mx.array(sent))).tobytes())

    def _sum_bucket(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        joined = self._sum(mx.concatenate([array.reshape(-1) for array in arrays.values()]))
        ends = np.cumsum([array.size for array in arrays.values()]).tolist()
        parts = mx.split(joined, ends[:-1]) if len(ends) > 1 else [joined]
        return {name: part.reshape(arrays[name].shape) for name, part in zip(arrays, parts, strict=True)}

    def _sum(self, numbers: mx.array) -> mx.array:
        """[n] -> [n], evaluated, so that messages are sent in the order of the calls."""
        try:
            summed = mx.distributed.all_sum(numbers, group=self.group)
            mx.eval(summed)
        except RuntimeError as e:
            raise EagleError(f"another process of this run has ended ({e}); what it has said tells why") from e
        return summed


SINGLE_PROCESS = World.single()
