"""Processes that are asked something and can be killed when it takes too long; of our files, each imports one alone.

This file is also their program, run by its path, and imports none of ours. The first process is forked for each piece
of work. Whatever becomes of a fork, it shares no state with any other.
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
"""The first process does nothing long but read the tokenizer, which takes a second."""
_PARENT_SECONDS = 0.05
"""While a fork has not begun, the time between two checks that the process that is to make it still lives."""


class ProcessEnded(Exception):
    """The process has died: it needed more memory or a deeper stack than it may have, or somebody killed it."""


class Process:
    """One process of the tree, which is killed, whatever it does, when nobody holds this or a fork of it."""

    def __init__(
        self,
        connection: Connection,
        program: subprocess.Popen[bytes] | None = None,
        parent: Process | None = None,
        sent: Sequence[Connection] = (),
    ):
        """Raise nothing; the process may have ended already.

        `program`: the first process's. `parent` and `sent`: a fork's, with the end of its connection that was sent.
        """
        self._connection, self.parent = connection, parent
        self._sending = Lock()
        self._sent = list(sent)
        """Our copy of a fork's end, until that has arrived."""
        self._id = [program.pid] if program else []
        """Empty until a fork has sent it."""
        self._ending = (
            weakref.finalize(self, _close, connection, program)
            if program
            else weakref.finalize(self, _kill, connection, self._id, self._sent, parent)
        )

    @classmethod
    def start(cls, kind: type, memory: int = 0) -> Process:
        """The first one.

        kind: what it holds, made without arguments, whose methods are the questions; its file may import none of ours.
        memory: bytes that a fork may take beside those that it begins with, 0 for as many as there are.
        """
        ours, its = Pipe()
        with its:
            what = [str(its.fileno()), str(memory), getfile(kind), kind.__name__]
            command = [sys.executable, "-P", str(_PROGRAM), *what]  # nothing is imported from the program's folder
            program = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
        return cls(ours, program)

    def fork(self) -> Process:
        """Return a copy of this process that goes its own way. Nothing is waited for. Raises ProcessEnded.

        `multiprocessing.reduction.send_handle` is not used: on macOS it waits for a byte on this connection, and
        another thread that reads here could take that byte.
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
        """A method's name and its arguments. Raises ProcessEnded."""
        try:
            with self._sending:
                self._connection.send(question)
        except OSError as e:
            raise ProcessEnded from e

    def answer(self, seconds: float) -> tuple[Any, str] | None:
        """What the method gave, or why it gave nothing; None after so many seconds. Raises ProcessEnded.

        One thread at a time may call it; nothing else reads from the connection.
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
        """Its id; None until a fork has told it."""
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
        """Kill it; of the first process, all forks with it."""
        self._ending()


def _close(connection: Connection, program: subprocess.Popen[bytes]) -> None:
    """The first process ends itself and all forks when nobody can ask it any more."""
    connection.close()
    program.wait(_LAST_SECONDS)


def _kill(connection: Connection, known: list[int], sent: list[Connection], parent: Process | None) -> None:
    """Kill a fork, unless it has ended: another process might have its id by now."""
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
    """Take one of a fork's first two messages: True, its parent has received the connection; then its own id."""
    if message is True:
        _drop(sent)
    else:
        known.append(message)


def _let_go(sent: list[Connection], parent: Process | None) -> bool:
    """Return whether our copy of a fork's end was closed, because the process that was to make the fork is gone.

    If the fork was not made, its connection ends with that.
    """
    if not sent or parent is None or parent.alive:
        return False
    _drop(sent)
    return True


def _drop(sent: list[Connection]) -> None:
    """Close our copy of a fork's end, whichever thread does so first.

    It is kept until it has arrived: macOS may shut down a descriptor that is closed on its way (nodejs/node#7512).
    """
    with suppress(IndexError):
        while True:
            sent.pop().close()


def _socket_of(connection: Connection) -> socket.socket:
    """Return a connection's socket, which the caller closes. Raises OSError if the connection is closed."""
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


def _serve(connection: Connection, memory: int, held: Any) -> None:
    """Answer until nobody asks any more. memory: as in `Process.start`. held: its methods are the questions."""
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
    """Have a copy of this process answer over a connection of its own, which first tells its id.

    Before that, this process confirms that it has received the connection. Raises RuntimeError if it has not: too
    many files may be open.
    """
    with _socket_of(connection) as channel:
        handles = socket.recv_fds(channel, 1, 1)[1]
    if not handles:
        raise RuntimeError("a fork's connection has not arrived")
    given = Connection(handles[0])
    with suppress(OSError):  # if nobody waits for the fork any more, it ends by itself
        given.send(True)
    if os.fork():
        given.close()
        return
    connection.close()
    if memory:
        _bound_memory(memory)
    with suppress(BrokenPipeError):  # nobody asks any more
        given.send(os.getpid())
        _serve(given, memory, held)
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
    _serve(Connection(int(descriptor)), int(memory), _held(path, kind))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
