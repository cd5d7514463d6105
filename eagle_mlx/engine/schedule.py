"""The schedule: chooses the engine's next work, and dispatches, collects, cancels and times rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import ParamSpec, TypeVar

from eagle_mlx.engine.admission import Admission
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.groups import Groups
from eagle_mlx.engine.prefill import Prefill
from eagle_mlx.engine.round import Round
from eagle_mlx.plan import PLAIN, Plan, RoundResult
from eagle_mlx.request_state import RequestState

P = ParamSpec("P")
T = TypeVar("T")
_MEASURED = 32
"""One of this many drafting rounds waits for its draft, to measure the time of drafting."""


class Schedule:
    """Chooses between a chunk of prompts and a round of a group, and keeps the device busy.

    A plain round may be dispatched before the previous round is collected. Rounds are collected in order of dispatch.

    A round's seconds start at the end of the previous work, so they include the host's work between rounds.
    """

    def __init__(self, admission: Admission, groups: Groups, plan: Callable[[Batch, int], Plan], drafts: bool):
        """`plan`: returns a batch's next plan, given its group number. `drafts`: whether there is a proposer."""
        self.admission, self.groups, self.plan, self.drafts = admission, groups, plan, drafts
        self.clock: Callable[[], float] = perf_counter
        """The clock that times rounds, in seconds."""
        self.pauses = self.draft_failures = 0
        """How often requests were paused, and how often the proposer raised when it drafted."""
        self.in_step = False
        """Whether a step is under way. Requests that end then leave at its end."""
        self._rounds: deque[Round] = deque()
        """Dispatched rounds that are not collected yet, oldest first."""
        self._last_plain = False
        """Whether the last collected round was plain."""
        self._drafting = 0
        """The number of drafting rounds so far."""
        self._draft_share = 0.0
        """The fraction of a round spent on drafting, as last measured."""
        self._lap_began = 0.0

    @property
    def idle(self) -> bool:
        return not self.groups.batches and self.admission.idle

    def touch(self, requests: Iterable[RequestState], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do some work. If it raises, these requests end with an error, and so do those that it took from the queue."""
        touched = list(requests)
        try:
            return work(*args, **kwargs)
        except BaseException as e:  # a KeyboardInterrupt leaves work incomplete too
            self.fail([*touched, *self.admission.entering], f"the engine failed: {type(e).__name__}: {e}")
            raise

    def next(self, max_batch: int) -> Prefill | Round | None:
        """Return the prompts to read a chunk of, or the round to collect next; None if nothing can be done now."""
        return self._next_prefill(max_batch) or self.next_round()

    def next_round(self) -> Round | None:
        """Return the round to collect next; None if no group decodes."""
        self.arrange()
        if self._rounds:
            return self._rounds[0]
        batch = next(iter(self.groups.in_turn()), None)
        return self.touch(batch.requests, self._planned, batch) if batch is not None else None

    def _next_prefill(self, max_batch: int) -> Prefill | None:
        """Pause requests if needed, and return the prefill to read next. While a round is in progress, do nothing."""
        if self._rounds:
            return None
        for batch in self.groups.batches:
            if batch.lost_state:
                self.touch(batch.requests, self._read_again, batch)
        if yielding := self.admission.yielding(self._places(max_batch), self.groups.decoding):
            batches = [batch for batch in self.groups.batches if not set(yielding).isdisjoint(batch.requests)]
            self.touch([*yielding, *_rows(batches)], self._pause, yielding, batches)
        return self.touch([], self.admission.due, self._places(max_batch), decoding=bool(self.groups.batches))

    def _read_again(self, batch: Batch) -> None:
        """Give the rows of a batch new states of the proposer, which raised. Their texts are read again for that."""
        self.draft_failures += 1
        self.release(batch)
        self._remember(batch, every=True)
        self.groups.drop(batch)
        self.admission.read_again(batch.requests)

    def _pause(self, requests: Sequence[RequestState], batches: Sequence[Batch]) -> None:
        self.pauses += len(requests)
        self.admission.pause(requests)
        for batch in batches:
            self.release(batch)

    def _places(self, max_batch: int) -> int:
        return max_batch - len(self.groups.requests)

    def _planned(self, batch: Batch) -> Round:
        group = self.groups.number(batch)
        return Round(batch, self.plan(batch, group), group)

    def read(self, prefill: Prefill) -> float:
        """Read a chunk of prompts. Return its seconds."""
        self.lap()
        self.touch(prefill.batch.requests, self.admission.read, prefill)
        return self.lap()

    def join(self, prefill: Prefill) -> None:
        """Move the rows of a prefill into their groups."""
        self.touch(prefill.batch.requests, self._join, prefill)

    def _join(self, prefill: Prefill) -> None:
        batch = prefill.batch
        self._remember(batch)
        batch.release()
        if batch.requests:
            if not self.groups.batches:
                self._last_plain = False
            if batch.state is not None and not batch.state.movable:
                self.groups.budget.groups = 1
            self.arrange(batch)
        self.admission.joined(prefill)

    def arrange(self, joining: Batch | None = None) -> None:
        """Move rows to the groups where they belong, unless a round is in progress."""
        moves = None if self._rounds else self.groups.moves(self.admission.prefilling, joining)
        if moves is not None:
            touched = [*self.groups.touched(moves, joining), *([joining] if joining is not None else [])]
            self.touch(_rows(touched), self.groups.arrange, moves, joining)

    def dispatch(self, planned: Round, max_batch: int, measured: bool = False) -> None:
        """Dispatch a round, and a certain plain one after it. `measured`: whether to time some rounds' drafts."""
        if planned not in self._rounds:
            self.touch(planned.batch.requests, self._dispatch, planned, measured)
        if (ahead := self._next_ahead(planned, max_batch)) is not None:
            self.touch(ahead.batch.requests, self._dispatch, ahead)

    def _dispatch(self, planned: Round, measured: bool = False) -> None:
        self._drafting += planned.plan.depth > 0
        began = self.clock()
        planned.dispatch(measured and planned.plan.depth > 0 and self._drafting % _MEASURED == 1)
        planned.ahead = self.clock() - began if self._rounds else 0.0
        self._rounds.append(planned)

    def _next_ahead(self, planned: Round, max_batch: int) -> Round | None:
        """Return the plain round that can be dispatched during a plain one, or None.

        A single plain round between drafts measures time, so nothing is dispatched during it.
        """
        batch = self.groups.following(planned.batch)
        steady = [each.plan for each in self._rounds] == [PLAIN] and (self._last_plain or not self.drafts)
        if not steady or not batch.may_run_ahead:
            return None
        if self.admission.wants_in(self._places(max_batch), self.groups.decoding):
            return None
        if self.groups.moves(self.admission.prefilling) is not None:
            return None
        ahead = self.touch(batch.requests, self._planned, batch)
        return ahead if ahead.plan == PLAIN else None

    def collect(self) -> RoundResult:
        """Wait for the oldest dispatched round and give its requests their tokens."""
        return self.touch(self._rounds[0].batch.requests, self._collect)

    def _collect(self) -> RoundResult:
        done = self._rounds.popleft()
        result = done.collect()
        self._last_plain = done.plan == PLAIN
        # On a CPU, dispatch blocks, so its time belongs to the dispatched round.
        seconds = self.lap() + done.ahead - sum(each.ahead for each in self._rounds)
        if done.draft_seconds is not None:
            self._draft_share = done.draft_seconds / seconds
        self.groups.serve(done.batch)
        return replace(result, seconds=seconds, draft_seconds=self._draft_share * seconds if result.plan.depth else 0.0)

    def lap(self) -> float:
        """Return the seconds since the last call."""
        before, self._lap_began = self._lap_began, self.clock()
        return self._lap_began - before

    def release(self, batch: Batch) -> None:
        """Remove requests that ended or are paused, unless others need a round that is already dispatched."""
        if any(request.leaves for request in batch.requests):
            self.touch(batch.requests, self._release, batch)

    def _release(self, batch: Batch) -> None:
        if any(each.batch is batch for each in self._rounds):
            recurrent = self.admission.prefixes is not None and batch.cache.recurrent
            if not recurrent and not all(request.leaves for request in batch.requests):
                return
            self._cancel(batch)  # no request needs it, or it would advance a state past the text to cache
        self._remember(batch)
        batch.release()
        if not batch.requests:
            self.groups.drop(batch)

    def _cancel(self, batch: Batch) -> None:
        for each in reversed(self._rounds):
            if each.batch is batch:
                each.cancel()
        self._rounds = deque(each for each in self._rounds if each.batch is not batch)

    def _remember(self, batch: Batch, every: bool = False) -> None:
        """Put the state of requests that are about to leave, or of every request, into the prefix cache."""
        if (prefixes := self.admission.prefixes) is None:
            return
        for index, request in enumerate(batch.requests):
            for past in batch.pasts(index) if every or request.leaves else ():
                prefixes.keep(request.text, past)

    def withdraw(self, request: RequestState) -> None:
        """Remove a request that has ended; during a step, only at its end."""
        self.admission.remove_ended()
        batch = self.groups.holding(request)
        if batch is not None and not self.in_step:
            self.touch(batch.requests, self._withdraw, batch)

    def _withdraw(self, batch: Batch) -> None:
        self._cancel(batch)
        self.release(batch)

    def abandon(self, reason: str) -> None:
        """End all requests with an error."""
        self.fail([*self.admission.waiting, *self.admission.prefilling, *self.groups.requests], reason)

    def fail(self, requests: Iterable[RequestState], reason: str) -> None:
        """End requests with an error, and drop the batches of which all requests have ended."""
        for request in requests:
            request.fail(reason)
        self.admission.entering = []
        self.admission.remove_ended()
        for batch in self.groups.batches:
            if all(request.finish_reason for request in batch.requests):
                self.groups.drop(batch)
        rounds = deque(each for each in self._rounds if each.batch in self.groups.batches)
        if len(rounds) < len(self._rounds):
            self._last_plain = False
        self._rounds = rounds


def _rows(batches: Iterable[Batch]) -> list[RequestState]:
    return [request for batch in batches for request in batch.requests]
