"""Rounds on their way: dispatched, at most one of them ahead of what is collected, cancelled, and timed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.round import Round
from eagle_mlx.plan import PLAIN, Plan, RoundResult

_MEASURED = 32
"""Of so many drafting rounds one waits for its draft, so that it is known what drafting takes."""


class Pipeline:
    """Keeps the device at work while the host reads what it has done, and takes the time.

    A round's seconds run from the end of what came before it. So what the host does between rounds is part of them,
    whether the device waits for it or has been given the next round already.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = perf_counter
        """Seconds by which rounds are timed."""
        self._rounds: deque[Round] = deque()
        self._last_plain = False
        """Whether the round that was collected last was plain."""
        self._drafting = 0
        """Drafting rounds so far."""
        self._draft_share = 0.0
        """What drafting takes of a round, as last measured."""
        self._lap_began = 0.0

    @property
    def busy(self) -> bool:
        """Whether a round has been dispatched that is not collected."""
        return bool(self._rounds)

    @property
    def is_plain(self) -> bool:
        """Whether a plain round is under way, and nothing ahead of it."""
        return [each.plan for each in self._rounds] == [PLAIN]

    @property
    def is_steady(self) -> bool:
        """Whether a plain round follows on another.

        Where a dispatch waits for the device, as on a CPU, a round with another dispatched behind it takes the time of
        both, and that one none. In a run of plain rounds this evens out; a single one would be reported as too dear.
        """
        return self.is_plain and self._last_plain

    def dispatch(self, batch: Batch, plan: Plan, measured: bool = False) -> None:
        """Start a round on the device. `measured`: whether somebody asks now and then what drafting takes."""
        self._drafting += plan.depth > 0
        waits = measured and plan.depth > 0 and self._drafting % _MEASURED == 1
        self._rounds.append(batch.dispatch(plan, waits))

    def collect(self, batch: Batch) -> RoundResult:
        """Wait for the oldest round under way and give its requests their tokens."""
        collected = self._rounds.popleft()
        result = batch.collect(collected)
        self._last_plain = collected.plan == PLAIN
        seconds = self.lap()
        if collected.draft_seconds is not None:
            self._draft_share = collected.draft_seconds / seconds
        drafting = self._draft_share * seconds if result.plan.depth else 0.0
        return replace(result, seconds=seconds, draft_seconds=drafting)

    def cancel(self, batch: Batch) -> None:
        """Undo what was dispatched for other requests than there are now."""
        while self._rounds:
            batch.cancel(self._rounds.pop())

    def reset(self) -> None:
        """Forget what was dispatched, with its batch."""
        self._rounds.clear()
        self._last_plain = False

    def lap(self) -> float:
        """Seconds since this was last asked."""
        before, self._lap_began = self._lap_began, self.clock()
        return self._lap_began - before
