"""Drafting as much as pays, by what rounds cost and drafts yield here and now."""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from eagle_mlx.plan import CONFIDENCE_LAG, PLAIN, Abilities, Context, Plan, RoundResult
from eagle_mlx.policy.base import check_depth, check_share
from eagle_mlx.policy.budget import RegretBudget
from eagle_mlx.policy.costs import Costs, Drift
from eagle_mlx.policy.trials import AcceptanceByPosition, AcceptanceByRank, Calibration

MOST_TOKENS = 8
"""Of a chain, unless something else is asked for: early exits seldom come later."""
_SHORT = CONFIDENCE_LAG + 1
"""Tokens that a chain has before its first early exit: shorter ones have a fixed depth."""
_TREES = (8, 16, 32, 64)
"""Draft tokens of the trees that are compared."""
_MARGIN = 0.03
"""Of plans whose speeds are this close the smallest is taken: an estimate may be wrong, what is not drafted is free."""
_CLOSE = 0.85
"""A plan is close to the best where it is expected to reach more than this share of its speed."""
_RUN = 3
"""Rounds that exploring a close plan takes; others get one.

The first round behind another plan takes longer, and is not timed where that matters."""
_FIRST = 2
"""Rounds of each kind before there is a choice: the first may compile kernels."""
_FREE = 8
"""Plain rounds that drafting may lose before its share of the time counts: a quarter of a second on a Mac, once.

A dozen refused drafts say little of those to come, and would keep a run plain for two thousand rounds (docs/log.md)."""
_FREE_FIRST = 6
"""Of these, what the first rounds of each kind may take, so that a busy moment at first leaves room for a second look.

Six to 7.75 do alike in simulation (docs/log.md)."""
_EVERY = 20
"""Rounds between two explorations, at least. Between two of the same plan they double each time."""
_NEAR = 2
"""Neighbours that are explored on each side: costs rise in steps, and behind a dear step may come a cheap one."""
_DOUBT = 0.05
"""An early exit is kept from the tokens behind a step where they lose more than this share of a round.

Less may be noise: at 0 chains were cut by chance, at 0.1 some steps were not seen (docs/log.md)."""
_CHECK = 4
"""Rounds behind which a new leader is first compared with fresh plain rounds; they double with each comparison."""
_LAST_CHECK = 256
"""Where the doubling ends, of these and of explorations: a change is seen within some ten seconds on a Mac."""
_CHECK_AFTER_PRIOR = 32
"""`_CHECK` where drafting led in an earlier engine: the first rounds are not to pay for it again."""


