"""The default policy: plain decoding and all ways to draft compete by measured tokens per second."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median_low

from eagle_mlx.errors import require
from eagle_mlx.plan import CONFIDENCE_LAG, PLAIN, Abilities, Context, Plan, RoundResult
from eagle_mlx.policy import estimates
from eagle_mlx.policy.base import check_depths

MOST_TOKENS = 8  # the default length limit of a chain: early exits are rare after it
_LONGER = 2
"""N-grams may draft this many times as many tokens as a model, because finding them takes no time. It raised the mean
speed on a real model from 1.53 to 1.57 of plain decoding (benchmarks/results/ngrams-replayed.yaml)."""
_SHORT = CONFIDENCE_LAG + 1  # draft tokens of a chain before its first early exit
_TREES = (8, 16, 32, 64)  # draft tokens of the trees that compete
_MARGIN = 0.02  # arms whose speeds differ by less than this count as equal; the one with the shortest round wins
_CLOSE = 0.9  # an exploration lasts `_RUN` rounds if it reaches this share of the best arm's speed, else one round
_RUN = 4  # rounds of an exploration; the first of plain ones is not timed, because nothing was dispatched ahead
_SLOWEST = 2.0
"""A plain round counts for at most this many times the median of its run: other programs slowed down the rest."""
_PAUSE, _LAST_PAUSE = 16, 128
"""Least and most rounds between two explorations of an arm; each loss doubles them. With longer pauses, simulations
took more than 1,500 rounds to notice that the text or the machine had changed."""
_NEAR = 2  # neighbors of the best arm to explore on each side, because costs rise in steps
_FREE, _GOOD = 4.0, 0.9
"""Plain rounds that exploration may lose before the `explore` budget applies, with arms that would pay if this share of
their tokens was accepted."""
_CHECK = 20  # one in this many early exits uses half the threshold, to check it
_KEEP = 0.995  # the weight that earlier early exits keep with each new one: half after 138


Rows = tuple[int, ...]  # what each row could draft without a model, as in `Context.sources`, in ascending order


def levels_for(nodes: int) -> int:
    return max(1, min(3 + nodes // 4, 8, nodes - 1))


@dataclass
class _Yields:
    """The acceptance of a model's drafts in rows with or without a source; of early exits, in such rounds."""

    positions: estimates.AcceptanceByPosition = field(default_factory=estimates.AcceptanceByPosition)
    ranks: estimates.AcceptanceByRank = field(default_factory=estimates.AcceptanceByRank)
    calibration: estimates.ConfidenceCalibration = field(default_factory=estimates.ConfidenceCalibration)
    early, short = 20.0, 20.0
    """Tokens of early exits, and tokens that the best chain would give in the same time; equal at first."""


@dataclass(frozen=True)
class _Exploration:
    baseline: float  # tokens per second and row of the best arm
    rounds: int = 0
    tokens: float = 0.0
    expected: float = 0.0  # tokens that the best arm would have given in the same time

    def goes_on(self, arm: Plan) -> bool:
        """Return whether to explore another round: up to `_RUN` unless it loses much, then as long as it wins."""
        if arm == PLAIN:
            return self.rounds < _RUN
        return self.tokens > (_CLOSE if self.rounds < _RUN else 1 + _MARGIN) * self.expected


@dataclass
class _Group:
    """The latest rounds of one group of rows."""

    arm: Plan | None = None
    rows: int = 0
    plain: list[float] = field(default_factory=list)  # seconds of the plain rounds of the present run
    explorations: dict[Plan, _Exploration] = field(default_factory=dict)
    """Explorations under way, by arm. N-grams wait until they match."""


def _kind(arm: Plan) -> estimates.ArmKind:
    if not arm.depth:
        return "n-grams" if arm.lookups else "plain"
    if any(arm.lookups):
        return "mixed"
    if arm.is_tree:
        return "tree"
    return "chain" if arm.stop_below is None else "early exit"


