"""The processes that `mlx.launch` started, and collective operations between them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError, RanksError


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run. Sums are bitwise equal in all of them.

    Every process must call the same methods in the same order, because each call waits for the others.
    """

    rank: int
    size: int
    group: mx.distributed.Group | None = None

    @classmethod
    def single(cls) -> Self:
        """Return a world of one process, which sends nothing."""
        return cls(0, 1)

    @classmethod
    def init(cls) -> Self:
        """Return the processes of `mlx.launch`, or this one. Raises ConfigError if they cannot reach one another."""
        rank = int(os.environ.get("MLX_RANK", "0"))
        wanted = int(os.environ.get("MLX_WORLD_SIZE", rank + 1))
        try:
            group = mx.distributed.init()
        except RuntimeError as e:
            raise ConfigError(f"the other processes cannot be reached: {e}; check the hosts and their ports") from e
        if group.size() < wanted:
            raise ConfigError(
                f"process {rank} of at least {wanted} sees only {group.size()}; does the installed MLX have the "
                "backend that mlx.launch uses? (`--backend ring` works everywhere)"
            )
        return cls(group.rank(), group.size(), group if group.size() > 1 else None)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that writes files and reports progress."""
        return self.rank == 0

    @property
    def others(self) -> str:
        return " or ".join(f"rank {rank}" for rank in range(self.size) if rank != self.rank)

    def all_sum(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return integers below 2**31, summed over all processes."""
        if self.group is None:
            return numbers
        return np.array(self._sum(mx.array(numbers, mx.int32))).astype(numbers.dtype)

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in any process, for instance a request to stop."""
        return bool(self.all_sum(np.array([flag], np.int32))[0])

    def all_values(self, value: int) -> list[int]:
        """Return the value of each process, by rank: integers from 0 to 2**31 - 1."""
        values = np.zeros(self.size, np.int64)
        values[self.rank] = value
        return [int(each) for each in self.all_sum(values)]

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's value, which must be JSON, in all processes."""
        if self.group is None:
            return value
        text = np.frombuffer(json.dumps(value).encode() if self.is_rank_zero else b"", np.uint8)
        size = int(self.all_sum(np.array([len(text)], np.int32))[0])
        sent = text if self.is_rank_zero else np.zeros(size, np.uint8)
        return json.loads(np.array(self._sum(mx.array(sent))).tobytes())

    def _sum(self, numbers: mx.array) -> mx.array:
        try:
            return sum_over(self.group, numbers)
        except RuntimeError as e:
            raise RanksError(f"another process of this run has ended ({e}); see its output for the reason") from e


def sum_over(group: mx.distributed.Group | None, numbers: mx.array) -> mx.array:
    """Sum [n] over all processes and evaluate it, so that messages are sent in the order of the calls.

    It runs on the CPU: the numbers are not on a GPU, and any thread may wait for them.
    """
    summed = mx.distributed.all_sum(numbers, group=group, stream=mx.cpu)
    mx.eval(summed)
    return summed
