"""Data-parallel training: each process works on its part of every batch."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_unflatten

from eagle_mlx import ranks
from eagle_mlx.formats.tensors import arrays_of

T = TypeVar("T")
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class World(ranks.ProcessGroup):
    """The processes of a run, and the operations that they share in a step."""

    def part(self, count: int) -> slice:
        """Return this process's share of `count` rows. The first ranks get one more if it does not divide evenly."""
        share, more = divmod(count, self.size)
        begin = self.rank * share + min(self.rank, more)
        return slice(begin, begin + share + (self.rank < more))

    def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` on one process per machine at a time, and return its result."""
        hosts = self.all_values(zlib.crc32(socket.gethostname().encode()) >> 1)
        for turn in range(max(map(hosts.count, hosts))):
            if turn == hosts[: self.rank].count(hosts[self.rank]):
                done = work()
            self.any(False)  # wait for the others
        return done

    def all_sum_tree(self, tree: Any) -> Any:
        """Return the sum over all processes of a tree of float32 arrays with the same names and shapes."""
        if self.group is None:
            return tree
        leaves = sorted(arrays_of(tree).items())  # the same order in all processes
        return tree_unflatten([(name, self._sum(array)) for name, array in leaves])

    def broadcast_arrays(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return rank 0's arrays, bit for bit. Other ranks pass arrays of the same names, shapes and dtypes."""
        if self.group is None:
            return dict(arrays)
        received = {}
        for name, array in sorted(arrays.items()):
            bits = array.reshape(-1).view(_BITS[array.dtype.size])  # not bytes: MLX's dimensions are below 2^31
            summed = self._sum(bits if self.is_rank_zero else mx.zeros_like(bits))
            received[name] = summed.view(array.dtype).reshape(array.shape)
        return received


SINGLE_PROCESS = World.single()
