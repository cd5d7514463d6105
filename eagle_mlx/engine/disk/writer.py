"""The thread that writes the disk tier's files, while the engine goes on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from eagle_mlx.engine.disk.database import Database, Entry
from eagle_mlx.engine.disk.snapshot_file import Content

log = logging.getLogger("eagle_mlx.prefixes")
_PAUSE_SECONDS = 60.0
"""So long nothing is written after a write that failed: a full disk rarely has room again at once."""
_NICE = 10
"""By how much the thread's priority is lower than its process's, if the system has priorities of threads."""


@dataclass(frozen=True)
class Job:
    """What is to be written of a text, and which of its files were of use."""

    here: Sequence[Entry] = ()
    """Files that are there."""
    missing: Sequence[tuple[Entry, Content]] = ()
    nbytes: int = 0
    """That the contents keep in memory."""


class Writer:
    """Takes jobs from the engine's thread, and does them one after the other."""

    def __init__(self, database: Database):
        self.database = database
        self.bytes_written = 0
        self.waiting_bytes = 0
        """What the jobs keep in memory that are not done."""
        self._waiting: set[str] = set()
        """Paths of files that are still to be written."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._thread.start()

    def is_waiting(self, entry: Entry) -> bool:
        """Whether a file is going to be written already."""
        return entry.path in self._waiting

    def submit(self, job: Job) -> None:
        with self._lock:
            self._waiting |= {entry.path for entry, _ in job.missing}
            self.waiting_bytes += job.nbytes
        self._jobs.put(job)

    def close(self, seconds: float) -> bool:
        """Finish what waits, for so long at most; whether that was enough. Then close the database."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # on Linux a thread has a priority of its own
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICE)
        while (job := self._jobs.get()) is not None:
            try:
                if time.monotonic() >= self._paused_until:
                    self._do(job)
            except OSError as e:
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
                self.database.report(e)
            except Exception:
                log.exception("the prefix cache could not write a text")
            finally:
                with self._lock:
                    self._waiting -= {entry.path for entry, _ in job.missing}
                    self.waiting_bytes -= job.nbytes
                del job
        self.database.close()

    def _do(self, job: Job) -> None:
        now = time.time_ns()
        self.database.touch(job.here, now)  # first, so that these stay when there is no room
        for entry, content in job.missing:
            self.bytes_written += self.database.write(entry, content.encode(), now)
