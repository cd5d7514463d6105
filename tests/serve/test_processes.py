"""Processes that answer questions: nested forks, many forks, Linux's and macOS's ways, and how they die."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from eagle_mlx.serve.processes import Process, ProcessEnded
from tests.full import in_full
from tests.serve.counter import Counter

SECONDS = 20.0
"""Seconds that suffice for an answer on any machine."""


@pytest.fixture
def first(acknowledge: bool) -> Iterator[Process]:
    """Start the first process; all others are its forks."""
    process = Process.start(Counter)
    yield process
    process.end()


def answer(of: Process, *question: Any) -> Any:
    """Ask a question and return the answer. Raises ProcessEnded."""
    of.ask(*question)
    found = of.answer(SECONDS)
    assert found is not None, f"no answer to {question[0]} within {SECONDS:g} s"
    assert not found[1]
    return found[0]


def test_a_fork_starts_with_its_parents_state_and_changes_only_its_own(first: Process) -> None:
    assert answer(first, "add", 1) == 1
    child = first.fork()
    assert answer(child, "add", 10) == 11
    grandchild = child.fork()
    assert answer(grandchild, "add", 100) == 111
    assert answer(first, "add", 1) == 2
    assert answer(child, "add", 10) == 21
    assert len({answer(each, "process") for each in (first, child, grandchild)}) == 3


def test_11_checking_that_a_process_lives_does_not_disturb_its_forks(first: Process) -> None:
    over = Event()

    def look() -> None:
        while not over.is_set():
            assert first.alive

    forks, looking = in_full(100, 30), Thread(target=look, daemon=True)
    looking.start()
    pool = ThreadPoolExecutor(2)
    try:
        asked = [pool.submit(lambda n=n: answer(first.fork(), "add", n)) for n in range(forks)]
        assert [each.result(timeout=SECONDS) for each in asked] == list(range(forks))
    finally:
        over.set()
        first.end()  # also ends a fork that waits for a byte that another process took
        looking.join(SECONDS)
        pool.shutdown(wait=False, cancel_futures=True)


def test_11_a_process_with_an_unread_answer_is_alive(first: Process) -> None:
    first.ask("add", 5)
    deadline = time.monotonic() + SECONDS
    while (found := first.answer(0)) is None and time.monotonic() < deadline:
        assert first.alive
    assert found == (5, "")
    first.ask("add", 5)
    assert all(first.alive for _ in range(100))
    assert first.answer(SECONDS) == (10, "")


def descriptors() -> set[tuple[int, int, int]]:
    """Return this process's open descriptors, each with what it refers to. Other tests' may close meanwhile."""
    gc.collect()
    found = set()
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the one that listed the others
            status = os.fstat(number)
            found.add((number, status.st_dev, status.st_ino))
    return found


def test_11_a_fork_takes_one_descriptor_until_it_ends(first: Process) -> None:
    before = descriptors()
    forks = [first.fork() for _ in range(3)]
    assert [answer(each, "add", 1) for each in forks] == [1, 1, 1]
    assert len(descriptors() - before) == 3
    for each in forks:
        each.end()
    assert descriptors() <= before


def test_11_a_process_that_does_not_fork_in_time_is_killed(first: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    child = first.fork()
    grandchild = child.fork()
    os.kill(child.pid, signal.SIGSTOP)
    monkeypatch.setattr("eagle_mlx.serve.processes.FORK_SECONDS", 0.1)
    with pytest.raises(ProcessEnded):
        child.fork()
    assert not child.alive
    with pytest.raises(ProcessEnded):
        child.fork()
    assert answer(grandchild, "add", 1) == 1
    assert answer(first, "add", 1) == 1


def test_11_a_dead_process_has_no_forks(first: Process) -> None:
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(ProcessEnded):
        first.fork()
    assert not first.alive


def test_a_killed_fork_raises_only_for_its_own_questions(first: Process) -> None:
    one, other = first.fork(), first.fork()
    os.kill(answer(one, "process"), signal.SIGKILL)
    with pytest.raises(ProcessEnded):
        answer(one, "add", 1)
    assert not one.alive
    assert answer(other, "add", 1) == 1
    assert other.alive
    assert first.alive