def levels_for(nodes: int) -> int:
    """How deep a tree of so many tokens may be: deeper than pays for a chain, as far as there are tokens for it."""
    return max(1, min(3 + nodes // 4, 8, nodes - 1))


@dataclass
class _Gain:
    """What early exits gave, and what the best chain of a fixed depth would have given in that time."""

    tokens: float = 20.0
    baseline: float = 20.0
    """The first guess: as much, for 20 tokens a row."""
    rounds: int = 0

    def add(self, tokens: float, baseline: float) -> None:
        """A round gave so many tokens a row, where that chain would have given `baseline`."""
        self.tokens, self.baseline = self.tokens * 0.995 + tokens, self.baseline * 0.995 + baseline
        self.rounds += 1

    @property
    def factor(self) -> float:
        """Early exits' speed, that of the best chain of a fixed depth = 1; in their favour while little is known."""
        return self.tokens / self.baseline + 1 / math.sqrt(1 + self.rounds)


def _is_early(plan: Plan) -> bool:
    return plan.stop_below is not None


def _kind(plan: Plan) -> str:
    return "tree" if plan.is_tree else "early exit" if _is_early(plan) else "chain"


@dataclass(frozen=True)
class _Decision:
    """The plan that was given out, and the best one at that time."""

    plan: Plan
    best: Plan

    @property
    def is_exploration(self) -> bool:
        return self.plan != self.best


class ThroughputPolicy:
    """Plans what is expected to give the most tokens per second, plain decoding included.

    Expected tokens come from the acceptance by position, or in trees by rank; seconds from rounds of the same rows and
    size. Where a proposer gives confidences, long chains exit early: as soon as a token more is worth less than what
    decoding gives in its time otherwise.

    Now and then it explores another plan: a neighbour of the best or the best of another kind, whichever was explored
    the longest ago, and each at doubling distances; and plain decoding, at doubling distances behind a change of the
    leader. What exploration loses against the best plan is at most `explore` of all time. Where plain decoding leads,
    what drafting has lost against it counts too, but for the first few plain rounds. Raises ConfigError for values out
    of range.
    """

    def __init__(self, max_depth: int = MOST_TOKENS, explore: float = 0.005, max_nodes: int = 0):
        """`max_nodes`: the most tokens of a draft tree; 0 for chains alone, which are at most `max_depth` long."""
        check_depth("max_depth", max_depth)
        check_depth("max_nodes", max_nodes)
        check_share("explore", explore)
        self.max_depth, self.max_nodes, self.explore = max_depth, max_nodes, explore
        self._chains = [Plan(depth) for depth in range(max_depth + 1)]
        self._early = Plan(max_depth, stop_below=0.0)
        sizes = sorted({size for size in _TREES if size < max_nodes} | {max_nodes})
        self._trees = [tree for tree in (Plan(levels_for(size), size) for size in sizes if size) if tree.is_tree]
        self.costs = {kind: Costs() for kind in ("chain", "early exit", "tree")}
        self.positions, self.ranks, self.calibration = AcceptanceByPosition(), AcceptanceByRank(), Calibration()
        self.reached = AcceptanceByPosition()
        """Of early exits: at positions that only the better drafts reach."""
        self._gains: dict[int, _Gain] = {}
        self._drift = Drift()
        self._round = self._run = 0
        """Rounds, and those of the newest plan in a row."""
        self._before, self._restart_costs = PLAIN, False
        self._seen, self._count = Counter[Plan](), Counter[Plan]()
        """The newest round of each plan, and how many there were."""
        self._pause: dict[Plan, int] = {}
        """Rounds before a plan is explored again."""
        self._leader_since = self._last_exploration = 0
        self._baseline_check = _CHECK
        self._draft_budget, self._exploration_budget = RegretBudget(explore), RegretBudget(explore)
        """Of drafting against plain decoding, and of exploration against the best plan."""
        self._speeds: dict[tuple[int, Plan], float] = {}
        """Found since the newest round."""
        self._decisions: dict[tuple[int, Abilities], _Decision] = {}
        self._decision = _Decision(PLAIN, PLAIN)
        """The newest."""
        self._groups = {0: self}
        """The policy of each group of rows."""

    def _twin(self) -> ThroughputPolicy:
        """One that shares costs, acceptance and budgets, for rounds that alternate with this one's."""
        other = copy(self)
        other._seen, other._decisions = Counter(self._seen), {}
        return other

    def _of(self, group: int) -> ThroughputPolicy:
        """Each group has decisions of its own, and learns from all."""
        if group not in self._groups:
            self._groups[group] = self._twin()
        return self._groups[group]

    def apart(self) -> ThroughputPolicy:
        """One for rounds of another kind, that take as long: it shares costs and budgets, and learns what is kept."""
        other = ThroughputPolicy(self.max_depth, self.explore, self.max_nodes)
        other.costs, other._drift, other._count = self.costs, self._drift, self._count
        other._draft_budget, other._exploration_budget = self._draft_budget, self._exploration_budget
        return other

    @property
    def wants_trees(self) -> bool:
        return bool(self._trees)

    @property
    def rounds(self) -> int:
        """Those that it has seen."""
        return self._round

    @property
    def drafts(self) -> bool:
        """Whether drafting was the best there is when it was last asked."""
        return self._decision.best != PLAIN

    @property
    def _estimates(self) -> dict[str, Costs | AcceptanceByPosition | AcceptanceByRank | Calibration]:
        return {
            **self.costs,
            "positions": self.positions,
            "reached": self.reached,
            "ranks": self.ranks,
            "calibration": self.calibration,
        }

    def knowledge(self) -> dict[str, Any]:
        """What was learnt, as JSON takes it, for `start_from`."""
        tried = [plan for plan, count in self._count.items() if count >= _FIRST]
        return {
            "estimates": {name: estimate.saved() for name, estimate in self._estimates.items()},
            "gains": [[rows, gain.tokens, gain.baseline, gain.rounds] for rows, gain in self._gains.items()],
            "tried": [[plan.depth, plan.nodes, _is_early(plan), self._pause.get(plan, _EVERY)] for plan in tried],
            "drafting": self.drafts,
        }

    def start_from(self, knowledge: dict[str, Any]) -> None:
        """Begin where another engine with the same proposer ended. Before the first round.

        Raises ConfigError, KeyError, TypeError or ValueError where this is no knowledge; the policy is of no use then.
        """
        for name, estimate in self._estimates.items():
            estimate.restore(knowledge["estimates"][name])
        for rows, tokens, baseline, rounds in knowledge["gains"]:
            self._gains[int(rows)] = _Gain(float(tokens), float(baseline), int(rounds))
        for depth, nodes, early, pause in knowledge["tried"]:
            plan = Plan(int(depth), int(nodes), 0.0 if early else None)
            self._count[plan], self._pause[plan] = _FIRST, int(pause)
        if knowledge["drafting"]:
            self._decision = _Decision(self._chains[-1], self._chains[-1])
            self._baseline_check = _CHECK_AFTER_PRIOR

    def plan(self, context: Context) -> Plan:
        return self._of(context.group)._plan(context.rows, context.can)

    def _plan(self, rows: int, can: Abilities) -> Plan:
        if (rows, can) not in self._decisions:
            self._decisions[rows, can] = self._choose(rows, can)
        self._decision = self._decisions[rows, can]
        plan = self._decision.plan
        return self._early_exit(rows) if _is_early(plan) else plan

    def _choose(self, rows: int, can: Abilities) -> _Decision:
        plans = self._plans(can)
        for plan in self._first(rows, plans):
            if self._count[plan] < _FIRST:
                return _Decision(plan, plan)
        best = self._best(rows, plans)
        if self._continues(rows, best) and self._before in plans:
            return _Decision(self._before, best)
        return _Decision(self._explore(rows, plans, best) or best, best)

    def _continues(self, rows: int, best: Plan) -> bool:
        """Whether the exploration under way is to take another round."""
        explored = self._decision.is_exploration and self._before == self._decision.plan and self._run < _RUN
        return explored and self._is_close(rows, self._before, best)

    def _is_close(self, rows: int, plan: Plan, best: Plan) -> bool:
        return self._speed(rows, plan) > _CLOSE * self._speed(rows, best)

    def _plans(self, can: Abilities) -> list[Plan]:
        """What there is to choose from, the smallest first."""
        exits = can.early_exit and self.max_depth > _SHORT
        chains = [*self._chains[: _SHORT + 1], self._early] if exits else self._chains
        return chains + (self._trees if can.trees else [])

    def _first(self, rows: int, plans: list[Plan]) -> list[Plan]:
        """What comes before anything can be compared: nothing, a short chain, a long one where that gives hope."""
        chains = [plan for plan in plans if not plan.is_tree]
        first = [PLAIN, chains[min(2, len(chains) - 1)]]
        if all(self._count[plan] for plan in first) and self._speed(rows, chains[-1]) > self._speed(rows, PLAIN) / 2:
            first.append(chains[-1])
        return first

    def _speed(self, rows: int, plan: Plan) -> float:
        """Expected tokens per second and row."""
        if (rows, plan) not in self._speeds:
            self._speeds[rows, plan] = self._estimated_speed(rows, plan)
        return self._speeds[rows, plan]

    def _estimated_speed(self, rows: int, plan: Plan) -> float:
        if _is_early(plan):
            return self._best_short(rows) * self._gain(rows).factor
        tokens = self.ranks.expected_tokens(plan.nodes) if plan.is_tree else self.positions.expected_tokens(plan.depth)
        return tokens / self._seconds(rows, plan, plan.size)

    def _best_short(self, rows: int) -> float:
        return max(self._speed(rows, plan) for plan in self._chains[: _SHORT + 1])

    def _seconds(self, rows: int, plan: Plan, size: int) -> float:
        known = self.costs[_kind(plan)].estimate(rows, size)
        return (self.costs["chain"].estimate(rows, size) if known is None else known) or math.inf

    def _gain(self, rows: int) -> _Gain:
        nearest = min(self._gains, key=lambda known: abs(known - rows), default=None)
        return _Gain() if nearest is None else self._gains[nearest]

    def _best(self, rows: int, plans: list[Plan]) -> Plan:
        speeds = {plan: self._speed(rows, plan) for plan in plans}
        most = max(speeds.values())
        best = next(plan for plan in plans if speeds[plan] >= (1 - _MARGIN) * most)
        lead = _MARGIN + (self._error(rows, best) if self._decision.best == PLAIN else 0.0)
        return best if speeds[best] > (1 + lead) * speeds[PLAIN] else PLAIN

    def _error(self, rows: int, plan: Plan) -> float:
        """The standard error of a plan's seconds in those of a plain round: so much of a lead may be chance."""
        return math.hypot(self.costs[_kind(plan)].error(rows, plan.size), self.costs["chain"].error(rows, 0))

    def _early_exit(self, rows: int) -> Plan:
        """A chain that ends where a token more is worth less than what its seconds give otherwise.

        It ends before a step of the costs, too, that is not worth the tokens behind it.
        """
        speed = self._best_short(rows) * max(1.0, self._gain(rows).factor)
        if self._round % _EVERY == 0:  # now and then, to see whether the threshold is right
            return Plan(self.max_depth, stop_below=self._threshold(rows, self.max_depth, speed) / 2)
        depths = range(_SHORT + 1, self.max_depth + 1)
        worth = [self.reached.expected_tokens(d) - speed * self._seconds(rows, self._early, d) for d in depths]
        doubt = _DOUBT * speed * self._seconds(rows, self._early, self.max_depth)
        depth = max(d for d, w in zip(depths, worth, strict=True) if w >= max(worth) - doubt)
        return Plan(depth, stop_below=self._threshold(rows, depth, speed))

    def _threshold(self, rows: int, depth: int, speed: float) -> float:
        """The confidence below which a token more, of those up to `depth`, is not worth its seconds at a speed."""
        per_token = self.costs["chain"].per_token(rows, self.costs["early exit"], depth)
        return min(self.calibration.threshold(speed * per_token), 2.0)

    def _explore(self, rows: int, plans: list[Plan], best: Plan) -> Plan | None:
        """A plan to explore in place of the best, where it is time for one."""
        if best != PLAIN and self._round - self._leader_since >= self._baseline_check:
            return PLAIN
        if self._round - self._last_exploration < _EVERY:
            return None
        kinds = [[plan for plan in plans if _kind(plan) == kind and plan != PLAIN] for kind in self.costs]
        others = {max(kind, key=lambda plan: self._speed(rows, plan)) for kind in kinds if kind}
        at = plans.index(best)
        others |= {plan for plan in plans[max(at - _NEAR, 0) : at + _NEAR + 1] if _kind(plan) == _kind(best)}
        # In the order of `plans`: that of a set differs from process to process.
        possible = [plan for plan in plans if plan in others and plan not in (best, PLAIN)]
        due = [plan for plan in possible if self._round - self._seen[plan] >= self._pause.get(plan, 0)]
        affordable = [plan for plan in due if self._may_lose(rows, best, self._loss(rows, plan, best))]
        return min(affordable, key=lambda plan: self._seen[plan], default=None)

    def _may_lose(self, rows: int, best: Plan, seconds: float) -> bool:
        """Whether an exploration may lose so many seconds against the best plan, and against plain decoding."""
        free = _FREE * self._seconds(rows, PLAIN, 0)
        drafts = best != PLAIN or self._draft_budget.allows(seconds, free)
        return drafts and self._exploration_budget.allows(seconds)

    def _loss(self, rows: int, plan: Plan, best: Plan) -> float:
        """Seconds that a round of this plan is expected to lose."""
        return self._seconds(rows, plan, plan.size) * (1 - self._speed(rows, plan) / self._speed(rows, best))

    def observe(self, result: RoundResult) -> None:
        self._of(result.group)._observe(result)

    def _observe(self, result: RoundResult) -> None:
        plan, rows = result.plan, result.rows
        if _is_early(plan):
            plan = self._early if plan.depth > _SHORT else Plan(plan.depth)
        elif not plan.is_tree and plan.depth > self.max_depth:
            return
        self._round += 1
        self._run = self._run + 1 if plan == self._before else 1
        if self._run == 1:
            self._restart_costs = self._round - self._seen[plan] > _EVERY
        self._before, self._seen[plan] = plan, self._round
        self._count[plan] += 1
        size = plan.nodes if plan.is_tree else result.depth if _is_early(plan) else plan.depth
        self._time(plan, rows, size, result.seconds)
        self._learn(plan, result)
        self._record_losses(plan, rows, size, 1 + sum(result.accepted) / rows)
        self._decisions.clear()
        self._speeds.clear()

    def time_plain(self, result: RoundResult) -> None:
        """Learn what a plain round takes that another policy has planned."""
        costs = self.costs[_kind(PLAIN)]
        seconds = self._drift.normalized(result.seconds, costs.known(result.rows, 0))
        costs.add(result.rows, 0, seconds, restart=False)
        self._count[PLAIN] += 1
        self._decisions.clear()
        self._speeds.clear()

    def _time(self, plan: Plan, rows: int, size: int, seconds: float) -> None:
        """Take a round's seconds, at the machine's usual speed, unless it was the first behind another plan."""
        costs = self.costs[_kind(plan)]
        usual = costs.known(rows, size)
        normalized = self._drift.normalized(seconds, usual)
        if usual is not None and self._run == 1 and self._is_close(rows, plan, self._decision.best):
            return
        costs.add(rows, size, normalized, self._restart_costs)
        self._restart_costs = False

    def _learn(self, plan: Plan, result: RoundResult) -> None:
        if plan.is_tree:
            self.ranks.add(plan.nodes, result.paths)
        elif _is_early(plan):
            self.calibration.add(result.confidences, result.drafted, result.accepted)
            self.reached.add(result.depth, result.accepted)
            # Further on are those alone that were likely to be kept.
            self.positions.add(min(result.depth, _SHORT), result.accepted)
            seconds = self._seconds(result.rows, plan, result.depth)
            gain = self._gains.setdefault(result.rows, replace(self._gain(result.rows)))
            gain.add(1 + sum(result.accepted) / result.rows, seconds * self._best_short(result.rows))
        else:
            self.positions.add(plan.depth, result.accepted)

    def _record_losses(self, plan: Plan, rows: int, size: int, tokens: float) -> None:
        """What drafting lost against plain decoding, and exploration against the best plan."""
        decision, seconds = self._decision, self._seconds(rows, plan, size)
        plain = self._seconds(rows, PLAIN, 0)
        is_first = decision.plan == decision.best == plan and self._count[plan] <= _FIRST
        most = _FREE_FIRST * plain if is_first else math.inf
        self._draft_budget.record(seconds, min(plain, seconds) * tokens if plan.depth else None, most)
        explored = decision.is_exploration and plan == decision.plan
        counts = explored and plan.depth
        self._exploration_budget.record(seconds, tokens / self._speed(rows, decision.best) if counts else None)
        if explored:
            self._last_exploration = self._round
            if self._run == 1:
                self._pause[plan] = min(2 * self._pause.get(plan, _EVERY), _LAST_CHECK)
            if plan == PLAIN and not self._continues(rows, decision.best):
                self._leader_since, self._baseline_check = self._round, min(2 * self._baseline_check, _LAST_CHECK)
        elif plan == PLAIN:
            self._leader_since, self._baseline_check = self._round, _CHECK
