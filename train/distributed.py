"""Data-parallel training: each process works on its part of every batch."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from eagle_mlx import ranks

T = TypeVar("T")

_BUCKET = 1 << 23
"""Numbers per all-reduce, plus at most one parameter: 32 MB of float32."""


class World(ranks.World):
    """The processes of a run, and the operations that they share in a step."""

    def part(self, count: int) -> slice:
        """Return this process's share of `count` rows. The first ranks get one more if it does not divide evenly."""
        each, more = divmod(count, self.size)
        begin = self.rank * each + min(self.rank, more)
        return slice(begin, begin + each + (self.rank < more))

    def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` on one process per machine at a time, and return its result."""
        host = zlib.crc32(socket.gethostname().encode()) >> 1
        hosts = np.zeros(self.size, np.int64)
        hosts[self.rank] = host
        known = self.all_sum(hosts).tolist()
        for turn in range(max(known.count(each) for each in known)):
            if turn == known[: self.rank].count(host):
                done = work()
            self.all_sum(np.zeros(1, np.int64))
        return done

    def all_sum_tree(self, tree: Any) -> Any:
        """Return the sum over all processes of a tree of float32 arrays with the same names and shapes."""
        if self.group is None:
            return tree
        arrays = dict(cast(list[tuple[str, mx.array]], tree_flatten(tree)))
        summed: dict[str, mx.array] = {}
        bucket: dict[str, mx.array] = {}
        for count, name in enumerate(sorted(arrays), 1):
            bucket[name] = arrays[name]
            if count == len(arrays) or sum(array.size for array in bucket.values()) >= _BUCKET:
                summed |= self._sum_bucket(bucket)
                bucket = {}
        return tree_unflatten(list(summed.items()))

    def broadcast_arrays(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return rank 0's arrays, bit for bit. Other ranks pass arrays of the same names, shapes and dtypes."""
        if self.group is None:
            return dict(arrays)
        found = {}
        for name in sorted(arrays):
            array = arrays[name]
            sent = np.array(array.reshape(-1).view(mx.uint8)) if self.is_rank_zero else np.zeros(array.nbytes, np.uint8)
            received = np.array(self._sum(mx.array(sent)))
            found[name] = mx.array(received).view(array.dtype).reshape(array.shape)
        return found

    def _sum_bucket(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        joined = self._sum(mx.concatenate([array.reshape(-1) for array in arrays.values()]))
        ends = np.cumsum([array.size for array in arrays.values()]).tolist()
        parts = mx.split(joined, ends[:-1]) if len(ends) > 1 else [joined]
        return {name: part.reshape(arrays[name].shape) for name, part in zip(arrays, parts, strict=True)}


SINGLE_PROCESS = World.single()
