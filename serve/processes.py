"""The server's end of `process_program.py`: processes that are asked something, and killed when it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from inspect import getfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from threading import Lock
from typing import Any

_PROGRAM = Path(__file__).with_name("process_program.py")
_LAST_SECONDS = 10.0
"""The first process does nothing long but read the tokenizer, which takes a second."""


class ProcessEnded(Exception):
    """The process has died: it needed more memory or a deeper stack than it may have, or somebody killed it."""


class Process:
    """One process of the tree, which is killed, whatever it does, when nobody holds this or a fork of it."""

    def __init__(
        self, connection: Connection, program: subprocess.Popen[bytes] | None = None, parent: Process | None = None
    ):
        """`program`: of the first process; the others are forks of it, or of each other."""
        self._connection, self._parent = connection, parent
        self._forking = Lock()
        self._id = [program.pid] if program else []
        """Empty until a fork has sent it."""
        self._ending = (
            weakref.finalize(self, _close, connection, program)
            if program
            else weakref.finalize(self, _kill, connection, self._id)
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
        """A copy that goes its own way. Nothing is waited for. Raises ProcessEnded."""
        ours, its = Pipe()
        with its, self._forking:
            try:
                self._connection.send(("fork",))
                send_handle(self._connection, its.fileno(), 0)
            except OSError as e:
                raise ProcessEnded from e
        return Process(ours, parent=self)

    def ask(self, *question: Any) -> None:
        """A method's name and its arguments. Raises ProcessEnded."""
        try:
            self._connection.send(question)
        except OSError as e:
            raise ProcessEnded from e

    def answer(self, seconds: float) -> tuple[Any, str] | None:
        """What the method gave, or why it gave nothing; None after so many seconds. Raises ProcessEnded."""
        try:
            while self._connection.poll(seconds):
                message = self._connection.recv()
                if self._id:
                    return message  # type: ignore[no-any-return]  # as the program's `answer` gives it
                self._id.append(message)
        except (EOFError, OSError) as e:
            raise ProcessEnded from e
        return None

    @property
    def alive(self) -> bool:
        """Of a process that owes no answer."""
        try:
            return self.answer(0) is None
        except ProcessEnded:
            return False

    def end(self) -> None:
        """Kill it; of the first process, all forks with it."""
        self._ending()


def _close(connection: Connection, program: subprocess.Popen[bytes]) -> None:
    """The first process ends itself and all forks when nobody can ask it any more."""
    connection.close()
    program.wait(_LAST_SECONDS)


def _kill(connection: Connection, known: list[int]) -> None:
    """Kill a fork, unless it has ended: another process might have its id by now."""
    with suppress(EOFError, OSError):
        while connection.poll(0 if known else 1):
            message = connection.recv()
            known[:] = known or [message]
        if known:
            os.kill(known[0], signal.SIGKILL)
    connection.close()
