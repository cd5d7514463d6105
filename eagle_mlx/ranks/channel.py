"""The processes that `mlx.launch` started, their collective operations, and messages from rank 0 to the other ranks.

A message is one sum over all ranks: rank 0 contributes its text, the others whether they were asked to stop. A second
sum carries the rest of a long text. Only the target's layers exchange anything else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, NoReturn, Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.decoding.draft import Branches
from eagle_mlx.errors import ConfigError, RanksError
from eagle_mlx.setting import RANK_SECONDS

_TEXT = 2048
"""Bytes of text in the first sum. A round of 8 rows takes a few hundred, a chunk of a prompt ten thousand."""
_MAGIC = 0x4EAD
"""The first number of every message. Another number means that the ranks are out of step."""
_HEADER = 2 + _TEXT // 4  # numbers: the magic number, the text's size and its beginning; then how many ranks shall stop
_HEARTBEAT = 1.0  # maximum seconds between two messages, so that a waiting rank can tell a busy rank 0 from a lost one
REST = 0.02
"""Seconds that all ranks sleep between two messages when idle, because MLX waits without sleeping.

It is the most that the first token after a pause is delayed.
"""


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
        return [int(number) for number in self.all_sum(values)]

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


class Channel:
    """A sequence of messages, the same in all ranks; rank 0 calls `send`, the others `receive`.

    After `watch`, rank 0 sends a heartbeat at least every second. If no message passes for `timeout` seconds or the
    connection is lost, a thread calls `on_lost`. By default that ends the process, because a forward under way would
    wait forever.
    """

    def __init__(self, world: ProcessGroup, timeout: float = RANK_SECONDS):
        self.world, self.timeout = world, timeout
        self.shall_stop = False  # whether this rank has received SIGTERM, which rank 0 then gets, too
        self.on_lost: Callable[[str], None] = end_process
        self.lost: str | None = None  # why the connection is lost; None if it is not
        self.messages = 0
        self._said = monotonic()  # time of rank 0's last message other than a heartbeat
        self.lock = threading.RLock()  # hold it while layers communicate, so that no message comes in between
        self._last = monotonic()  # time of the last message
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def watch(self) -> None:
        """Start to watch the connection and, in rank 0, to send heartbeats. All ranks must be connected."""
        self._last = monotonic()
        self._threads.append(threading.Thread(target=self._watch, name="ranks-watch", daemon=True))
        if self.world.is_rank_zero:
            self._threads.append(threading.Thread(target=self._heartbeat, name="ranks-heartbeat", daemon=True))
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Send a JSON value to the other ranks. Raises RanksError if the connection is lost."""
        with self.lock:
            self._said = monotonic()
            self.exchange(json.dumps(message, separators=(",", ":")).encode())

    def receive(self) -> Any:
        """Return rank 0's next message; None for a heartbeat, after which this sleeps for `REST`."""
        text = self.exchange(b"")
        if text:
            return json.loads(text)
        sleep(REST)
        return None

    @property
    def closed(self) -> bool:
        return self._ended.is_set()

    def close(self) -> None:
        """Stop watching; no more messages are sent."""
        self._ended.set()

    def join(self) -> None:
        """After `close`, wait for the threads. Do not hold the lock.

        A thread that still runs when Python ends keeps MLX's group alive, and MPI is not finalized.
        """
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_HEARTBEAT)

    def exchange(self, text: bytes) -> bytes:
        """Exchange one message: every rank gets rank 0's text."""
        if self.lost is not None:
            raise RanksError(self.lost)
        try:
            numbers = np.array(sum_over(self.world.group, mx.array(self._packed(text))))
            sign, size = int(numbers[0]), int(numbers[1])
            if sign != _MAGIC:
                raise RuntimeError("received something that is not a message: the ranks are out of step")
            head = numbers[2:_HEADER].tobytes()[:size]
            rest = b""
            if size > _TEXT:
                own = text[_TEXT:] if self.world.is_rank_zero else bytes(size - _TEXT)
                rest = np.array(sum_over(self.world.group, mx.array(np.frombuffer(own, np.uint8)))).tobytes()
        except RuntimeError as e:
            self.fail(e)
        self._last = monotonic()
        self.messages += 1
        if self.world.is_rank_zero and numbers[_HEADER] and not self.shall_stop:
            self.shall_stop = True
            os.kill(os.getpid(), signal.SIGTERM)
        return head + rest

    def fail(self, error: RuntimeError) -> NoReturn:
        """Record that MLX raised `error` in an exchange, and raise RanksError."""
        self.lost = self.lost or f"rank {self.world.rank}: the exchange with {self.world.others} has failed ({error})"
        raise RanksError(self.lost) from error

    def _packed(self, text: bytes) -> NDArray[np.int32]:
        """Return the magic number, the text's size and beginning, and whether this rank shall stop."""
        numbers = np.zeros(_HEADER + 1, np.int32)
        if self.world.is_rank_zero:
            numbers[:2] = _MAGIC, len(text)
            begin = text[:_TEXT]
            numbers[2:_HEADER] = np.frombuffer(begin + bytes(_TEXT - len(begin)), np.int32)
        numbers[_HEADER] = self.shall_stop
        return numbers

    def _heartbeat(self) -> None:
        interval, idle = min(_HEARTBEAT, self.timeout / 4), False
        while not self._ended.wait(REST if idle else interval):
            with self.lock:
                if self._ended.is_set():
                    return
                idle = monotonic() - self._said >= interval
                if not idle:
                    continue
                try:
                    self.exchange(b"")
                except RanksError as e:
                    self._lose(str(e))
                    return

    def _watch(self) -> None:
        while not self._ended.wait(min(_HEARTBEAT, self.timeout / 4)):
            if monotonic() - self._last > self.timeout:
                self._lose(
                    f"rank {self.world.rank}: no answer from {self.world.others} for {self.timeout:g} seconds "
                    "(--rank-seconds)"
                )
                return

    def _lose(self, reason: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self.lost = self.lost or reason
            self.on_lost(self.lost)


def end_process(reason: str) -> None:
    """Print the reason and end the process with status 2, even if other threads are waiting."""
    try:
        print(f"error: {reason}", file=sys.stderr, flush=True)
    finally:
        os._exit(2)


def encode(value: Any) -> Any:
    """Convert an argument to JSON: numbers, lists, arrays, `Branches`, objects by their numbers. Waits for arrays."""
    if isinstance(value, mx.array):
        array = np.array(value)
        numbers = array.astype(np.int8) if array.dtype == np.bool_ else array  # 0 is shorter than false
        return {"array": numbers.tolist(), "type": str(array.dtype)}
    if isinstance(value, Branches):
        return {"seen": encode(value.seen), "depths": encode(value.depths)}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return {"number": value.number} if hasattr(value, "number") else value


def decode(value: Any, named: Callable[[int], Any]) -> Any:
    """Return the argument that `encode` converted; `named` returns an object by its number."""
    match value:
        case list():
            return [decode(item, named) for item in value]
        case {"number": number}:
            return named(number)
        case {"seen": seen, "depths": depths}:
            return Branches(decode(seen, named), decode(depths, named))
        case {"array": numbers, "type": kind}:
            return mx.array(np.array(numbers, kind))
    return value
