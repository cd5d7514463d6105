"""The thread that writes the disk tier's files while the engine runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

from eagle_mlx.engine.disk.database import Database, Entry
from eagle_mlx.engine.disk.snapshot_file import Content

log = logging.getLogger("eagle_mlx.prefixes")
_PAUSE_SECONDS = 60.0
"""How long to write nothing after a failed write: a full disk rarely has space again at once."""
_Job = tuple[Sequence[Entry], Sequence[tuple[Entry, Content]], int]


class Writer:
    """Writes texts in the order in which the engine's thread submits them."""

    def __init__(self, database: Database):
        self.database = database
        self.bytes_written = 0
        self.waiting_bytes = 0
        """Bytes that unwritten texts keep in memory."""
        self.waiting: set[str] = set()
        """Paths of files that are still to be written."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._thread.start()

    def submit(self, used: Sequence[Entry], missing: Sequence[tuple[Entry, Content]] = ()) -> None:
        """Mark files as used, and write the missing ones."""
        nbytes = sum(content.nbytes for _, content in missing)
        with self._lock:
            self.waiting |= {entry.path for entry, _ in missing}
            self.waiting_bytes += nbytes
        self._jobs.put((used, missing, nbytes))

    def close(self, seconds: float) -> bool:
        """Wait at most `seconds` for all writes and for the database to close; return whether they finished."""
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        paused_until = 0.0
        while (job := self._jobs.get()) is not None:
            used, missing, nbytes = job
            try:
                if time.monotonic() >= paused_until:
                    self._write(used, missing)
            except OSError as e:
                paused_until = time.monotonic() + _PAUSE_SECONDS
                self.database.report(e)
            except Exception:
                log.exception("the prefix cache could not write a text")
            finally:
                with self._lock:
                    self.waiting -= {entry.path for entry, _ in missing}
                    self.waiting_bytes -= nbytes
                del job, missing  # while we wait for the next job, its memory is free
        self.database.close()

    def _write(self, used: Sequence[Entry], missing: Sequence[tuple[Entry, Content]]) -> None:
        now = time.time_ns()
        self.database.touch(used, now)  # first, so that these files stay if space runs out
        for entry, content in missing:
            self.bytes_written += self.database.write(entry, content.encode(), now)
