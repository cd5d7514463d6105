"""The thread that writes the disk tier's files behind the answers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from eagle_mlx.engine.disk.file import Tensor
from eagle_mlx.engine.disk.index import Entry
from eagle_mlx.engine.disk.pieces import HostPiece
from eagle_mlx.engine.disk.room import Room
from eagle_mlx.engine.disk.store import Store

log = logging.getLogger("eagle_mlx.prefixes")
_PAUSE_SECONDS = 60.0
"""So long nothing is written after a write that failed: a full disk rarely has room again at once."""
_NICE = 10
"""How far the thread stands back behind those that compute, where the system can tell threads apart."""


@dataclass(frozen=True)
class Place:
    """What is kept of one place beside blocks."""

    about: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """What is to be written of a text."""

    missing: Sequence[Entry]
    """In the order of their positions; a place comes last."""
    here: Sequence[str]
    """Names of the others."""
    pieces: Sequence[HostPiece] = ()
    """They hold the positions of the missing blocks."""
    place: Place | None = None
    nbytes: int = 0
    """That the pieces keep in memory."""


class Writer:
    """Takes jobs from the engine's thread, and does them one after the other."""

    def __init__(self, store: Store, room: Room, say: Callable[[str], None], said: bool = False):
        """`said`: it has been said already that nothing can be written."""
        self.store, self.room, self._say = store, room, say
        self.bytes_written = 0
        self.waiting_bytes = 0
        """That jobs keep in memory which are not done."""
        self._waiting: set[str] = set()
        """Names of files that are still to be written."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._said = said
        self._paused_until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._thread.start()

    def is_waiting(self, entry: Entry) -> bool:
        """Whether a file is going to be written already."""
        return entry.name in self._waiting

    def submit(self, job: Job) -> None:
        with self._lock:
            self._waiting |= {entry.name for entry in job.missing}
            self.waiting_bytes += job.nbytes
        self._jobs.put(job)

    def close(self, seconds: float) -> bool:
        """Finish what waits, for so long at most; whether that was enough."""
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
                if not self._said:
                    self._said = True
                    self._say(
                        f"the prefix cache cannot write to {self.store.folder} ({e.strerror or e}); the server goes on "
                        "without, and tries again every minute: free some space, or name another --prefix-cache-dir"
                    )
            except Exception:
                log.exception("the prefix cache could not write a text")
            finally:
                with self._lock:
                    self._waiting -= {entry.name for entry in job.missing}
                    self.waiting_bytes -= job.nbytes
                del job

    def _do(self, job: Job) -> None:
        names = [*job.here, *(entry.name for entry in job.missing)]
        self.store.touch(job.here, time.time_ns())  # before others go, so that these stay
        self.store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in job.missing:
            if entry.kind == "block":
                piece = HostPiece.cut(job.pieces, entry.start, entry.end)
                self._write(entry, Place(piece.about, piece.tensors))
            elif job.place is not None:
                self._write(entry, job.place)
        self.store.touch(names, time.time_ns())

    def _write(self, entry: Entry, content: Place) -> None:
        nbytes = self.store.size(entry, content.about, content.tensors)
        if nbytes > self.room.limit:
            return
        with self.room.writing(nbytes, self.store.folder / entry.name) as gone:
            self.store.forget(path.name for path in gone if path.parent == self.store.folder)
            self.bytes_written += self.store.write(entry, content.about, content.tensors)
