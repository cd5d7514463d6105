"""Processes that answer questions and can be killed if an answer takes too long.

Each process runs this file by its path. This file imports no module of the project; a process loads only the module
of its class. The first process forks for each piece of work, and forks share no state.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from inspect import getfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from runpy import run_path
from threading import Lock
from typing import Any

_PROGRAM = Path(__file__)
_LAST_SECONDS = 10.0
"""Time for the first process to end. Its longest work, reading the tokenizer, takes a second."""
FORK_SECONDS = 5.0
"""Time limit of a fork. A fork takes milliseconds; a process that needs longer than a compilation is stuck."""


class ProcessEnded(Exception):
    """The process has died: it exceeded its memory or stack, or it was killed."""


class Process:
    """A process, which is killed when neither this object nor a fork of it is referenced any more."""

    def __init__(self, connection: Connection, pid: int, end: Callable[..., None], *of: Any):
        """`end` ends the process. It gets the connection and `of`, which this object keeps alive."""
        self.pid, self._connection, self._forking = pid, connection, Lock()
        self._ending = weakref.finalize(self, end, connection, *of)

    @classmethod
    def start(cls, kind: type, memory: int = 0) -> Process:
        """Start the first process.

        kind: a class without constructor arguments; its methods answer the questions, and its file may import no module
        of the project. memory: bytes that a fork may add to its initial size; 0 for no limit.
        """
        ours, its = Pipe()
        with its:
            what = [str(its.fileno()), str(memory), getfile(kind), kind.__name__]
            command = [sys.executable, "-P", str(_PROGRAM), *what]  # -P: import nothing from the program's folder
            program = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
        return cls(ours, program.pid, _close, program)

    def fork(self) -> Process:
        """Return a copy of this process with its own state. No question may be pending. Raises ProcessEnded."""
        try:
            with self._forking, _socket_of(self._connection) as channel:
                self._connection.send(("fork",))
                if not self._connection.poll(FORK_SECONDS):
                    self.end()
                    raise ProcessEnded
                pid = self._connection.recv()
                handles = socket.recv_fds(channel, 1, 1)[1]
                self._connection.send(bool(handles))
        except (EOFError, OSError) as e:
            raise ProcessEnded from e
        if not handles:  # too many files are open
            raise ProcessEnded
        return Process(Connection(handles[0]), pid, _kill, pid, self)

    def ask(self, *question: Any) -> None:
        """Send a question: a method's name and its arguments. Raises ProcessEnded."""
        try:
            self._connection.send(question)
        except OSError as e:
            raise ProcessEnded from e

    def answer(self, seconds: float) -> tuple[Any, str] | None:
        """Return a result and an error text, or None after `seconds`; for one thread at a time. Raises ProcessEnded."""
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError) as e:
            raise ProcessEnded from e

    @property
    def alive(self) -> bool:
        """Whether the process runs. Any thread may ask: nothing is read."""
        try:
            with _socket_of(self._connection) as channel:
                return bool(channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def end(self) -> None:
        """Kill the process; killing the first one also kills all forks."""
        self._ending()


def _close(connection: Connection, program: subprocess.Popen[bytes]) -> None:
    """Close the connection. The first process then ends itself and all forks."""
    connection.close()
    program.wait(_LAST_SECONDS)


def _kill(connection: Connection, pid: int, _: Process) -> None:
    """Kill a fork, unless it has ended, because its id may have been reused."""
    with suppress(EOFError, OSError):
        while connection.poll(0):
            connection.recv()
        os.kill(pid, signal.SIGKILL)
    connection.close()


def _socket_of(connection: Connection) -> socket.socket:
    """Return a connection's socket, which the caller closes. Raises OSError if the connection is closed."""
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


def _serve(connection: Connection, memory: int, held: Any) -> None:
    """Let `held`'s methods answer questions until the connection closes. memory: see `Process.start`."""
    with suppress(EOFError, BrokenPipeError):
        while True:
            name, *arguments = connection.recv()
            if name == "fork":
                _fork(connection, memory, held)
                continue
            try:
                answer = getattr(held, name)(*arguments), ""
            except (ValueError, RuntimeError) as e:
                answer = None, str(e)
            connection.send(answer)


def _fork(connection: Connection, memory: int, held: Any) -> None:
    """Fork a copy of this process; send its id and its own connection.

    The connection stays open here until it has arrived: macOS may shut down a descriptor closed in transit
    (nodejs/node#7512).
    """
    theirs, its = Pipe()
    if pid := os.fork():
        its.close()
        with theirs, _socket_of(connection) as channel:
            connection.send(pid)
            socket.send_fds(channel, [b"f"], [theirs.fileno()])
            connection.recv()
        return
    theirs.close()
    connection.close()
    if memory:
        _bound_memory(memory)
    _serve(its, memory, held)
    os._exit(0)


def _bound_memory(more: int) -> None:
    """Limit this process to `more` bytes beyond its size. Only Linux enforces it; elsewhere time is the limit."""
    if sys.platform == "linux":
        pages = Path("/proc/self/statm").read_text().split()[0]
        size = int(pages) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))


def main() -> None:
    """Serve the descriptor in the first argument. When it closes, all forks end too."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks need no waitpid
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    descriptor, memory, path, kind = sys.argv[1:]
    held = run_path(path)[kind]()  # an import by name would also import the package and MLX
    _serve(Connection(int(descriptor)), int(memory), held)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
