"""Drafting as much as pays, by n-grams or by a model, whichever pays more where the text repeats itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_mlx.plan import PLAIN, Abilities, Plan, RoundResult
from eagle_mlx.policy.base import check_depth, check_positive
from eagle_mlx.policy.throughput import MOST_TOKENS, ThroughputPolicy

_FIRST = 8
"""Rounds of either before they are compared: fewer would leave it to chance, as n-grams give all or nothing."""
_TRIAL = 2
"""Rounds of the slower one in a row, when its time has come."""
_PAUSE, _LAST_PAUSE = 16, 256
"""Rounds of the faster one between two trials of the other, which double with each trial."""
_DECAY = 0.98
"""What is left of older rounds with each new one: half of their weight after 34."""


@dataclass
class _Yield:
    """Tokens and seconds of a way to draft, where both can."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: int = 0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens, self.seconds = _DECAY * self.tokens + tokens, _DECAY * self.seconds + seconds
        self.rounds += 1

    @property
    def speed(self) -> float:
        """Tokens per second and row."""
        return self.tokens / self.seconds

    @classmethod
    def of(cls, saved: Sequence[Any]) -> _Yield:
        """What `saved` gave. Raises ConfigError for numbers that cannot be."""
        tokens, seconds, rounds = saved
        check_depth("rounds", rounds)
        if rounds:
            check_positive("tokens", tokens)
            check_positive("seconds", seconds)
        return cls(float(tokens), float(seconds), rounds)

    def saved(self) -> list[float]:
        return [self.tokens, self.seconds, self.rounds]


@dataclass
class _Contest:
    """N-grams against a model, in the rounds in which both know how a text goes on."""

    ngrams: _Yield = field(default_factory=_Yield)
    model: _Yield = field(default_factory=_Yield)
    since: int = 0
    """Rounds of the faster one since the last trial of the other."""
    pause: int = _PAUSE
    trial: int = 0
    """Rounds that the trial under way has had."""

    @property
    def lookup(self) -> bool:
        """Whether n-grams draft next."""
        for each, lookup in ((self.ngrams, True), (self.model, False)):
            if each.rounds < _FIRST:
                return lookup
        return self._ngrams_lead ^ (self.since >= self.pause)

    @property
    def _ngrams_lead(self) -> bool:
        return self.ngrams.speed >= self.model.speed

    def saved(self) -> list[Any]:
        return [self.ngrams.saved(), self.model.saved(), self.pause]

    def add(self, lookup: bool, tokens: float, seconds: float) -> None:
        is_first = min(self.ngrams.rounds, self.model.rounds) < _FIRST
        is_trial = not is_first and lookup != self._ngrams_lead
        (self.ngrams if lookup else self.model).add(tokens, seconds)
        if is_trial:
            self.trial += 1
            if self.trial >= _TRIAL:
                self.trial, self.since, self.pause = 0, 0, min(2 * self.pause, _LAST_PAUSE)
        elif not is_first:
            self.since += 1


class HybridPolicy(ThroughputPolicy):
    """Plans as `ThroughputPolicy` does: for a model, for it where texts repeat themselves, and for n-grams there.

    Where texts repeat, that of the two drafts which has given more tokens per second in such places; the other is tried
    at doubling distances. One that pays less than plain decoding is left out.
    """

    def __init__(self, max_depth: int = MOST_TOKENS, explore: float = 0.005, max_nodes: int = 0):
        super().__init__(max_depth, explore, max_nodes)
        self.ngrams = ThroughputPolicy(max_depth, explore, max_nodes)
        self.repeating = self.apart()
        """For the model, where n-grams could draft."""
        self._contests: dict[int, _Contest] = {}
        """By rows."""
        self._asked: ThroughputPolicy | None = None
        """Whose the newest plan is; None for that of the model where nothing repeats."""

    def _twin(self) -> HybridPolicy:
        other = super()._twin()
        assert isinstance(other, HybridPolicy)
        other.ngrams, other.repeating = self.ngrams._twin(), self.repeating._twin()
        return other

    @property
    def rounds(self) -> int:
        return super().rounds + self.ngrams.rounds + self.repeating.rounds

    def knowledge(self) -> dict[str, Any]:
        contests = [[rows, *contest.saved()] for rows, contest in self._contests.items()]
        others = {"ngrams": self.ngrams.knowledge(), "repeating": self.repeating.knowledge()}
        return super().knowledge() | others | {"contests": contests}

    def start_from(self, knowledge: dict[str, Any]) -> None:
        super().start_from(knowledge)
        self.ngrams.start_from(knowledge["ngrams"])
        self.repeating.start_from(knowledge["repeating"])
        for rows, ngrams, model, pause in knowledge["contests"]:
            check_positive("pause", pause)
            self._contests[int(rows)] = _Contest(_Yield.of(ngrams), _Yield.of(model), pause=math.ceil(pause))

    def _plan(self, rows: int, can: Abilities) -> Plan:
        if not can.lookup:
            self._asked = None
            return super()._plan(rows, can)
        model = self.repeating._plan(rows, replace(can, lookup=False))
        ngrams = self.ngrams._plan(rows, replace(can, lookup=False, early_exit=False))
        lookup = self._prefers_ngrams(rows, ngrams, model)
        self._asked, plan = (self.ngrams, ngrams) if lookup else (self.repeating, model)
        return replace(plan, lookup=lookup) if plan.depth else PLAIN

    def _prefers_ngrams(self, rows: int, ngrams: Plan, model: Plan) -> bool:
        """Whether the plan of n-grams is to be taken, of these two."""
        if not ngrams.depth:  # they pay less, or it is time to look at what a plain round takes
            return self.ngrams.drafts and (self.repeating.drafts or not model.depth)
        if not model.depth:
            return not self.repeating.drafts
        return self._contest(rows).lookup

    def _contest(self, rows: int) -> _Contest:
        return self._contests.setdefault(rows, _Contest())

    def _observe(self, result: RoundResult) -> None:
        plan = result.plan
        by = self._asked if not plan.depth else {None: None, True: self.ngrams, False: self.repeating}[plan.lookup]
        alone = replace(result, plan=replace(plan, lookup=None))
        if by is None:
            super()._observe(alone)
        else:
            by._observe(alone)
        if not plan.depth:
            (self if by is self.ngrams else self.ngrams).time_plain(result)
        elif plan.lookup is not None:
            self._contest(result.rows).add(plan.lookup, 1 + sum(result.accepted) / result.rows, result.seconds)
