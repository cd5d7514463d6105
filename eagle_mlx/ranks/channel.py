"""What rank 0 says to the others, one small message at a time, and what they say back in it.

A message is one sum over all ranks, to which rank 0 gives its text and each of the others a few numbers. A long one has
its rest in a second. Nothing else is sent but what the target's own layers exchange.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from time import monotonic, sleep
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.decoding.draft import Branches
from eagle_mlx.errors import RanksError
from eagle_mlx.ranks.world import World

TIMEOUT = 60.0
"""Seconds in which the others must answer: more than any forward takes, the longest chunk of a prompt included."""
_TEXT = 2048
"""Bytes of a text that go with the first sum: a round of 8 rows takes a few hundred, a chunk of a prompt ten thousand.
"""
_MAGIC = 0x4EAD
"""What every message begins with: a sum of anything else does not."""
_HEADER = 2 + _TEXT // 4
"""Numbers of the sign, the text's size and its beginning."""
_HEARTBEAT = 1.0
"""Seconds between two messages at most: without them a rank could not tell one that waits from one that is gone."""
REST = 0.02
"""Seconds that all ranks sleep between two messages while there is nothing to do: MLX waits without resting.

The first token behind a pause comes so much later at most."""


_KINDS = {"int32": mx.int32, "bool": mx.bool_, "float32": mx.float32}
"""Types of the arrays that go with messages."""


class State(IntEnum):
    """What a rank says of itself."""

    RUNS = 0
    WANTS_TO_STOP = 1
    """It has been sent SIGTERM."""
    DIFFERS = 2
    """Its numbers are not rank 0's."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank has said with the last message."""

    state: State
    waited: float
    """Seconds that it has waited for messages so far; of rank 0, for the others to take one. Those that only say that
    rank 0 is there are not counted."""


