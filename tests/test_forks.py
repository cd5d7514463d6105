"""Forks run, report and end like processes of their own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from tests.forks import Fork

SAYS = """
import atexit, os, sys
from threading import Thread
atexit.register(print, "at the end")
Thread(target=lambda: print(sys.argv, os.getcwd(), os.environ["A"])).start()
print("no", file=sys.stderr)
sys.exit({})
"""


@pytest.mark.parametrize(("end", "code", "reason"), [("", 0, "no\n"), ("3", 3, "no\n"), ("'why'", 1, "no\nwhy\n")])
def test_output_folder_environment_and_exit_code(end: str, code: int, reason: str, tmp_path: Path) -> None:
    fork = Fork("-c", SAYS.format(end), "x", cwd=tmp_path, env={**os.environ, "A": "b"})
    assert fork.communicate(60) == (f"['-c', 'x'] {tmp_path} b\nat the end\n", reason)
    assert fork.returncode == fork.poll() == code


def test_errors_are_part_of_the_output_if_asked() -> None:
    out, errors = Fork("-c", "1 / 0", merged=True).communicate(60)
    assert "ZeroDivisionError" in out
    assert errors == ""


def test_a_killed_fork_ends_with_the_signal() -> None:
    fork = Fork("-c", "import time; time.sleep(60)")
    assert fork.poll() is None
    with pytest.raises(TimeoutExpired):
        fork.wait(0.01)
    fork.send_signal(signal.SIGTERM)
    assert fork.wait(60) == -signal.SIGTERM
    fork.kill()  # it has ended


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, forks import what they need")
def test_forks_begin_with_one_thread_and_most_imports() -> None:
    code = "import os, sys; print(len(os.listdir('/proc/self/task')), 'transformers' in sys.modules)"
    assert Fork("-c", code).communicate(60)[0] == "1 True\n"
