"""Rounds on their way: dispatched, at most one of them ahead of what is collected, cancelled, and timed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.round import Round
from eagle_mlx.plan import PLAIN, Plan, RoundResult

_MEASURED = 32
"""Of so many drafting rounds one waits for its draft, so that it is known what drafting takes."""


@dataclass(frozen=True)
class _Flight:
    """A round under way."""

    batch: Batch
    round: Round
    ahead: float
    """Seconds that its dispatch took while another round was under way: this one's, and not that one's."""


class Pipeline:
    """Keeps the device at work while the host reads what it has done, and takes the time.

    A round's seconds run from the end of what came before it. So what the host does between rounds is part of them,
    whether the device waits for it or has been given the next round already. Rounds of two groups are collected in the
    order in which they were dispatched, which is that of the device.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = perf_counter
        """Seconds by which rounds are timed."""
        self._flights: deque[_Flight] = deque()
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
        return bool(self._flights)

    @property
    def batch(self) -> Batch | None:
        """Whose round is to be collected next."""
        return self._flights[0].batch if self._flights else None

    @property
    def is_plain(self) -> bool:
        """Whether a plain round is under way, and nothing ahead of it."""
        return [each.round.plan for each in self._flights] == [PLAIN]

    @property
    def is_steady(self) -> bool:
        """Whether a plain round follows on another: one alone behind a draft is a look at what plain rounds take."""
        return self.is_plain and self._last_plain

    def works_on(self, batch: Batch) -> bool:
        return any(each.batch is batch for each in self._flights)

    def dispatch(self, batch: Batch, plan: Plan, measured: bool = False) -> None:
        """Start a round on the device. `measured`: whether somebody asks now and then what drafting takes."""
        self._drafting += plan.depth > 0
        waits = measured and plan.depth > 0 and self._drafting % _MEASURED == 1
        began = self.clock()
        dispatched = batch.dispatch(plan, waits)
        self._flights.append(_Flight(batch, dispatched, self.clock() - began if self._flights else 0.0))

    def collect(self) -> RoundResult:
        """Wait for the oldest round under way and give its requests their tokens."""
        flight = self._flights.popleft()
        collected = flight.round
        result = flight.batch.collect(collected)
        self._last_plain = collected.plan == PLAIN
        # A dispatch that waits for the device, as on a CPU, takes the time of the round that is dispatched.
        seconds = self.lap() + flight.ahead - sum(each.ahead for each in self._flights)
        if collected.draft_seconds is not None:
            self._draft_share = collected.draft_seconds / seconds
        drafting = self._draft_share * seconds if result.plan.depth else 0.0
        return replace(result, seconds=seconds, draft_seconds=drafting)

    def cancel(self, batch: Batch) -> None:
        """Undo what was dispatched for other requests than there are now, the newest first."""
        for flight in reversed(self._flights):
            if flight.batch is batch:
                batch.cancel(flight.round)
        self._forget(batch)

    def forget(self, batch: Batch) -> None:
        """Let go what was dispatched for a batch that is given up."""
        self._forget(batch)
        self._last_plain = False

    def _forget(self, batch: Batch) -> None:
        self._flights = deque(each for each in self._flights if each.batch is not batch)

    def reset(self) -> None:
        """What comes next follows on nothing."""
        self._last_plain = False

    def lap(self) -> float:
        """Seconds since this was last asked."""
        before, self._lap_began = self._lap_began, self.clock()
        return self._lap_began - before
