"""The thread that writes the disk tier's files while the engine runs."""

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
"""How long to write nothing after a failed write: a full disk rarely has space again at once."""
_NICE = 10
"""By how much to lower the thread's priority, on systems where threads have priorities of their own."""


@dataclass(frozen=True)
class Job:
    """The files of a text that are to be written, and those that were used."""

    here: Sequence[Entry] = ()
    """Files that exist already."""
    missing: Sequence[tuple[Entry, Content]] = ()
    nbytes: int = 0
    """Bytes that the contents keep in memory."""


class Writer:
    """Carries out jobs from the engine's thread, one at a time."""

    def __init__(self, database: Database):
        self.database = database
        self.bytes_written = 0
        self.waiting_bytes = 0
        """Bytes that unfinished jobs keep in memory."""
        self._waiting: set[str] = set()
        """Paths of files that are still to be written."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._thread.start()

    def is_waiting(self, entry: Entry) -> bool:
        """Return whether a file is waiting to be written."""
        return entry.path in self._waiting

    def submit(self, job: Job) -> None:
        with self._lock:
            self._waiting |= {entry.path for entry, _ in job.missing}
            self.waiting_bytes += job.nbytes
        self._jobs.put(job)

    def close(self, seconds: float) -> bool:
        """Wait at most `seconds` for the jobs to finish and the database to close; return whether they did."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # on Linux, a thread has its own priority
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
        self.database.touch(job.here, now)  # first, so that these files stay if space runs out
        for entry, content in job.missing:
            self.bytes_written += self.database.write(entry, content.encode(), now)
