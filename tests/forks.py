"""Python processes that start in milliseconds: forks of a process that has imported what most of them need.

A new process takes two seconds to import mlx-lm, transformers and the project; the first one here does so once.
Tests of how commands start use `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from subprocess import TimeoutExpired
from traceback import print_exc
from typing import IO, Any

ROOT = Path(__file__).parents[1]
SHARED = ("tests.fakes", "eagle_mlx.data_pipelines", "eagle_mlx.serve.api.server", "matplotlib.pyplot")
"""What the first process imports. Importing them starts no thread, which forks would lack."""
_ENVIRONMENT = dict(os.environ)
_DIGITS = 10
"""Length of a message about a fork: its id, then its exit code."""


class Fork:
    """A fork that runs a module, with the methods of `subprocess.Popen` that tests use. Its output goes to files."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        core: int | None = None,
        merged: bool = False,
    ):
        """module: or "-c", followed by code. core: the only one to run on. merged: errors are part of the output."""
        request, self._out, self._errors = (tempfile.TemporaryFile("a+") for _ in range(3))  # noqa: SIM115
        where = {"cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env), "core": core}
        json.dump({"command": [module, *arguments], **where}, request)
        request.seek(0)
        self._status, its = socket.socketpair()
        errors = self._out if merged else self._errors
        with its, request:
            socket.send_fds(_first(), [b"."], [file.fileno() for file in (request, self._out, errors, its)])
        self.pid = int(self._status.recv(_DIGITS, socket.MSG_WAITALL))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(_DIGITS))
            except (TimeoutError, BlockingIOError) as e:
                raise TimeoutExpired(str(self.pid), timeout or 0) from e
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return _text(self._out), _text(self._errors)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@cache
def _first() -> socket.socket:
    """Start the process that forks, with the environment of no test. It ends once this one has."""
    ours, its = socket.socketpair()
    with its:
        command = [sys.executable, "-m", __name__, str(its.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, env=_ENVIRONMENT, pass_fds=[its.fileno()])
    atexit.register(_end, ours, process)
    return ours


def _end(channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    process.wait(20)


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each message. Return the message in the fork, and None at the end of messages."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forks = list[int]()
    while True:
        message, files, *_ = socket.recv_fds(channel, 1, 4)
        if not message:
            return None
        if (pid := os.fork()) == 0:
            channel.close()
            _stay_in_fork(*files[1:])
            with os.fdopen(files[0]) as request:
                return dict(json.load(request))
        forks = [*(fork for fork in forks if os.waitpid(fork, os.WNOHANG) == (0, 0)), pid]
        for file in files:
            os.close(file)


def _stay_in_fork(out: int, errors: int, status: int) -> None:
    """Return in another fork, with this output. Here, report its id and how it ends."""
    if pid := os.fork():
        try:
            os.write(status, f"{pid:{_DIGITS}}".encode())
            os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):{_DIGITS}}".encode())
        finally:
            os._exit(0)
    os.close(status)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out, errors)):
        os.dup2(file, number)


def _run(command: list[str], cwd: str, env: dict[str, str], core: int | None) -> int:
    """Run a command as Python does with these arguments. Return its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    module, sys.argv = command[0], list(command)
    try:
        if module == "-c":
            del sys.argv[1]
            exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
            return 1
        return e.code or 0
    except BaseException:
        print_exc()
        return 1
    return 0


def _leave() -> None:
    """End at once: clearing all modules copies their memory, which takes longer than most of these commands."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_codes.pop())


if __name__ == "__main__":
    _codes = [0]
    atexit.register(_leave)  # first, so it comes last: after threads and other handlers
    sys.modules["wandb"] = None  # type: ignore[assignment]  # mlx-lm imports it if it can: a fifth of the start
    if sys.platform == "linux":  # elsewhere, forks of a process with MLX may fail
        for name in SHARED:
            import_module(name)
    if (what := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _codes.append(_run(**what))
