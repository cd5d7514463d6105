"""Drafting as much as pays, by what rounds cost and drafts yield here and now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from eagle_mlx.policy.base import BEHIND, Limits, Outcome, Shape, check_depth, check_share
from eagle_mlx.policy.costs import Costs
from eagle_mlx.policy.elastic import ElasticChains
from eagle_mlx.policy.ledger import Ledger
from eagle_mlx.policy.looks import PlainLooks, Visits
from eagle_mlx.policy.siblings import Siblings
from eagle_mlx.policy.swings import Swings
from eagle_mlx.policy.yields import AcceptanceByPosition, AcceptanceByRank

MOST_TOKENS = 8
"""Of a chain, unless something else is asked for: elastic ones seldom get so far."""
_FIRST_DEPTH = 2
_HOPE = 0.5
"""What the longest chain must promise of the speed of plain decoding, by two rounds of a short one, to be tried."""
_FIRST_SAMPLES = 2
"""Rounds of each kind before the policy chooses: the first may compile kernels."""
_MARGIN = 0.02
"""Of shapes whose speeds are this close the smallest is taken: a guess may be wrong, a token not drafted is free."""
_PROBE_SOON, _PROBE_EVERY = 8, 32
"""Rounds from one look at another shape to the next: at first, and later on."""
_CLOSE = 0.9
"""A shape that promises more than that share of the best is looked at for a few rounds on end, others for one."""
_GAIN, _KEEP = 0.08, 0.03
"""What drafting must promise beyond plain decoding to take the lead, and to keep it: promises are as uncertain as what
they are made of, and of those that are noise the largest would be taken.
"""
_STANDS, _SETTLED = 8, 16
"""Rounds that a choice stands for, once it has for so many times as many: comparing takes the host's time."""
_TREE_MARGIN, _TREE_DOUBT = 0.03, 0.2
"""What a tree must promise beyond the best chain, and how much more of it by the root of the rounds that it was tried:
of promises those that are noise would be taken first.
"""
_TRY_EVERY, _TREE_SHARE = 8, 0.0025
"""Rounds from one try of a tree that promises more than the best chain, but not enough, to the next, at least; and what
tries may lose against that chain, of all time.
"""
_MOST_MORE = 0.4
"""What the first tree that is tried may take beyond a chain as deep: such trees seldom give more tokens than that."""
_SHORT = BEHIND + 1
"""Elastic chains are never shorter. They make up for every longer chain of fixed depth, not for those up to it."""
_SIZES = (6, 8, 12, 16, 24, 32, 48, 64)
"""Draft tokens of the trees that are looked at."""


