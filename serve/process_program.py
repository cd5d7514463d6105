"""The program of processes that answer questions and can be killed: of our files it imports one alone, by its path.

The first process is forked for each piece of work. Whatever becomes of a fork, it shares no state with any other.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Program:
    """Answers questions over a connection, one after the other."""

    def __init__(self, connection: Connection, memory: int, held: Any):
        """`memory`: as in `Process.start`; `held`: whose methods are the questions."""
        self.connection, self.memory, self.held = connection, memory, held

    def serve(self) -> None:
        """Answer until nobody asks any more."""
        while True:
            try:
                name, *arguments = self.connection.recv()
            except EOFError:
                return
            if name == "fork":
                self.fork()
            else:
                self.connection.send(self.answer(getattr(self.held, name), arguments))

    def answer(self, work: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, str]:
        """What the work gives, or why it gives nothing."""
        try:
            return work(*arguments), ""
        except (ValueError, RuntimeError) as e:
            return None, str(e)

    def fork(self) -> None:
        """Have a copy of this process answer over a connection of its own, which first tells its id.

        Before that, this process confirms that it has received the connection. Raises RuntimeError if it has not: too
        many files may be open.
        """
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            handles = socket.recv_fds(channel, 1, 1)[1]
        if not handles:
            raise RuntimeError("a fork's connection has not arrived")
        given = Connection(handles[0])
        with suppress(OSError):  # if nobody waits for the fork any more, it ends by itself
            given.send(True)
        if os.fork():
            given.close()
            return
        self.connection.close()
        self.connection = given
        if self.memory:
            _bound_memory(self.memory)
        with suppress(BrokenPipeError):  # nobody asks any more
            self.connection.send(os.getpid())
            self.serve()
        os._exit(0)


def _bound_memory(more: int) -> None:
    """Let this process have so many bytes more than it has. Only Linux keeps to it; elsewhere time is the bound."""
    if sys.platform == "linux":
        pages = Path("/proc/self/statm").read_text().split()[0]
        size = int(pages) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))


def _held(path: str, kind: str) -> Any:
    """What is held: the file is not imported by its name, which would import the package and MLX with it."""
    spec = spec_from_file_location(kind, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kind)()


def main() -> None:
    """Serve the descriptor that is the first argument; with its end all forks end too, whatever they are doing."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave nothing to be waited for
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    descriptor, memory, path, kind = sys.argv[1:]
    Program(Connection(int(descriptor)), int(memory), _held(path, kind)).serve()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
