"""The engine's work, and the runner that does it and owns the rounds in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from eagle_mlx.engine.admission import Admission, Admit, Fetch, Read
from eagle_mlx.engine.batch import Batch, Round
from eagle_mlx.engine.groups import Groups
from eagle_mlx.errors import TargetError
from eagle_mlx.plan import PLAIN, Plan, RoundResult
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import Drafter

_MEASURED = 32  # one of this many drafting rounds waits for its draft, to measure the time of drafting


@dataclass(frozen=True)
class Pause:
    """Rows return to the queue, and all that ended or are paused leave these batches."""

    rows: Sequence[RequestState]
    batches: Sequence[Batch]

    @property
    def touches(self) -> list[RequestState]:
        return [*self.rows, *(request for batch in self.batches for request in batch.requests)]


@dataclass(frozen=True)
class Move:
    """Rows move to other groups, and those of a batch that has been read join."""

    places: Mapping[RequestState, int]
    batches: Sequence[Batch]
    joining: Batch | None

    @property
    def touches(self) -> list[RequestState]:
        joining = self.joining.requests if self.joining is not None else []
        return [*joining, *(request for batch in self.batches for request in batch.requests)]


@dataclass(frozen=True)
class Decode:
    """Dispatch a round."""

    batch: Batch
    plan: Plan
    depth: int | None  # the depth of the policy's plan before it was cut; None if the policy was not asked
    drafter: Drafter | None  # see `Engine.drafter`

    @property
    def touches(self) -> list[RequestState]:
        return list(self.batch.requests)


@dataclass(frozen=True)
class Collect:
    """Wait for the oldest round in flight."""

    round: Round

    @property
    def touches(self) -> list[RequestState]:
        return list(self.round.batch.requests)


Work = Pause | Fetch | Admit | Read | Move | Decode | Collect
"""The next thing that the engine does. `touches` are the requests that end with an error if it fails."""


class Runner:
    """Does the engine's work, and owns the rounds in flight. A plain round may be dispatched before the previous round
    is collected. Rounds are collected in order of dispatch."""

    def __init__(self, admission: Admission, groups: Groups, exact: bool, clock: Callable[[], float]):
        """`exact`: see `Engine`. `clock`: times rounds, in seconds."""
        self.admission, self.groups = admission, groups
        self.exact, self.clock = exact, clock
        self.rounds: dict[Round, float] = {}
        """Rounds in flight, oldest first. The value is the seconds of its dispatch during another round."""
        self.last_plain = False  # whether the last collected round was plain
        self.pauses = self.draft_failures = 0
        self.depth = 0  # of the policy's latest plan, before it was cut to what the requests can use
        self._drafting = 0  # drafting rounds so far
        self._draft_share = 0.0  # the fraction of a round spent on drafting, as last measured
        self._lap_began = 0.0

    def do(self, work: Work, measured: bool = False) -> RoundResult | None:
        """Do some work. Return the result of a round that was collected. `measured`: time the drafts of some rounds."""
        if isinstance(work, Collect):
            return self._collect()
        if isinstance(work, Decode):
            self._dispatch(work, measured)
        elif isinstance(work, Pause):
            self._pause(work)
        elif isinstance(work, Fetch):
            self.admission.fetch(work)
        elif isinstance(work, Admit):
            self.groups.change()
            self.admission.open(work)
        elif isinstance(work, Read):
            self._read(work)
        else:
            self._move(work)
        return None

    def _pause(self, work: Pause) -> None:
        self.groups.change()
        if work.rows and any(batch.lost_state for batch in work.batches):  # the texts are read again for the proposer
            self.draft_failures += 1
        else:
            self.pauses += len(work.rows)
        self.admission.pause(work.rows)
        for batch in work.batches:
            self._release(batch)

    def _read(self, work: Read) -> None:
        batch = work.prefill.batch
        self.admission.read(work, self._lap)
        if not work.prefill.left:
            self._release(batch)
            if not batch.requests:
                self.admission.joined(batch)

    def _move(self, work: Move) -> None:
        if not self.groups.batches:
            self.last_plain = False
        self.groups.arrange(work.places, work.joining)
        if work.joining is not None:
            self.admission.joined(work.joining)

    def _dispatch(self, work: Decode, measured: bool) -> None:
        self.groups.begin_round()
        self.depth = self.depth if work.depth is None else work.depth
        drafts = work.plan.size > 0
        self._drafting += drafts
        measured = measured and drafts and self._drafting % _MEASURED == 1
        began = self.clock()
        dispatched = work.batch.dispatch(work.plan, work.drafter, self.exact, measured)
        self.rounds[dispatched] = self.clock() - began if self.rounds else 0.0

    def _collect(self) -> RoundResult:
        done, ahead = next(iter(self.rounds.items()))
        del self.rounds[done]
        result = done.collect()
        self.last_plain = done.plan == PLAIN
        # On a CPU, dispatch blocks, so its time belongs to the dispatched round.
        seconds = self._lap() + ahead - sum(self.rounds.values())
        if done.draft_seconds is not None:
            self._draft_share = done.draft_seconds / seconds
        drafting = self._draft_share * seconds if result.plan.size else 0.0
        return replace(result, seconds=seconds, draft_seconds=drafting, group=self.groups.end_round(done.batch))

    def _lap(self) -> float:
        before, self._lap_began = self._lap_began, self.clock()
        return self._lap_began - before

    def _release(self, batch: Batch) -> None:
        """Remove the rows of a batch that ended or are paused. Its rounds in flight are canceled."""
        for other in reversed(self.rounds):
            if other.batch is batch:
                other.cancel()
        self.rounds = {other: ahead for other, ahead in self.rounds.items() if other.batch is not batch}
        self._remember(batch)
        batch.release()
        if not batch.requests:
            self.groups.drop(batch)

    def _remember(self, batch: Batch) -> None:
        """Put the state of requests that are about to leave into the prefix cache.

        The texts of those that ended go to the collector, and into the proposer's memory, unless they refuse.
        """
        collector, prefixes = self.admission.collector, self.admission.prefixes
        memory = batch.proposer.memory if batch.proposer is not None else None
        for index, request in enumerate(batch.requests):
            if collector is not None and request.finish_reason:
                collector.ended(request)
            if memory is not None and request.finish_reason and not request.error and request.params.memory:
                memory.add(request.text, request.request.namespace)
            if prefixes is not None and request.leaves:
                for past in batch.pasts(index):
                    prefixes.keep(request.text, past)

    def fail(self, requests: Iterable[RequestState], reason: str | BaseException) -> None:
        """End requests with an error, and drop the batches of which all requests have ended."""
        if isinstance(reason, BaseException):
            names_files = isinstance(reason, TargetError | OSError)  # clients of a server should not see these
            reason = f"the engine failed: {type(reason).__name__}" + ("" if names_files else f": {reason}")
        for request in requests:
            request.fail(reason)
        self.admission.remove_ended()
        self.groups.change()
        for batch in self.groups.batches:
            if all(request.finish_reason for request in batch.requests):
                self.groups.drop(batch)
        before = self.rounds
        self.rounds = {other: ahead for other, ahead in before.items() if other.batch in self.groups.batches}
        self.last_plain = self.last_plain and len(self.rounds) == len(before)
