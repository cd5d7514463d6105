"""A watchdog of a model's engine: it reports work that does not return, and may end the process."""

from __future__ import annotations

import sys
from threading import enumerate as threads
from traceback import format_stack

from .. import log
from .worker import Worker

_READING = 10
"""Factor of the time of a step that reads prompts: a chunk of 2,048 tokens takes as long as many rounds."""


class Watchdog:
    """Reports work of a worker's thread that does not return. Belongs to the event loop."""

    def __init__(self, worker: Worker, name: str, seconds: float, exits: bool):
        """seconds: the limit of a step, or of work between steps; 0 for none. exits: whether to end the process."""
        self._worker, self._name = worker, name
        self._seconds, self._exits = seconds, exits
        self.stuck = False  # whether the present work has exceeded the limit
        self._work: tuple[float, bool] | None = None
        self._reads = False

    def check(self) -> None:
        """Report the present work if it exceeds the limit. Call this regularly; work is reported once."""
        worker, work = self._worker, self._worker.work
        if work != self._work:
            if self.stuck:
                log.warning("model %s: the step has returned after all", self._name)
            self._work = work
            self._reads = self.stuck = False
        loaded = worker.loaded
        if work is None or loaded is None or self.stuck or not self._seconds:
            return
        began, is_step = work
        self._reads |= is_step and bool(loaded.engine.admission.prefilling)
        limit = self._seconds * (_READING if self._reads else 1)
        if worker.clock() - began <= limit:
            return
        self.stuck = True
        reason = f"{'a step' if is_step else 'work between steps'} of the engine has not returned for {limit:g} s"
        frames = sys._current_frames()
        stacks = [f"{t.name}:\n{''.join(format_stack(frames[t.ident]))}" for t in threads() if t.ident in frames]
        log.error("model %s: %s; the stacks of all threads:\n%s", self._name, reason, "\n".join(stacks))
        if self._exits:
            worker.end_process(f"{reason}; the server restarts")
