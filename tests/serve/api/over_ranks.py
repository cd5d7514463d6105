"""Clients' tests with targets sharded over processes (EAGLE_TEST_RANKS=2, tests/clients/README.md).

The tests run on rank 0, like a server. The other ranks start with the first target, and get a part of every target.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import eagle_mlx as em

# isort: split
# Behind eagle_mlx, which brings the fast BLAS before MLX.
from eagle_mlx.ranks import ProcessGroup
from eagle_mlx.ranks.channel import Channel
from eagle_mlx.ranks.commands import Follower, LeadingTarget
from eagle_mlx.ranks.load import shard_tensors
from tests.processes import ROOT, free_ports, on_core

RANKS = int(os.environ.get("EAGLE_TEST_RANKS", "1"))
"""Number of processes that share a target."""
_NUMBERS = count()


class Line:
    """Messages for one of several targets over the only channel."""

    def __init__(self, channel: Channel, number: int):
        self.channel, self.number, self.closed = channel, number, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    @property
    def lock(self) -> threading.RLock:
        return self.channel.lock

    def send(self, message: dict[str, Any]) -> None:
        self.channel.send({"of": self.number, **message})

    def close(self) -> None:
        """Keep the channel open for the other targets."""
        self.closed = True


def led(whole: Callable[..., em.Target], *arguments: str) -> em.Target:
    """Return a target from `whole`, sharded over the ranks."""
    channel, number = _channel(), next(_NUMBERS)
    line: Any = Line(channel, number)
    channel.send({"open": number, "whole": whole.__name__, "arguments": arguments})
    return LeadingTarget.of(_part(whole(*arguments), channel.world), line)


def _part(target: em.Target, world: ProcessGroup) -> em.Target:
    assert world.group is not None
    shard_tensors(target.model, world.group)
    return em.Target(target.model, target.tokenizer, target.name)


@cache
def _channel() -> Channel:
    """Start the other ranks and return the channel to them."""
    hosts = Path(tempfile.mkdtemp()) / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(RANKS)]))
    places = {"MLX_HOSTFILE": str(hosts), "PYTHONPATH": str(ROOT)}
    others = [
        subprocess.Popen(
            [*on_core(rank), sys.executable, "-m", __name__], env={**os.environ, **places, "MLX_RANK": str(rank)}
        )
        for rank in range(1, RANKS)
    ]
    os.environ.update(places, MLX_RANK="0")
    channel = Channel(ProcessGroup.init())
    channel.watch()
    atexit.register(_end, channel, others)
    return channel


def _end(channel: Channel, others: list[subprocess.Popen[bytes]]) -> None:
    channel.send({"end": True})
    channel.close()
    for process in others:
        process.wait(20)


def _follow() -> None:
    """Run the other ranks with their parts of all targets."""
    from tests.serve.api import given

    world = ProcessGroup.init()
    channel = Channel(world)
    channel.watch()
    followers: dict[int, Follower] = {}
    while (message := channel.receive()) is None or "end" not in message:
        if message is None:
            continue
        if "open" in message:
            whole = getattr(given, message["whole"])
            followers[message["open"]] = Follower(_part(whole(*message["arguments"]), world))
        elif not followers[message["of"]].do(message):
            del followers[message["of"]]
    channel.close()


if __name__ == "__main__":
    _follow()
