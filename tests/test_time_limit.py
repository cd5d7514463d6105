"""A test that hangs is ended, and the others run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
WAITING = """
import threading

import pytest


@pytest.fixture
def ended():
    event = threading.Event()
    yield event
    event.wait()


@pytest.mark.timeout(0.5)
def test_it_waits(ended):
    ended.wait()


def test_it_runs():
    pass
"""


def test_a_test_that_waits_for_good_is_ended_and_named(tmp_path: Path) -> None:
    """With the project's own settings. Here the cleanup hangs too, as it does for a thread that never ends."""
    waiting = tmp_path / "test_waiting.py"
    waiting.write_text(WAITING)
    plugins = ["-p", "xdist", "-p", "pytest_timeout"]
    sooner = ["-o", "faulthandler_timeout=0.2"]
    command = [sys.executable, "-m", "pytest", "-c", str(PROJECT), *plugins, *sooner, "-n", "1", str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "crashed while running" in done.stdout
    assert "test_it_waits" in done.stdout
    assert f'{waiting}", line 16 in test_it_waits' in done.stderr, "where it waited"