class Channel:
    """One message after the other, the same in all ranks; `send` is rank 0's, `receive` the others'.

    Once begun it watches: rank 0 says at least every second that it is there. Where no message has gone through for
    `timeout` seconds, or the connection is lost, `on_lost` is called from a thread. By default that ends the process,
    since whoever waits within a forward would wait for ever.
    """

    def __init__(self, world: World, timeout: float = TIMEOUT):
        self.world, self.timeout = world, timeout
        self.state = State.RUNS
        self.on_lost: Callable[[str], None] = end_process
        self.on_stop: Callable[[], None] = _stop_process
        """Called in rank 0, from a thread, when another rank wants to stop."""
        self.lost: str | None = None
        """Why there is no other rank any more."""
        self.statuses = [RankStatus(State.RUNS, 0.0)] * world.size
        self.messages = 0
        self._waited = 0.0
        self._said = monotonic()
        """When rank 0 last had something to say."""
        self._lock = threading.RLock()
        self._last = monotonic()
        """When a message went through."""
        self._ended = threading.Event()

    @property
    def lock(self) -> threading.RLock:
        """Held while layers exchange something, so that no message comes between."""
        return self._lock

    def watch(self) -> None:
        """Begin to watch, and in rank 0 to say now and then that it is there. All ranks are there by now."""
        self._last = monotonic()
        threading.Thread(target=self._watch, name="ranks-watch", daemon=True).start()
        if self.world.is_rank_zero:
            threading.Thread(target=self._heartbeat, name="ranks-heartbeat", daemon=True).start()

    def send(self, message: Any) -> None:
        """Tell the others something, plain values as JSON has them. Raises RanksError where they are gone."""
        with self._lock:
            self._said = monotonic()
            self.exchange(json.dumps(message, separators=(",", ":")).encode())

    def receive(self) -> Any:
        """What rank 0 says next; None where it only says that it is there, behind which nothing comes for `REST`."""
        text = self.exchange(b"")
        if text:
            return json.loads(text)
        sleep(REST)
        return None

    def check(self) -> None:
        """Raise RanksError where the others are gone."""
        with self._lock:
            self.exchange(b"")

    @property
    def closed(self) -> bool:
        """Whether nobody is waited for any more."""
        return self._ended.is_set()

    def close(self) -> None:
        """There will be no more messages."""
        self._ended.set()

    def exchange(self, text: bytes) -> bytes:
        """One message; rank 0 gives its text, and every rank gets it."""
        if self.lost is not None:
            raise RanksError(self.lost)
        began = monotonic()
        try:
            numbers = self._sum(self._packed(text))
            sign, size = int(numbers[0]), int(numbers[1])
            if sign != _MAGIC:
                raise RuntimeError("what came is no message: the ranks are not in step")
            head = numbers[2:_HEADER].tobytes()[:size]
            rest = b""
            if size > _TEXT:
                own = text[_TEXT:] if self.world.is_rank_zero else bytes(size - _TEXT)
                rest = self._sum(np.frombuffer(own, np.uint8)).tobytes()
        except RuntimeError as e:
            self.fail(e)
        self._last = monotonic()
        self._waited += self._last - began if size else 0.0
        self.messages += 1
        self._read_statuses(numbers[_HEADER:])
        if self.lost is not None:
            raise RanksError(self.lost)
        return head + rest

    def fail(self, error: RuntimeError) -> NoReturn:
        """There will be no more messages: MLX has raised this while ranks exchanged something. Raises RanksError."""
        self.lost = self.lost or f"rank {self.world.rank}: the exchange with {self.world.others} has failed ({error})"
        raise RanksError(self.lost) from error

    def _packed(self, text: bytes) -> NDArray[np.int32]:
        """The sign, the text's size and beginning, and for each rank its state and the milliseconds it has waited."""
        numbers = np.zeros(_HEADER + 2 * self.world.size, np.int32)
        if self.world.is_rank_zero:
            numbers[:2] = _MAGIC, len(text)
            begin = text[:_TEXT]
            numbers[2:_HEADER] = np.frombuffer(begin + bytes(_TEXT - len(begin)), np.int32)
        own = _HEADER + 2 * self.world.rank
        numbers[own : own + 2] = self.state, int(1000 * self._waited) & 0x7FFFFFFF
        return numbers

    def _sum(self, numbers: NDArray[Any]) -> NDArray[Any]:
        summed = mx.distributed.all_sum(mx.array(numbers), group=self.world.group, stream=mx.cpu)
        mx.eval(summed)
        return np.array(summed)

    def _read_statuses(self, numbers: NDArray[np.int32]) -> None:
        before = self.statuses
        self.statuses = [RankStatus(State(int(state)), int(ms) / 1000) for state, ms in numbers.reshape(-1, 2)]
        for rank, (old, new) in enumerate(zip(before, self.statuses, strict=True)):
            if rank and self.world.is_rank_zero and new.state != old.state:
                self._hear(rank, new.state)

    def _hear(self, rank: int, state: State) -> None:
        if state == State.WANTS_TO_STOP:
            self.on_stop()
        elif state == State.DIFFERS:
            self._lose(f"rank {rank} has come to other numbers than rank 0; it has said which")

    def _heartbeat(self) -> None:
        interval, idle = min(_HEARTBEAT, self.timeout / 4), False
        while not self._ended.wait(REST if idle else interval):
            with self._lock:
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
                    f"rank {self.world.rank}: no answer of {self.world.others} for {self.timeout:g} seconds "
                    "(--rank-seconds)"
                )
                return

    def _lose(self, reason: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self.lost = self.lost or reason
            self.on_lost(self.lost)


def end_process(reason: str) -> None:
    """Say why and end with status 2, as commands do for an error, whatever other threads wait for."""
    try:
        print(f"error: {reason}", file=sys.stderr, flush=True)
    finally:
        os._exit(2)


def _stop_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def encode(value: Any) -> Any:
    """An argument as JSON has it: numbers, lists of them, arrays, what a tree is read by, and objects by their numbers.

    An array that has not been computed is waited for.
    """
    if isinstance(value, mx.array):
        return _encode_array(value)
    if isinstance(value, Branches):
        return {"seen": encode(value.seen), "depths": encode(value.depths)}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    return {"number": value.number} if hasattr(value, "number") else value


def decode(value: Any, named: Callable[[int], Any]) -> Any:
    """The argument that `encode` made this of; `named` gives an object by its number."""
    if isinstance(value, list):
        return [decode(each, named) for each in value]
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return named(value["number"])
    if "seen" in value:
        return Branches(decode(value["seen"], named), decode(value["depths"], named))
    return _decode_array(value)


def _encode_array(array: mx.array) -> dict[str, Any]:
    values = np.array(array)
    packed = np.packbits(values) if values.dtype == np.bool_ else values
    return {"array": b64encode(packed.tobytes()).decode(), "shape": list(values.shape), "type": str(values.dtype)}


def _decode_array(value: dict[str, Any]) -> mx.array:
    data, shape, kind = b64decode(value["array"]), value["shape"], value["type"]
    if kind == "bool":
        values = np.unpackbits(np.frombuffer(data, np.uint8), count=int(np.prod(shape))).astype(np.bool_)
    else:
        values = np.frombuffer(data, kind)
    return mx.array(values.reshape(shape), _KINDS[kind])
