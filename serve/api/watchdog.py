"""Watches the steps of a model's engine: one that does not return is logged with the stacks of all threads."""

from __future__ import annotations

import faulthandler
import logging
import tempfile

from .worker import Worker

log = logging.getLogger("eagle_mlx.serve")
_READING = 10
"""How many times as long a step may take if it reads prompts: a chunk of 2,048 tokens takes as long as many rounds."""


class Watchdog:
    """Watches one worker. Belongs to the event loop."""

    def __init__(self, worker: Worker, name: str, seconds: float, exits: bool):
        """seconds: the limit of a step; 0 for none. exits: whether to end the process after it."""
        self._worker, self._name, self._seconds, self._exits = worker, name, seconds, exits
        self.stuck = False
        """Whether the present step has exceeded the limit."""
        self._step: float | None = None
        """When the present step began."""
        self._reads = False

    def check(self) -> None:
        """Report the present step if it exceeds the limit. Call this regularly; each step is reported once."""
        worker, step = self._worker, self._worker.step_began
        if step != self._step:
            if self.stuck:
                log.warning("model %s: the step has returned after all", self._name)
            self._step, self._reads, self.stuck = step, False, False
        loaded = worker.loaded
        if step is None or loaded is None or self.stuck or not self._seconds:
            return
        self._reads |= bool(loaded.engine.admission.prefilling)
        limit = self._seconds * (_READING if self._reads else 1)
        if worker.clock() - step <= limit:
            return
        self.stuck = True
        reason = f"a step of the engine has not returned for {limit:g} s"
        log.error("model %s: %s; the stacks of all threads:\n%s", self._name, reason, _stacks())
        if self._exits:
            worker.end_process(f"{reason}; the server restarts")


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:  # faulthandler needs a real file
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
