"""The schedule: decides what the engine does next, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

from eagle_mlx.engine.admission import Admission, Admit, Fetch, Read
from eagle_mlx.engine.batch import Batch, Round
from eagle_mlx.engine.groups import Groups
from eagle_mlx.engine.runner import Collect, Decode, Move, Pause, Runner, Work
from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import PLAIN, Abilities, Context, Plan
from eagle_mlx.policy import Policy
from eagle_mlx.sampling_params import Drafter


class Schedule:
    """Chooses between pauses, prompts and rounds, and keeps the device busy."""

    def __init__(self, admission: Admission, groups: Groups, runner: Runner, policy: Policy, trees: bool):
        """`trees`: whether the policy may plan trees, if proposer and requests allow them."""
        self.admission, self.groups = admission, groups
        self.runner, self.policy = runner, policy
        self.trees = trees

    def next(self, last: Work | None, max_batch: int, drafter: Drafter | None) -> Work | None:
        """Return the work that follows `last` in a step, which is None at its start; None at its end.

        Asked again, it returns equal work. A step reads at most one chunk of prompts and collects at most one round. If
        the policy raises, the requests that it planned for end with an error. `drafter`: see `Engine`.
        """
        if isinstance(last, Collect):
            return self._leaving()
        if isinstance(last, Pause) and not last.rows:
            return None
        if (oldest := next(iter(self.runner.rounds), None)) is not None:
            return self._ahead(oldest, max_batch, drafter) or Collect(oldest)
        if isinstance(last, Admit):
            return Read(self.admission.prefills[-1], last.positions)
        if not isinstance(last, Read | Move) and (work := self._prompts(last, max_batch)) is not None:
            return work
        if not isinstance(last, Move) and (move := self._move(last)) is not None:
            return move
        return self._decode(self.groups.following(), drafter) if self.groups.batches else None

    def _leaving(self) -> Pause | None:
        leaving = []
        for batch in self.groups.batches:
            leave = [request.leaves for request in batch.requests]
            if any(leave):
                in_flight = any(other.batch is batch for other in self.runner.rounds)
                # A round in flight would advance a recurrent state past the text to cache.
                cached = self.admission.prefixes is not None and batch.cache.recurrent
                if all(leave) or not in_flight or cached:
                    leaving.append(batch)
        return Pause((), leaving) if leaving else None

    def _prompts(self, last: Work | None, max_batch: int) -> Pause | Fetch | Admit | Read | None:
        """Return the requests to pause, so that others can decode or join, or else the prompts to read."""
        admission, batches = self.admission, self.groups.batches
        if (lost := next((batch for batch in batches if batch.lost_state), None)) is not None:
            return Pause([request for request in lost.requests if not request.leaves], [lost])
        if not (admission.waiting.lines or admission.prefills or admission.to_pause or self.groups.outgrown):
            return None
        places = max_batch - len(self.groups.requests)
        if rows := admission.yielding(places, self.groups.decoding):
            return Pause(rows, [batch for batch in batches if not set(rows).isdisjoint(batch.requests)])
        return admission.due(places, decoding=bool(batches), may_fetch=not isinstance(last, Fetch))

    def _move(self, last: Work | None = None) -> Move | None:
        """Return the rows to move between groups, if any. The rows of a prompt that was just read join."""
        read = last.prefill if isinstance(last, Read) and not last.prefill.left else None
        joining = read.batch if read is not None and read.batch.requests else None
        prefilling = self.admission.prefilling if self.admission.prefills else []
        places = self.groups.moves(prefilling, joining)
        return Move(places, self.groups.touched(places, joining), joining) if places is not None else None

    def _ahead(self, oldest: Round, max_batch: int, drafter: Drafter | None) -> Decode | None:
        """Return the plain round to dispatch while only a plain one is in flight, or None. A single plain round between
        drafts measures time, so nothing is dispatched during it."""
        if len(self.runner.rounds) > 1 or oldest.plan != PLAIN:
            return None
        batch = self.groups.following(oldest.batch)
        if not (self.runner.last_plain or self.admission.proposer is None) or not batch.may_run_ahead:
            return None
        if self._prompts(None, max_batch) is not None or self._move() is not None:
            return None
        work = self._decode(batch, drafter)
        return work if work.plan == PLAIN else None

    def _decode(self, batch: Batch, drafter: Drafter | None) -> Decode:
        try:
            return Decode(batch, *self._plan(batch, drafter), drafter)
        except BaseException as e:
            self.runner.fail(batch.requests, e)
            raise

    def _plan(self, batch: Batch, default: Drafter | None) -> tuple[Plan, int | None]:
        """Return the policy's plan, cut to what the requests can use, and its depth before, if the policy was asked."""
        state, drafters = batch.state, batch.drafters(default)
        sources = batch.sources(drafters)
        drafts = batch.proposer is not None and state is not None and any(drafter != "none" for drafter in drafters)
        if not (drafts or sources) or batch.lost_state:
            return PLAIN, None
        # Trees need the target's own draws, and positions without images.
        drawn = batch.processors is None and batch.sampling.rules <= {"greedy", "coupled"} and not batch.has_images
        can, rows = batch.proposer.abilities if batch.proposer is not None else Abilities(), len(batch.requests)
        model = state is not None and can.model and any(state.may_draft(drafter, lookup=False) for drafter in drafters)
        can = replace(can, trees=can.trees and drawn and self.trees, early_exit=can.early_exit and model, model=model)
        elsewhere = len(self.groups.requests) - rows
        plan = self.policy.plan(Context(rows, can, self.groups.number(batch), elsewhere, sources))
        if not (isinstance(plan, Plan) and isinstance(plan.depth, int) and plan.depth >= 0):
            raise ConfigError(f"{type(self.policy).__name__}.plan must return a Plan with depth >= 0; got {plan!r:.80}")
        plan = plan.within(can, sources)
        return plan.cut(max(batch.rooms(plan, drafters))), plan.size
