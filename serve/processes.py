"""Processes that answer questions and can be killed if an answer takes too long.

They also run this file, by its path; it imports no module of the project, and each process loads just one. The first
process forks for each piece of work, and forks share no state.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from inspect import getfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

_PROGRAM = Path(__file__)
_LAST_SECONDS = 10.0
"""Time for the first process to end. Its longest work, reading the tokenizer, takes a second."""
_PARENT_SECONDS = 0.05
"""Interval between checks that a fork's parent is alive, until the fork has begun."""


class ProcessEnded(Exception):
    """The process has died: it exceeded its memory or stack, or it was killed."""


class Process:
    """A process, which is killed when neither this object nor a fork of it is referenced any more."""

    def __init__(
        self,
        connection: Connection,
        program: subprocess.Popen[bytes] | None = None,
        parent: Process | None = None,
        sent: Sequence[Connection] = (),
    ):
        """program: the first process's. parent, sent: a fork's parent, and the end of its connection that was sent.

        Does not raise, even if the process has ended already.
        """
        self._connection, self.parent = connection, parent
        self._sending = Lock()
        self._sent = list(sent)
        """Our copy of a fork's end of the connection, until it has arrived."""
        self._id = [program.pid] if program else []
        """Empty until a fork has sent it."""
        self._ending = (
            weakref.finalize(self, _close, connection, program)
            if program
            else weakref.finalize(self, _kill, connection, self._id, self._sent, parent)
        )

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
        return cls(ours, program)

    def fork(self) -> Process:
        """Return a copy of this process with its own state, without waiting. Raises ProcessEnded.

        Not with `multiprocessing.reduction.send_handle`: on macOS that waits for a byte on this connection, which
        another thread that reads here could take.
        """
        ours, its = Pipe()
        try:
            with self._sending, _socket_of(self._connection) as channel:
                self._connection.send(("fork",))
                socket.send_fds(channel, [b"f"], [its.fileno()])
        except OSError as e:
            its.close()
            raise ProcessEnded from e
        return Process(ours, parent=self, sent=[its])

    def ask(self, *question: Any) -> None:
        """Send a question: a method's name and its arguments. Raises ProcessEnded."""
        try:
            with self._sending:
                self._connection.send(question)
        except OSError as e:
            raise ProcessEnded from e

    def answer(self, seconds: float) -> tuple[Any, str] | None:
        """Return the method's result and an error text, or None after `seconds`. Raises ProcessEnded.

        Only one thread at a time may call this; nothing else reads from the connection.
        """
        end = monotonic() + seconds
        try:
            while True:
                left = max(0.0, end - monotonic())
                if self._connection.poll(min(left, _PARENT_SECONDS) if self._sent else left):
                    message = self._connection.recv()
                    if self._id:
                        return message  # type: ignore[no-any-return]  # as the program's `answer` gives it
                    _begin(message, self._id, self._sent)
                elif not _let_go(self._sent, self.parent) and not left:
                    return None
        except (EOFError, OSError) as e:
            raise ProcessEnded from e

    @property
    def pid(self) -> int | None:
        """The process id; None until a fork has sent it."""
        return self._id[0] if self._id else None

    @property
    def alive(self) -> bool:
        """Whether the process runs, or is still to be forked. Any thread may ask: nothing is read."""
        _let_go(self._sent, self.parent)
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


def _kill(connection: Connection, known: list[int], sent: list[Connection], parent: Process | None) -> None:
    """Kill a fork, unless it has ended, because its id may have been reused."""
    with suppress(EOFError, OSError):
        _let_go(sent, parent)
        while connection.poll(0 if known else 1):
            message = connection.recv()
            if not known:
                _begin(message, known, sent)
        if known:
            os.kill(known[0], signal.SIGKILL)
    _drop(sent)
    connection.close()


def _begin(message: int, known: list[int], sent: list[Connection]) -> None:
    """Handle one of a fork's first two messages: True if its parent received the connection, then its id."""
    if message is True:
        _drop(sent)
    else:
        known.append(message)


def _let_go(sent: list[Connection], parent: Process | None) -> bool:
    """Return whether our copy of a fork's end was closed because the parent process is gone.

    If the fork was never made, this ends its connection.
    """
    if not sent or parent is None or parent.alive:
        return False
    _drop(sent)
    return True


def _drop(sent: list[Connection]) -> None:
    """Close this process's copy of a fork's end, in the first thread that gets here.

    The copy is kept until the end has arrived: macOS may shut down a descriptor closed in transit (nodejs/node#7512).
    """
    with suppress(IndexError):
        while True:
            sent.pop().close()


def _socket_of(connection: Connection) -> socket.socket:
    """Return a connection's socket, which the caller closes. Raises OSError if the connection is closed."""
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


def _serve(connection: Connection, memory: int, held: Any) -> None:
    """Answer until the connection closes. memory: as in `Process.start`. held: its methods answer the questions."""
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        if name == "fork":
            _fork(connection, memory, held)
            continue
        try:
            answer = getattr(held, name)(*arguments), ""
        except (ValueError, RuntimeError) as e:
            answer = None, str(e)
        connection.send(answer)


def _fork(connection: Connection, memory: int, held: Any) -> None:
    """Fork a copy of this process, which sends its id and then answers over its own connection.

    First this process confirms on that connection that it has arrived. Raises RuntimeError if it has not, for example
    because too many files are open.
    """
    with _socket_of(connection) as channel:
        handles = socket.recv_fds(channel, 1, 1)[1]
    if not handles:
        raise RuntimeError("a fork's connection has not arrived")
    given = Connection(handles[0])
    with suppress(OSError):  # if nobody waits for the fork, it ends by itself
        given.send(True)
    if os.fork():
        given.close()
        return
    connection.close()
    if memory:
        _bound_memory(memory)
    with suppress(BrokenPipeError):  # the asker is gone
        given.send(os.getpid())
        _serve(given, memory, held)
    os._exit(0)


def _bound_memory(more: int) -> None:
    """Limit this process to `more` bytes beyond its size. Only Linux enforces it; elsewhere time is the limit."""
    if sys.platform == "linux":
        pages = Path("/proc/self/statm").read_text().split()[0]
        size = int(pages) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))


def _held(path: str, kind: str) -> Any:
    """Create the held object. An import by name would also import the package and MLX."""
    spec = spec_from_file_location(kind, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kind)()


def main() -> None:
    """Serve the descriptor in the first argument. When it closes, all forks end too."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks need no waitpid
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    descriptor, memory, path, kind = sys.argv[1:]
    _serve(Connection(int(descriptor)), int(memory), _held(path, kind))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