class ThroughputPolicy:
    """Plans the arm with the most expected tokens per second; plain decoding is one arm.

    Expected tokens come from the acceptance by position, or by rank in trees; seconds from rounds of the same kind,
    rows and size. The acceptance of a model is counted separately for rows with a source. That of matches comes from
    `RoundResult.trials`, by the bits of their lengths (1, 2 to 3, 4 to 7, and so on); forced tokens are certain. If the
    proposer reports confidences, a long chain exits early when another token costs more than it is expected to give.
    An arm has one number in `lookups` if a row has a source: the tokens that such rows draft from it, or 0.

    The policy also explores neighbors of the best arm and the best arm of each other kind. An arm that loses waits
    twice as long for its next exploration. Explorations may lose the share `explore` of the total time. If that is
    spent, each arm may still lose its part of this share of the time since it was last explored. Raises ConfigError for
    values out of range.
    """

    def __init__(
        self,
        max_depth: int = MOST_TOKENS,
        explore: float = 0.01,
        max_nodes: int = 0,
        curve: estimates.Points | None = None,
    ):
        """Limit chains to `max_depth` draft tokens and trees to `max_nodes`; 0 means no trees. `curve`: seconds of a
        forward by tokens (`learn_costs`)."""
        check_depths(max_depth=max_depth, max_nodes=max_nodes)
        require("explore", explore, float, "a number from 0 to 1", 0, 1)
        require("curve", curve, list | tuple | None, "what em.learn_costs(target) returns")
        self.max_depth, self.explore = max_depth, explore
        self.costs = estimates.Costs(curve)
        self._chains = [Plan(depth) for depth in range(1, max_depth + 1)]
        self.max_lookup = _LONGER * max_depth
        lookups = {*range(1, max_depth + 1), (max_depth + self.max_lookup) // 2, self.max_lookup} - {0}
        self._lookups = [Plan(0, lookups=(depth,)) for depth in sorted(lookups)]
        self._early = Plan(max_depth, stop_below=0.0)
        sizes = sorted({size for size in _TREES if size < max_nodes} | {max_nodes})
        self._trees = [tree for tree in (Plan(levels_for(size), size) for size in sizes if size) if tree.is_tree]
        self.wants_trees = bool(self._trees)
        self._drift = estimates.Drift()
        self._model = {False: _Yields(), True: _Yields()}  # by whether there is a source
        self._matches = defaultdict[int, estimates.AcceptanceByPosition](estimates.AcceptanceByPosition)
        self._groups: dict[int, _Group] = {}
        self._drafted: tuple[Plan, Rows] = Plan(1), (0,)  # the latest arm that drafted, and the rows that did freely
        self._round = self._deepest = 0
        """The number of rounds, and the depth of the deepest chain so far, n-grams excluded."""
        self._pauses: dict[Plan, int] = {}
        self._due = {PLAIN: _RUN + _PAUSE}  # the first round that may explore an arm again
        self._spent = self._lost = 0.0  # total seconds, and seconds that explorations have lost
        self._arms, self._speed = cache(self._find_arms), cache(self._find_speed)
        self._chosen = cache(self._choose)

    @property
    def acceptance(self) -> float:
        """The expected share for the latest way to draft; an early exit counts with its shortest chain."""
        arm, rows = self._drafted
        arm = arm if arm.stop_below is None else Plan(_SHORT)
        return (self._tokens(rows, arm) - 1) / (arm.depth or arm.size)

    def plan(self, context: Context) -> Plan:
        return self._chosen(context)

    def _choose(self, context: Context) -> Plan:
        sources, group = context.sources or (0,) * context.rows, self._groups.get(context.group, _Group())
        rows = tuple(sorted(sources))
        if self._round < _RUN:
            return PLAIN
        arms = self._arms(context.can, self._deepest, any(rows), all(rows))
        best = self._best(rows, arms)
        under_way = next((arm for arm in group.explorations if arm in arms), None)
        arm = under_way or self._explored(rows, arms, best) or best
        baseline = None if arm == best else self._speed(rows, best)
        plan = self._early_exit(rows, arm) if arm.stop_below is not None else arm
        lookups = tuple(arm.size * (source != 0) for source in sources) if any(arm.lookups) else ()
        return replace(plan, lookups=lookups, baseline=baseline, sources=context.sources)

    def _find_arms(self, can: Abilities, deepest: int, some: bool, every: bool) -> list[Plan]:
        """Return the arms, if some or all rows have a source. A model's chains grow to about twice the deepest yet."""
        if not can.model:
            return [PLAIN, *self._lookups] if some else [PLAIN]
        grown = deepest >= _SHORT
        trees = self._trees if can.trees and grown else []
        early = [self._early] if can.early_exit and grown and self.max_depth > _SHORT else []
        model = [*self._chains[: 2 * deepest + 1], *early, *trees]
        if not some:
            return [PLAIN, *model]
        mixed = [] if every else [replace(arm, lookups=(arm.depth,)) for arm in self._chains[: 2 * deepest + 1]]
        return [PLAIN, *self._lookups, *mixed, *(replace(arm, lookups=(0,)) for arm in model)]

    def _find_speed(self, rows: Rows, arm: Plan) -> float:
        if arm.stop_below is not None:
            yields = self._model[bool(arm.lookups)]
            return self._best_chain(rows, arm) * yields.early / yields.short
        return self._tokens(rows, arm) / self._seconds(rows, arm)

    def _tokens(self, rows: Rows, arm: Plan) -> float:
        """Return the expected tokens of a row, in the mean."""
        return sum(rows.count(source) * self._yield(source, arm) for source in set(rows)) / len(rows)

    def _yield(self, source: int, arm: Plan) -> float:
        if source and any(arm.lookups):
            matches = self._matches[source.bit_length()]
            return 1 + min(source, arm.size) if source > 0 else matches.expected_tokens(arm.size)
        yields = self._model[source != 0]
        return yields.ranks.expected_tokens(arm.nodes) if arm.is_tree else yields.positions.expected_tokens(arm.depth)

    def _best_chain(self, rows: Rows, early: Plan) -> float:
        return max(self._speed(rows, replace(chain, lookups=early.lookups)) for chain in self._chains)

    def _seconds(self, rows: Rows, arm: Plan, size: int | None = None) -> float:
        usual = arm.size if arm.stop_below is None else _SHORT
        return self.costs.estimate(_kind(arm), len(rows), usual if size is None else size)

    def _best(self, rows: Rows, arms: list[Plan]) -> Plan:
        least = (1 - _MARGIN) * max(self._speed(rows, arm) for arm in arms)
        return min((arm for arm in arms if self._speed(rows, arm) >= least), key=lambda arm: self._seconds(rows, arm))

    def _explored(self, rows: Rows, arms: list[Plan], best: Plan) -> Plan | None:
        """Return an arm to explore instead of the best, if one is due and the budget allows it."""
        earned, plain = self.explore * self._spent - self._lost, self._seconds(rows, PLAIN)
        candidates = self._candidates(rows, arms, best)

        def is_affordable(arm: Plan) -> bool:
            may_pay = self._seconds(rows, arm) <= plain * sum(_GOOD**i for i in range(arm.size + 1))
            waited = self._round - self._due.get(arm, 0) + self._pauses.get(arm, 0)
            own_part = self.explore * plain * waited / len(candidates)
            return self._price(rows, arm, best) <= max(earned + _FREE * plain * may_pay, own_part)

        due = (arm for arm in candidates if self._round >= self._due.get(arm, 0))
        return min(filter(is_affordable, due), key=lambda arm: self._due.get(arm, 0), default=None)

    def _candidates(self, rows: Rows, arms: list[Plan], best: Plan) -> list[Plan]:
        """Return the arms worth exploring: if plain leads, the best of each drafter, and chains longer than any yet.
        Drafts from matches are only if their time is unknown and they may be fast: their acceptance is known."""
        least = _CLOSE * self._speed(rows, best)
        new = [arm for arm in self._lookups if self.costs.known("n-grams", len(rows), arm.size) is None]
        arms = [arm for arm in arms[1:] if arm.depth or arm == best or (arm in new and self._speed(rows, arm) >= least)]
        groups: dict[object, list[Plan]] = {}
        for arm in arms:
            groups.setdefault(bool(arm.depth) if best == PLAIN else _kind(arm), []).append(arm)
        own = groups.pop(_kind(best), [])
        leaders = [max(group, key=lambda arm: self._speed(rows, arm)) for group in groups.values()]
        if best == PLAIN:
            longer = {(_kind(arm), arm.depth + more) for arm in leaders for more in range(1, _NEAR + 1)}
            return [*leaders, *(arm for arm in arms if (_kind(arm), arm.depth) in longer and arm.depth > self._deepest)]
        at = own.index(best)
        return [PLAIN, *(arm for arm in own[max(at - _NEAR, 0) : at + _NEAR + 1] if arm != best), *leaders]

    def _price(self, rows: Rows, arm: Plan, best: Plan) -> float:
        """Return the seconds that an exploration is expected to lose."""
        share = self._speed(rows, arm) / self._speed(rows, best)
        return self._seconds(rows, arm) * (1 - share) * (_RUN if arm == PLAIN or share > _CLOSE else 1)

    def _early_exit(self, rows: Rows, arm: Plan) -> Plan:
        yields = self._model[bool(arm.lookups)]
        speed = self._best_chain(rows, arm) * max(1.0, yields.early / yields.short)
        rise = self._seconds(rows, arm, arm.depth) - self._seconds(rows, arm, _SHORT)
        threshold = min(yields.calibration.threshold(speed * rise / (arm.depth - _SHORT)), 1.0)
        return replace(arm, stop_below=threshold / 2 if self._round % _CHECK == 0 else threshold)

    def observe(self, result: RoundResult) -> None:
        self._chosen.cache_clear()
        self._speed.cache_clear()
        for drafted, accepted, match in result.trials:
            self._matches[match.bit_length()].add(drafted, [accepted])
        arm, group = self._arm(result.plan), self._groups.setdefault(result.group, _Group())
        if arm is None or (arm.size and not result.depth):  # there was nothing to draft, so there is nothing to learn
            group.arm = None
            return
        self._round += 1
        size = arm.nodes if arm.is_tree else result.depth
        rows = result.plan.sources or (0,) * result.rows
        self._time(group, arm, result, size)
        self._learn(arm, result, size, rows)
        self._account(group, arm, result, self._seconds(rows, arm, size), tuple(sorted(rows)))
        group.arm, group.rows = arm, result.rows
        drafting = tuple(source for source, drafted in zip(rows, result.drafted_freely, strict=True) if drafted)
        self._drafted = (arm, drafting) if drafting else self._drafted

    def _arm(self, plan: Plan) -> Plan | None:
        """Return the arm of a plan that may have been cut."""
        if plan.is_tree:
            arm = next((tree for tree in self._trees if tree.nodes == plan.nodes), None)
        elif plan.stop_below is not None and plan.depth > _SHORT:
            arm = self._early
        else:
            arm = Plan(plan.depth) if plan.depth <= self.max_depth and plan.size <= self.max_lookup else None
        lookups = (max(plan.lookups, default=0),) if plan.size and (plan.sources or plan.lookups) else ()
        return arm and replace(arm, lookups=lookups)

    def _time(self, group: _Group, arm: Plan, result: RoundResult, size: int) -> None:
        """Learn the seconds of a round, normalized to the machine's usual speed. Plain rounds are dispatched ahead, so
        the mean of a run counts, without its first round."""
        rows, kind = result.rows, _kind(arm)
        if arm == PLAIN and (group.arm != PLAIN or group.rows != rows):
            group.plain = []
            return
        seconds = self._drift.normalized(result.seconds, self.costs.known(kind, rows, size))
        if arm != PLAIN:
            self.costs.add(kind, rows, size, seconds)
            return
        group.plain.append(seconds)
        if len(group.plain) == _RUN - 1:
            most = _SLOWEST * median_low(group.plain)
            self.costs.add(kind, rows, size, sum(min(took, most) for took in group.plain) / len(group.plain))
            group.plain = []

    def _learn(self, arm: Plan, result: RoundResult, size: int, rows: Rows) -> None:
        """Learn from the rows for which a model drafted."""
        self._deepest = max(self._deepest, size if arm.depth and not arm.is_tree else 0)
        if arm.stop_below is not None:
            yields = self._model[bool(arm.lookups)]
            yields.calibration.add(result.confidences, result.drafted, result.accepted)
            yields.early = _KEEP * yields.early + 1 + sum(result.accepted) / len(rows)
            yields.short = _KEEP * yields.short + self._seconds(rows, arm, size) * self._best_chain(rows, arm)
            self._speed.cache_clear()
            size = min(size, _SHORT)  # only good drafts go further, which would bias these shares
        places = {source != 0 for source in rows if not (source and any(arm.lookups))} if arm.depth else ()
        for place in places:
            own = [row for row, source in enumerate(rows) if (source != 0) == place]
            if arm.is_tree:
                self._model[place].ranks.add(size, [result.paths[row] for row in own])
            else:
                self._model[place].positions.add(size, [result.accepted[row] for row in own])

    def _account(self, group: _Group, arm: Plan, result: RoundResult, seconds: float, rows: Rows) -> None:
        """Count what an exploration lost, and decide whether it continues."""
        self._spent += seconds
        under_way, baseline = group.explorations.pop(arm, None), result.plan.baseline
        if baseline is None and arm == PLAIN and under_way is not None:  # dispatched ahead
            baseline = under_way.baseline
        if baseline is None:
            if arm.size:
                self._pauses.pop(arm, None)
            return
        tokens, before = 1 + sum(result.accepted) / len(rows), under_way or _Exploration(baseline)
        after = _Exploration(baseline, before.rounds + 1, before.tokens + tokens, before.expected + seconds * baseline)
        self._lost = max(0.0, self._lost + seconds - tokens / baseline)
        if under_way is None and self._round <= self._due.get(arm, 0):
            return  # it was dispatched ahead and the exploration has ended since, or its plan was cut to another arm
        if after.goes_on(arm):
            group.explorations[arm] = after
            return
        # Only drafting measures acceptance, so arms close to plain decoding keep the short pause while plain leads.
        close = self._speed(rows, PLAIN) > 0.999 * baseline and self._speed(rows, arm) > _CLOSE * baseline
        pause = _PAUSE if close else min(2 * self._pauses.get(arm, _PAUSE // 2), _LAST_PAUSE)
        self._pauses[arm], self._due[arm] = pause, self._round + pause