def levels_for(nodes: int) -> int:
    """How deep a tree of so many tokens may be: deeper than pays for a chain, as far as there are tokens for it."""
    return max(1, min(3 + nodes // 4, 8, nodes - 1))


def _fastest(speeds: dict[Shape, float]) -> tuple[Shape, float]:
    """The first shape that is as fast as the fastest to within the margin, and the speed of that."""
    most = max(speeds.values())
    return next(shape for shape, speed in speeds.items() if speed >= (1 - _MARGIN) * most), most


class ThroughputPolicy:
    """Chooses what to draft by the most expected tokens per second, nothing included.

    Expected tokens come from the acceptance by draft position, or in trees by rank; seconds from the rounds' own
    durations by rows and shape. Where a proposer can say how sure it is, long chains are elastic: they end as soon as a
    token more is worth less than what decoding gives in its time otherwise. Where trees can be had, tokens stand beside
    them by the same measure; larger trees are of a few fixed sizes.

    Every 32nd round, and sooner at first, there may be a look at a shape beside the best: a few rounds on end where the
    race is close, since the first one behind another shape takes longer. Every eighth looks at a tree that promises
    more than chains, until that is certain enough for it to be taken; now and then, and soon after drafting took the
    lead, there is a look at plain decoding. Where drafting has lost time against that, looks at drafts wait until the
    loss is less than `explore` of all the time: a useless proposer costs that share and the first few rounds. Trees
    that were tried in vain wait in the same way. Raises ConfigError for values out of range.
    """

    def __init__(self, max_depth: int = MOST_TOKENS, explore: float = 0.005, max_nodes: int = 0):
        """`max_nodes`: the most tokens of a draft tree; 0 for chains alone, which are at most `max_depth` long."""
        check_depth("max_depth", max_depth)
        check_depth("max_nodes", max_nodes)
        check_share("explore", explore)
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.costs, self.tree_costs = Costs(), Costs()
        self.acceptance, self.ranks = AcceptanceByPosition(), AcceptanceByRank()
        self.elastic, self.siblings = ElasticChains(), Siblings()
        self.swings = Swings()
        self._chains = [Shape.chain(depth) for depth in range(max_depth + 1)]
        self._open = Shape(max_depth, max_depth, elastic=True)
        sizes = sorted({size for size in _SIZES if size < max_nodes} | ({max_nodes} if max_nodes else set()))
        grown = [Shape(levels_for(size), size) for size in sizes]
        self._trees = [shape for shape in grown if shape.is_tree]
        self._round = self._last_probe = 0
        self._last_seen: Counter[Shape] = Counter()
        self._samples: Counter[Shape] = Counter()
        self._drafts, self._tries = Ledger(explore), Ledger(_TREE_SHARE)
        """Of drafting beside plain decoding, and of trees beside chains."""
        self._looks, self._visits = PlainLooks(), Visits()
        self._leader, self._stands = self._chains[0], 0
        """What was found to be the best, and for how many rounds it is to stand."""
        self._chosen: dict[tuple[int, bool, bool], Shape] = {}
        """What was answered to whoever asked, while that stands."""
        self._known: dict[tuple[int, Shape, int], dict[Shape, float]] = {}
        self._slopes: dict[int, float] = {}
        """Speeds, and what tokens take, until they are found anew."""

    @property
    def wants_trees(self) -> bool:
        return bool(self._trees)

    def depth(self, rows: int) -> int:
        return self.shape(rows, trees=False).depth

    def shape(self, rows: int, trees: bool, elastic: bool = False) -> Shape:
        asked = rows, trees, elastic
        if asked not in self._chosen:
            self._chosen[asked] = self._choose(rows, trees, elastic and self.max_depth > _SHORT)
        return self._chosen[asked]

    def _choose(self, rows: int, trees: bool, elastic: bool) -> Shape:
        for first in self._first(rows, elastic):
            if self._samples[first] < _FIRST_SAMPLES:
                return first
        best = self._best(rows, trees, elastic)
        if (visited := self._visited(trees, elastic)) and self._is_close(rows, visited, best):
            return visited
        if trees and not best.is_tree and (tree := self._promising(rows, elastic)) is not None:
            return tree
        if best.depth and self._looks.due(self._plain_share(rows, elastic)):
            return self._chains[0]
        waits = self._round - self._last_probe < self._wait or not self._drafts.allows
        return best if waits else self._probe(rows, trees, elastic, best)

    @property
    def _wait(self) -> int:
        """Rounds from one look at another shape to the next: the fewer the less is known."""
        return min(_PROBE_EVERY, max(_PROBE_SOON, self._round // 4))

    def _is_close(self, rows: int, shape: Shape, best: Shape) -> bool:
        """Whether what two shapes promise is so close that it takes a run of rounds to tell which is faster."""
        return self._promise(rows, shape) > _CLOSE * self._promise(rows, best)

    def _promise(self, rows: int, shape: Shape) -> float:
        """Tokens per second and row; none of a tree that was cut because rows end."""
        if shape.elastic:
            return self._rival(rows) * self.elastic.advantage(rows)
        return self._speeds(rows, self._trees if shape.is_tree else self._chains).get(shape, 0.0)

    def _visited(self, trees: bool, elastic: bool) -> Shape | None:
        """A shape beside the leader that is being looked at, while that look is to go on."""
        shape = self._visits.shape
        if shape is None or not self._visits.unfinished or shape in (self._leader, self._chains[0]):
            return None
        if shape.is_tree:
            return shape if trees else None
        return shape if shape.elastic == elastic or shape in self._fixed(elastic) else None

    def _plain_share(self, rows: int, elastic: bool) -> float:
        """The speed of plain decoding, that of the best way to draft = 1."""
        plain = self._speeds(rows, self._fixed(elastic))[self._chains[0]]
        best = self._best_tree(rows)[1] if self._leader.is_tree else 0.0
        return plain / max(best, self._best_chain(rows, elastic)[1])

    def _promising(self, rows: int, elastic: bool) -> Shape | None:
        """A tree that may be faster than chains, and may be tried: seldom, and once drafting has led for a while."""
        chain, speed = self._best_chain(rows, elastic)
        if not chain.depth or not self._tries.allows or self._looks.ahead < _PROBE_EVERY:
            return None
        if not self._tried_trees:
            smallest = next(iter(self._trees), None)
            return smallest if smallest and not (elastic and self._is_hopeless(rows, smallest)) else None
        tree, promised = self._best_tree(rows)
        due = tree is not None and self._round - self._last_seen[tree] >= _TRY_EVERY
        return tree if due and promised > speed else None

    def _is_hopeless(self, rows: int, tree: Shape) -> bool:
        """Whether a tree would take too long, as far as that is known from chains and what stood beside them."""
        chain = self.elastic.costs.estimate(rows, tree.depth)
        return chain is None or (tree.nodes - tree.depth) * self._sibling_seconds(rows) > _MOST_MORE * chain

    def _best_tree(self, rows: int) -> tuple[Shape | None, float]:
        return _fastest(self._speeds(rows, self._trees)) if self._trees else (None, 0.0)

    def limits(self, rows: int, trees: bool) -> Limits:
        pace, slope = self._pace(rows), self._slope(rows)
        enough = self.elastic.enough(pace, slope)
        if not trees or self._looks.ahead < _PROBE_EVERY:
            return Limits(enough)
        return Limits(enough, self.siblings.beside(rows, pace, slope, self.max_nodes, self._tries.allows))

    def _slope(self, rows: int) -> float:
        """Seconds of a token more in an elastic chain, of all rows."""
        if rows not in self._slopes:
            self._slopes[rows] = self.elastic.slope(rows, self.costs)
        return self._slopes[rows]

    def _pace(self, rows: int) -> float:
        """Tokens per second and row that there are to lose while an elastic chain is drafted."""
        return self._rival(rows) * max(1.0, self.elastic.advantage(rows))

    def _rival(self, rows: int) -> float:
        """Tokens per second and row that the fastest short chain promises, none included."""
        return _fastest(self._speeds(rows, self._fixed(elastic=True)))[1]

    def _fixed(self, elastic: bool) -> list[Shape]:
        """The chains of fixed depth that there is a use for."""
        return self._chains[: _SHORT + 1] if elastic else self._chains

    def _first(self, rows: int, elastic: bool) -> Iterator[Shape]:
        """The shapes that are tried before there is a choice: none, a short one, and where that gives hope the longest,
        so that what lies between is not guessed from what drafting takes at all.
        """
        none, longest = self._chains[0], self._chains[-1]
        yield none
        yield self._chains[min(_FIRST_DEPTH, self.max_depth)]
        if elastic:
            yield self._open
        elif self._promise(rows, longest) > _HOPE * self._promise(rows, none):
            yield longest

    def _best(self, rows: int, trees: bool, elastic: bool, drafting: bool = False) -> Shape:
        """The fastest, or the smallest that is as fast within the margin; of those that draft, where asked for.

        A tree where it is faster than the fastest chain by more than the margin of trees.
        """
        chain, speed = self._best_chain(rows, elastic, drafting)
        tree, promised = self._best_tree(rows) if trees else (None, 0.0)
        if tree is not None:
            doubt = max(_TREE_MARGIN, _TREE_DOUBT / math.sqrt(max(self._samples[tree], 1)))
            if promised > (1 + doubt) * speed:
                return tree
        return chain

    def _best_chain(self, rows: int, elastic: bool, drafting: bool = False) -> tuple[Shape, float]:
        """The fastest chain and what it promises; plain decoding where that is not clearly more."""
        fixed = self._fixed(elastic)
        chain, speed = _fastest(self._speeds(rows, (drafting and fixed[1:]) or fixed))
        if elastic and (promised := self._rival(rows) * self.elastic.advantage(rows)) > speed:
            chain, speed = self._open, promised
        plain = self._speeds(rows, fixed)[fixed[0]]
        gain = _KEEP if self._looks.ahead else _GAIN
        return (chain, speed) if drafting or speed > (1 + gain) * plain else (fixed[0], plain)

    def _speeds(self, rows: int, shapes: Sequence[Shape]) -> dict[Shape, float]:
        """Expected tokens per second and row, from the smallest shape to the largest."""
        key = rows, shapes[0], len(shapes)
        if key not in self._known:
            seconds, speeds = math.inf, {}
            for shape in reversed(shapes):
                # A round costs no more than a larger one: where it seems to, the machine was busy when it was measured.
                seconds = min(seconds, self._seconds(rows, shape) or math.inf)
                speeds[shape] = self._expected_tokens(shape) / seconds
            self._known[key] = dict(reversed(speeds.items()))
        return self._known[key]

    def _seconds(self, rows: int, shape: Shape) -> float | None:
        if shape.is_tree:
            return self.tree_costs.estimate(rows, shape.nodes)
        asked = self.elastic.costs.known(rows, shape.depth)  # the same chain, and questions
        seconds = self.costs.estimate(rows, shape.depth)
        return seconds if asked is None or seconds is None else min(seconds, asked)

    def _expected_tokens(self, shape: Shape) -> float:
        if shape.is_tree:
            return self.ranks.expected_tokens(shape.nodes)
        return self.acceptance.expected_tokens(shape.depth)

    def _probe(self, rows: int, trees: bool, elastic: bool, best: Shape) -> Shape:
        """While drafting, a neighbour, or the best of the other kind, whichever was tried the longest ago; else the
        best way to draft.
        """
        if best == self._chains[0]:
            return self._best(rows, trees, elastic, drafting=True)
        others = {self._open} if elastic else set()
        may_branch = trees and self._tried_trees and (best.is_tree or self._tries.allows)
        for kind in (self._fixed(elastic), self._trees if may_branch else []):
            if best in kind:
                at = kind.index(best)
                others.update(kind[max(at - 1, 0) : at + 2])
            elif kind:
                speeds = self._speeds(rows, kind)
                others.add(max(speeds, key=lambda shape: speeds[shape]))
        others -= {best, self._chains[0]}
        return min(others, key=lambda shape: (self._last_seen[shape], shape.nodes), default=best)

    def observe(self, depth: int, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        if depth > self.max_depth:
            return
        rows = len(accepted)
        if self._times_plain(rows) if depth == 0 else self._tells(self.costs, rows, self._chains[depth]):
            self.costs.add(rows, depth, self._steadied(self.costs, rows, depth, seconds))
        self.acceptance.add(depth, accepted)
        self._count(rows, self._chains[depth], sum(accepted), self.costs.estimate(rows, depth))

    def observe_tree(self, shape: Shape, kept: Sequence[Sequence[int]], seconds: float) -> None:
        if self._tells(self.tree_costs, len(kept), shape):
            steadied = self._steadied(self.tree_costs, len(kept), shape.nodes, seconds)
            self.tree_costs.add(len(kept), shape.nodes, steadied)
        self.ranks.add(shape.nodes, kept)
        self._count(len(kept), shape, sum(map(len, kept)), self._seconds(len(kept), shape))

    def observe_elastic(self, outcome: Outcome, seconds: float) -> None:
        rows, depth = len(outcome.accepted), outcome.depth
        costs, more = self.elastic.costs, outcome.beside * self._sibling_seconds(rows)
        known = costs.known(rows, depth)
        steadied = self.swings.steadied(seconds, known and known + more)
        if self._trees and known is not None:
            usual = known + more
            self.siblings.add(outcome, min(max(steadied, 0.75 * usual), 1.5 * usual))
            more = outcome.beside * self._sibling_seconds(rows)
            self._tries.enter(more, sum(number is not None for number in outcome.aside) / rows / self._pace(rows))
        tells = self._tells(costs, rows, self._open, depth)
        self.elastic.add(outcome, steadied - more if tells else None, self._rival(rows), more)
        self.acceptance.add(min(depth, _SHORT), outcome.accepted)  # further on are those alone that were likely to be
        self._count(rows, self._open, sum(outcome.kept), (costs.estimate(rows, depth) or seconds) + more)

    def _sibling_seconds(self, rows: int) -> float:
        """What a token beside a chain takes, of all rows."""
        return self.siblings.seconds(rows, self._slope(rows))

    def _steadied(self, costs: Costs, rows: int, size: int, seconds: float) -> float:
        """What a round would have taken at the machine's usual speed."""
        return self.swings.steadied(seconds, costs.known(rows, size))

    def _count(self, rows: int, shape: Shape, accepted: int, seconds: float | None) -> None:
        self._round += 1
        self._visits.count(shape, asked=shape in self._chosen.values())
        self._samples[shape] += 1
        self._last_seen[shape] = self._round
        self._looks.count(not shape.depth, self._leader.depth > 0)
        self._stands -= 1
        if self._stands <= 0 or shape != self._leader:
            self._compare(rows, shape)
        assert seconds is not None
        self._account(rows, shape, rows + accepted, seconds)

    def _compare(self, rows: int, shape: Shape) -> None:
        """Find what leads now, behind a round of `shape`, which was a look beside it if it is another."""
        self._known.clear()
        self._slopes.clear()
        self._chosen.clear()
        self._leader = self._best(rows, trees=self._tried_trees, elastic=self._tried_open)
        if shape not in (self._leader, self._chains[0]):
            self._last_probe = self._round
        self._stands = min(_STANDS, (self._looks.ahead if self._leader.depth else self._round) // _SETTLED)

    def _tells(self, costs: Costs, rows: int, shape: Shape, size: int | None = None) -> bool:
        """Whether what this round took counts, in which was drafted."""
        if self._visits.tells(shape) or costs.known(rows, size or shape.nodes) is None:
            return True
        return not self._is_close(rows, shape, self._leader)

    def _times_plain(self, rows: int) -> bool:
        """Whether what this plain round took counts."""
        return not self._samples[self._chains[0]] or self._looks.tells(self._plain_share(rows, self._tried_open))

    @property
    def _tried_open(self) -> bool:
        return self._samples[self._open] > 0

    @property
    def _tried_trees(self) -> bool:
        return any(self._samples[shape] for shape in self._trees)

    def _account(self, rows: int, shape: Shape, tokens: int, seconds: float) -> None:
        """What drafting has lost against plain decoding, and trees against chains."""
        plain = self._seconds(rows, self._chains[0])
        self._drafts.pass_time(seconds)
        self._tries.pass_time(seconds)
        if shape.depth and plain is not None:
            self._drafts.enter(seconds, tokens / rows * min(plain, seconds))
        if shape.is_tree:
            self._tries.enter(seconds, tokens / rows / self._best_chain(rows, self._tried_open)[1])
