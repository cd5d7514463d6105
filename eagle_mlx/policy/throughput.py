"""Drafting as much as pays: plain decoding and all ways to draft compete by tokens per second, as measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from eagle_mlx.plan import CONFIDENCE_LAG, PLAIN, Abilities, Context, Plan, RoundResult
from eagle_mlx.policy.acceptance import AcceptanceByPosition, AcceptanceByRank, ConfidenceCalibration
from eagle_mlx.policy.base import check_depth, check_share
from eagle_mlx.policy.costs import CHAIN_KIND, PLAIN_KIND, Costs, Drift

MOST_TOKENS = 8
"""Of a chain, unless something else is asked for: early exits seldom come later."""
_SHORT = CONFIDENCE_LAG + 1
"""Tokens that a chain has before its first early exit."""
_TREES = (8, 16, 32, 64)
"""Draft tokens of the trees that compete."""
_MARGIN = 0.02
"""Of arms whose speeds are this close the one with the shortest round is taken: what is not drafted is free."""
_CLOSE = 0.9
"""An exploration goes on for `_RUN` rounds if it reaches this share of the best arm's speed, else it has one."""
_RUN = 4
"""Of a run of plain rounds the first is not timed, since nothing was dispatched ahead of it: that leaves three."""
_PAUSE, _LAST_PAUSE = 16, 512
"""Rounds between two explorations of an arm, which double each time that it loses: at most ten seconds on a Mac."""
_NEAR = 2
"""Neighbors of the best arm that are explored on each side: costs rise in steps."""
_FREE = 4.0
"""Plain rounds that exploration may lose before its share of the time counts, or it would begin late."""
_CHECK = 20
"""Of so many early exits one goes on for longer, to see whether the threshold is right."""


def levels_for(nodes: int) -> int:
    """Return how deep a tree of so many tokens may be: deeper than pays for a chain, as far as it has tokens."""
    return max(1, min(3 + nodes // 4, 8, nodes - 1))


@dataclass
class _Yields:
    """What one drafter's drafts yield in one sort of place."""

    positions: AcceptanceByPosition = field(default_factory=AcceptanceByPosition)
    ranks: AcceptanceByRank = field(default_factory=AcceptanceByRank)
    calibration: ConfidenceCalibration = field(default_factory=ConfidenceCalibration)
    early, short = 20.0, 20.0
    """The tokens of early exits, and those that the best chain gives in their time: as many, at first."""

    def add_early(self, tokens: float, short: float) -> None:
        self.early, self.short = 0.995 * self.early + tokens, 0.995 * self.short + short


@dataclass(frozen=True)
class _Exploration:
    """Rounds of an arm that is not the best, in a row."""

    baseline: float
    """Tokens per second and row of the best arm."""
    rounds: int = 0
    tokens: float = 0.0
    expected: float = 0.0
    """Tokens that the best arm would have given in their time."""

    def goes_on(self, arm: Plan) -> bool:
        """It has its run unless it loses much, and goes on for as long as it gains."""
        if arm == PLAIN:
            return self.rounds < _RUN
        return self.tokens > (_CLOSE if self.rounds < _RUN else 1 + _MARGIN) * self.expected


@dataclass
class _Group:
    """What the rounds of one group of rows were before."""

    arm: Plan | None = None
    rows: int = 0
    plain: list[float] = field(default_factory=list)
    """Seconds of the plain rounds of a run that are not counted yet."""
    explorations: dict[Plan, _Exploration] = field(default_factory=dict)
    """Those under way, by arm; one of n-grams waits while nothing repeats."""


def _kind(arm: Plan) -> str:
    if arm.lookup or not arm.depth:
        return "n-grams" if arm.lookup else PLAIN_KIND
    return "tree" if arm.is_tree else "early exit" if arm.stop_below is not None else CHAIN_KIND


class ThroughputPolicy:
    """Plans what is expected to give the most tokens per second, plain decoding included.

    Expected tokens come from the acceptance by position, or in trees by rank; seconds from rounds of the same kind,
    rows and size. A head's or draft model's acceptance is kept apart for places where n-grams could draft too. If a
    proposer gives confidences, long chains may exit early: as soon as a further token is worth less than what decoding
    gives in its time otherwise.

    Now and then another arm is explored: of each other kind the best, and neighbors of the best arm. An arm that loses
    waits twice as long for the next time; one that gains goes on. What explorations lose against the best arm is at
    most `explore` of all time. Raises ConfigError for values out of range.
    """

    def __init__(self, max_depth: int = MOST_TOKENS, explore: float = 0.01, max_nodes: int = 0):
        """`max_nodes`: the most tokens of a draft tree; 0 for chains alone, which are at most `max_depth` long."""
        check_depth("max_depth", max_depth)
        check_depth("max_nodes", max_nodes)
        check_share("explore", explore)
        self.max_depth, self.max_nodes, self.explore = max_depth, max_nodes, explore
        self.costs = Costs()
        self._chains = [Plan(depth) for depth in range(1, max_depth + 1)]
        self._early = Plan(max_depth, stop_below=0.0)
        sizes = sorted({size for size in _TREES if size < max_nodes} | {max_nodes})
        self._trees = [tree for tree in (Plan(levels_for(size), size) for size in sizes if size) if tree.is_tree]
        self.wants_trees = bool(self._trees)
        self._drift = Drift()
        self._yields = {lookup: _Yields() for lookup in (None, False, True)}
        """By `Plan.lookup`."""
        self._groups: dict[int, _Group] = {}
        self._round = self._deepest = 0
        """Rounds, and the depth of the deepest chain of a model, so far."""
        self._pauses: dict[Plan, int] = {}
        self._due = {PLAIN: _RUN + _PAUSE}
        """The round from which on an arm may be explored again."""
        self._spent = self._lost = 0.0
        """Seconds in all, and those that explorations have lost."""
        self._arms: dict[tuple[Abilities, int], list[Plan]] = {}
        self._speeds: dict[tuple[int, Plan], float] = {}
        self._plans: dict[Context, Plan] = {}
        """Both found since the newest round."""

    def plan(self, context: Context) -> Plan:
        if context not in self._plans:
            self._plans[context] = self._chosen(context)
        return self._plans[context]

    def _chosen(self, context: Context) -> Plan:
        rows, group = context.rows, self._groups.get(context.group, _Group())
        if self._round < _RUN:
            return PLAIN
        arms = self._arms_for(context.can)
        best = self._best(rows, arms)
        under_way = next((arm for arm in group.explorations if arm in arms), None)
        arm = under_way or self._explored(rows, arms, best) or best
        baseline = None if arm == best else self._speed(rows, best)
        return replace(self._early_exit(rows, arm) if arm.stop_below is not None else arm, baseline=baseline)

    def _arms_for(self, can: Abilities) -> list[Plan]:
        """What there is to choose from: a model's chains are at most about twice as deep as they were."""
        key = can, self._deepest
        if key not in self._arms:
            self._arms[key] = self._found_arms(can)
        return self._arms[key]

    def _found_arms(self, can: Abilities) -> list[Plan]:
        grown = self._deepest >= _SHORT
        trees = self._trees if can.trees and grown else []
        early = [self._early] if can.early_exit and grown and self.max_depth > _SHORT else []
        model = [*self._chains[: 2 * self._deepest + 1], *early, *trees]
        if not can.lookup:
            return [PLAIN, *model]
        ngrams = [*self._chains, *trees]
        return [PLAIN, *(replace(arm, lookup=True) for arm in ngrams), *(replace(arm, lookup=False) for arm in model)]

    def _speed(self, rows: int, arm: Plan) -> float:
        """Return the expected tokens per second and row."""
        key = rows, arm
        if key not in self._speeds:
            yields = self._yields[arm.lookup]
            acceptance = yields.ranks if arm.is_tree else yields.positions
            self._speeds[key] = (
                acceptance.expected_tokens(arm.size) / self._seconds(rows, arm)
                if arm.stop_below is None
                else self._best_chain(rows, arm) * yields.early / yields.short
            )
        return self._speeds[key]

    def _best_chain(self, rows: int, early: Plan) -> float:
        return max(self._speed(rows, replace(chain, lookup=early.lookup)) for chain in self._chains)

    def _seconds(self, rows: int, arm: Plan, size: int | None = None) -> float:
        usual = arm.size if arm.stop_below is None else _SHORT
        return self.costs.estimate(_kind(arm), rows, usual if size is None else size)

    def _best(self, rows: int, arms: list[Plan]) -> Plan:
        speeds = [self._speed(rows, arm) for arm in arms]
        least = (1 - _MARGIN) * max(speeds)
        close = [arm for arm, speed in zip(arms, speeds, strict=True) if speed >= least]
        return min(close, key=lambda arm: self._seconds(rows, arm))

    def _explored(self, rows: int, arms: list[Plan], best: Plan) -> Plan | None:
        """An arm to explore in place of the best, if it is time for one and the budget allows it."""
        allowed = self.explore * self._spent + _FREE * self._seconds(rows, PLAIN) - self._lost
        due = [arm for arm in self._candidates(rows, arms, best) if self._round >= self._due.get(arm, 0)]
        affordable = (arm for arm in due if self._price(rows, arm, best) <= allowed)
        return min(affordable, key=lambda arm: self._due.get(arm, 0), default=None)

    def _candidates(self, rows: int, arms: list[Plan], best: Plan) -> list[Plan]:
        """While nothing is drafted, the best arm of each drafter; else plain decoding, other kinds and neighbors."""
        if best == PLAIN:
            drafters = [[arm for arm in arms if arm.depth and bool(arm.lookup) == lookup] for lookup in (True, False)]
            return [max(each, key=lambda arm: self._speed(rows, arm)) for each in drafters if each]
        kinds: dict[str, list[Plan]] = {}
        for arm in arms[1:]:
            kinds.setdefault(_kind(arm), []).append(arm)
        own = kinds.pop(_kind(best))
        at = own.index(best)
        near = [arm for arm in own[max(at - _NEAR, 0) : at + _NEAR + 1] if arm != best]
        return [PLAIN, *near, *(max(kind, key=lambda arm: self._speed(rows, arm)) for kind in kinds.values())]

    def _price(self, rows: int, arm: Plan, best: Plan) -> float:
        """Return the seconds that an exploration is expected to lose."""
        share = self._speed(rows, arm) / self._speed(rows, best)
        return self._seconds(rows, arm) * (1 - share) * (_RUN if arm == PLAIN or share > _CLOSE else 1)

    def _early_exit(self, rows: int, arm: Plan) -> Plan:
        """A chain that ends when a further token is worth less than what its seconds give otherwise."""
        yields = self._yields[arm.lookup]
        speed = self._best_chain(rows, arm) * max(1.0, yields.early / yields.short)
        rise = self._seconds(rows, arm, arm.depth) - self._seconds(rows, arm, _SHORT)
        threshold = min(yields.calibration.threshold(speed * rise / (arm.depth - _SHORT)), 1.0)
        return replace(arm, stop_below=threshold / 2 if self._round % _CHECK == 0 else threshold)

    def observe(self, result: RoundResult) -> None:
        self._plans.clear()
        self._speeds.clear()
        arm, group = self._arm(result.plan), self._groups.setdefault(result.group, _Group())
        if arm is None or (arm.depth and not result.depth):  # nothing was found to draft, which says nothing
            group.arm = None
            return
        self._round += 1
        size = arm.nodes if arm.is_tree else result.depth
        self._time(group, arm, result, size)
        self._learn(arm, result, size)
        self._account(group, arm, result, self._seconds(result.rows, arm, size))
        group.arm, group.rows = arm, result.rows

    def _arm(self, plan: Plan) -> Plan | None:
        """The arm that a plan belongs to, which may have been cut."""
        if plan.is_tree:
            arm = next((tree for tree in self._trees if tree.nodes == plan.nodes), None)
        elif plan.stop_below is not None and plan.depth > _SHORT:
            arm = self._early
        else:
            arm = Plan(plan.depth) if plan.depth <= self.max_depth else None
        return arm and replace(arm, lookup=plan.lookup)

    def _time(self, group: _Group, arm: Plan, result: RoundResult, size: int) -> None:
        """Take a round's seconds, at the machine's usual speed.

        Plain rounds are dispatched ahead, so only the mean of a run tells what one takes, without its first.
        """
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
            self.costs.add(kind, rows, size, sum(group.plain) / len(group.plain))
            group.plain = []

    def _learn(self, arm: Plan, result: RoundResult, size: int) -> None:
        yields, rows = self._yields[arm.lookup], result.rows
        if arm.is_tree:
            yields.ranks.add(arm.nodes, result.paths)
            return
        if not arm.lookup:
            self._deepest = max(self._deepest, size)
        if arm.stop_below is not None:
            yields.calibration.add(result.confidences, result.drafted, result.accepted)
            short = self._seconds(rows, arm, size) * self._best_chain(rows, arm)
            yields.add_early(1 + sum(result.accepted) / rows, short)
            self._speeds.clear()
            size = min(size, _SHORT)  # only the better drafts go further
        yields.positions.add(size, result.accepted)

    def _account(self, group: _Group, arm: Plan, result: RoundResult, seconds: float) -> None:
        """What an exploration lost, and whether it goes on."""
        self._spent += seconds
        under_way, baseline = group.explorations.pop(arm, None), result.plan.baseline
        if baseline is None and arm == PLAIN and under_way is not None:  # it was dispatched ahead
            baseline = under_way.baseline
        if baseline is None:
            if arm.depth:
                self._pauses.pop(arm, None)
            return
        tokens, before = 1 + sum(result.accepted) / result.rows, under_way or _Exploration(baseline)
        expected = before.expected + seconds * baseline
        after = _Exploration(baseline, before.rounds + 1, before.tokens + tokens, expected)
        self._lost = max(0.0, self._lost + seconds - tokens / baseline)
        if after.goes_on(arm):
            group.explorations[arm] = after
            return
        # Only drafts tell what drafts yield: those that are close to plain decoding, while it leads, are not put off.
        close = self._speed(result.rows, PLAIN) > 0.999 * baseline and self._speed(result.rows, arm) > _CLOSE * baseline
        pause = _PAUSE if close else min(2 * self._pauses.get(arm, _PAUSE // 2), _LAST_PAUSE)
        self._pauses[arm], self._due[arm] = pause, self._round + pause
