"""What draft trees could gain at most over the best chain, from recorded drafts and measured costs.

    python benchmarks/tree_bound.py [--prompts 40] [--temperature 0] [--costs 1 1.16 0.06 0.02]

Before every round of greedy decoding the head draws a large tree, and notes how likely each node seemed to it; what the
target then said tells which nodes were right. Rounds of chains and trees, in turn over the same prompts, give the cost
of a level, of a node, and of being a tree at all. With both, every way of choosing what to draft can be priced: each
line below is the best of its kind, its settings chosen on these very rounds, so it is more than a policy can reach that
has to learn them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter

import numpy as np

import eagle_mlx as em
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.lanes import tune_process
from eagle_mlx.loops import is_loop
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.policy.base import BEHIND, FLANK
from eagle_mlx.policy.siblings import doubts_of, shares_of
from eagle_mlx.proposers.base import Draft
from eagle_mlx.proposers.head import HeadProposer, HeadState
from eagle_mlx.sampling import SamplingBatch
from eagle_mlx.serve.prompts import encode, read_prompts

# isort: split
# Behind eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
LEVELS, NODES = 8, 64
TIMED = ((0, 0), (2, 0), (4, 0), (6, 0), (8, 0), (4, 8), (6, 9), (6, 12), (6, 16), (8, 12), (8, 24))
"""Depths and nodes of the rounds that are timed; 0 nodes for chains."""
_TURN = 4
"""Rounds of each kind in turn."""
_BINS = np.array([0, 0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.001])


@dataclass(frozen=True)
class Drawn:
    """A tree as it was drawn, its nodes in the order of their chances, numbers from 0 on."""

    position: int
    """Of its first token in the row's text."""
    tokens: list[int]
    parents: list[int]
    """-1 below the text."""
    chances: np.ndarray[tuple[int], np.dtype[np.float64]]

    @cached_property
    def depths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return np.array(depths)


@dataclass(frozen=True)
class Tried:
    """What became of it."""

    chances: np.ndarray[tuple[int], np.dtype[np.float64]]
    """How often nodes that seemed as likely were right."""
    depths: np.ndarray[tuple[int], np.dtype[np.int64]]
    right: np.ndarray[tuple[int], np.dtype[np.bool_]]
    chain: list[int]
    """The nodes of the likeliest branch."""
    beside: list[int]
    """Those that stand beside them, the likeliest first."""

    def kept(self, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
        """How deep the target would have followed a tree of the nodes chosen."""
        return int(self.depths[chosen & self.right].max(initial=0))


@dataclass(frozen=True)
class Cost:
    """Milliseconds, or whatever unit was given."""

    plain: float
    draft: float
    """Of a round that drafts, without what it drafts."""
    level: float
    node: float
    tree: float = 0.0
    """What being a tree takes."""

    def chain(self, depth: float) -> float:
        return self.draft + (self.level + self.node) * depth

    def grown(self, levels: float, nodes: float) -> float:
        return self.draft + self.tree + self.level * levels + self.node * nodes


class Recorder(HeadProposer):
    """Drafts chains, and notes the tree that it could have drafted."""

    def __init__(self, head: DraftHead):
        super().__init__(head)
        self.drawn: list[Drawn] = []

    def open(self, prompts: Sequence[Sequence[int]]) -> HeadState:
        return _Recording(self, len(prompts))


class _Recording(HeadState):
    def propose(self, depth: int, sampling: SamplingBatch, positions: mx.array) -> Draft:
        draft = self.propose_tree(LEVELS, NODES, sampling, positions)
        tree = draft.tree
        assert isinstance(self.proposer, Recorder)
        assert tree is not None
        assert tree.scores is not None
        parents = np.array(tree.parents)[0] - 1
        chances = np.exp(np.array(tree.scores, np.float64)[0])
        tokens = np.array(draft.tokens)[0].tolist()
        position = int(np.array(positions)[0])
        self.proposer.drawn.append(Drawn(position, tokens, parents.tolist(), chances))
        return super().propose(depth, sampling, positions)


def record(target: em.Target, head: DraftHead, prompts: list[list[int]], params: em.SamplingParams) -> list[Tried]:
    """The trees of all rounds of these prompts; texts that loop are left out."""
    recorder = Recorder(head)
    engine = em.Engine(target, recorder, FixedPolicy(3), max_batch=1)
    found = []
    for prompt in prompts:
        recorder.drawn = []
        [out] = engine.generate([prompt], params)
        if not is_loop(out.tokens):
            text = [*prompt, *out.tokens]
            found += [(drawn, _right(drawn, text)) for drawn in recorder.drawn]
    usual = _calibrated(found)
    return [Tried(usual(drawn.chances), drawn.depths, right, *_chain(drawn)) for drawn, right in found]


def _right(drawn: Drawn, text: list[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    right: list[bool] = []
    for token, parent, depth in zip(drawn.tokens, drawn.parents, drawn.depths, strict=True):
        place = drawn.position + depth - 1
        right.append(bool(parent < 0 or right[parent]) and bool(place < len(text) and text[place] == token))
    return np.array(right)


def _chain(drawn: Drawn) -> tuple[list[int], list[int]]:
    """From the likeliest first token always the likeliest that follows; and what stands beside these."""
    chain, beside, last = list[int](), list[int](), -1
    while below := [node for node, parent in enumerate(drawn.parents) if parent == last]:
        chain.append(below[0])
        beside += below[1 : FLANK + 1]
        last = below[0]
    return chain, sorted(beside)


Found = Sequence[tuple[Drawn, np.ndarray[tuple[int], np.dtype[np.bool_]]]]


def _calibrated(found: Found) -> Callable[..., np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """From what the head takes a node's chance to be to what it was."""
    claimed = np.concatenate([drawn.chances for drawn, _ in found])
    right = np.concatenate([right for _, right in found])
    bins = np.digitize(claimed, _BINS)
    rates = np.array([right[bins == number].mean() if (bins == number).any() else 0.0 for number in range(len(_BINS))])
    return lambda chances: rates[np.digitize(chances, _BINS)]


def time_rounds(target: em.Target, head: DraftHead, prompts: list[list[int]], params: em.SamplingParams) -> Cost:
    """Medians of whole rounds, laid on a plane."""
    engines = {
        (depth, nodes): em.Engine(target, HeadProposer(head) if depth else None, FixedPolicy(depth, nodes), max_batch=1)
        for depth, nodes in TIMED
    }
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in TIMED}
    for prompt in prompts:
        turns = {shape: _turns(engine, prompt, params, seconds[shape]) for shape, engine in engines.items()}
        while turns:
            for shape in list(turns):
                if next(turns[shape], None) is None:
                    del turns[shape]
    return _fitted({shape: 1e3 * statistics.median(taken) for shape, taken in seconds.items()})


def _turns(engine: em.Engine, prompt: list[int], params: em.SamplingParams, seconds: list[float]) -> Iterator[bool]:
    row = engine.prepare(prompt, params)
    engine.submit(row)
    engine.step()
    while not row.finish_reason:
        for number in range(_TURN):
            start = perf_counter()
            engine.step()
            if row.finish_reason:
                return
            if number:  # the first follows other engines' work
                seconds.append(perf_counter() - start)
        yield True


def _fitted(rounds: dict[tuple[int, int], float]) -> Cost:
    drafting = [(depth, nodes or depth, float(nodes > 0)) for depth, nodes in rounds if depth]
    equations = np.array([(1.0, depth, nodes, tree) for depth, nodes, tree in drafting])
    taken = np.array([ms for (depth, _), ms in rounds.items() if depth])
    draft, level, node, tree = np.linalg.lstsq(equations, taken, rcond=None)[0]
    print("milliseconds a round: " + ", ".join(f"{d} deep {n or d} nodes {ms:.1f}" for (d, n), ms in rounds.items()))
    return Cost(rounds[0, 0], float(draft), float(level), float(node), max(float(tree), 0.0))


@dataclass(frozen=True)
class Best:
    speed: float = 0.0
    """Tokens a millisecond."""
    tokens: float = 0.0
    """A round."""
    how: str = ""


def best(tried: list[Tried], ways: Ways) -> Best:
    """The fastest of the ways to choose, each of which says what a round keeps and costs."""
    found = Best()
    for how, way in ways:
        rounds = [way(one) for one in tried]
        tokens = sum(1 + kept for kept, _ in rounds)
        speed = tokens / sum(ms for _, ms in rounds)
        if speed > found.speed:
            found = Best(speed, tokens / len(rounds), how)
    return found


def _first(one: Tried, nodes: list[int]) -> int:
    """How many of a chain's nodes are kept."""
    return sum(bool(one.right[node]) for node in nodes)


Ways = Iterator[tuple[str, Callable[[Tried], tuple[int, float]]]]
"""What a way to choose is called; of a round the draft tokens that it keeps, and its milliseconds."""


def chains(cost: Cost) -> Ways:
    for depth in range(1, LEVELS + 1):

        def way(one: Tried, depth: int = depth) -> tuple[int, float]:
            return _first(one, one.chain[:depth]), cost.chain(depth)

        yield f"{depth} deep", way


def _elastic(one: Tried, least: float, behind: int) -> int:
    depth = min(behind + 1, len(one.chain))
    while depth < len(one.chain) and one.chances[one.chain[depth - 1 - behind]] >= least:
        depth += 1
    return depth


def elastic_chains(cost: Cost, behind: int) -> Ways:
    """A chain goes on while the node `behind` its newest is likely enough."""

    def way(one: Tried, least: float) -> tuple[int, float]:
        depth = _elastic(one, least, behind)
        return _first(one, one.chain[:depth]), cost.chain(depth)

    for least in np.arange(0.05, 0.7, 0.05):
        yield f"while {least:.2f} likely", partial(way, least=float(least))


def flanked_chains(cost: Cost, behind: int) -> Ways:
    """The same, and beside the chain as many tokens as by its chances take a large enough share of its doubt."""

    def way(one: Tried, least: float, share: float) -> tuple[int, float]:
        depth = _elastic(one, least, behind)
        known = [float(one.chances[node]) for node in one.chain[: max(0, depth - behind)]]
        count = sum(each >= share for each in shares_of(doubts_of(known, depth)))
        aside = [node for node in one.beside if one.depths[node] <= depth][:count]
        chosen = np.zeros(len(one.right), np.bool_)
        chosen[one.chain[:depth] + aside] = True
        return one.kept(chosen), cost.grown(depth, depth + len(aside)) if aside else cost.chain(depth)

    for least in np.arange(0.05, 0.7, 0.05):
        for share in (0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.2, 0.3):
            how = f"while {least:.2f} likely, beside it shares from {share}"
            yield how, partial(way, least=float(least), share=share)


def trees(cost: Cost) -> Ways:
    for levels in range(2, LEVELS + 1):
        for nodes in (4, 6, 8, 10, 12, 16, 24, 32):

            def way(one: Tried, levels: int = levels, nodes: int = nodes) -> tuple[int, float]:
                shallow = one.depths <= levels
                return one.kept(shallow & (np.cumsum(shallow) <= nodes)), cost.grown(levels, nodes)

            yield f"{levels} deep, {nodes} nodes", way


def elastic_trees(cost: Cost, behind: int) -> Ways:
    """Levels are added while the likeliest node `behind` the newest is likely enough; likely nodes are verified."""

    def way(one: Tried, deep: float, wide: float) -> tuple[int, float]:
        levels = behind + 1
        while levels < LEVELS and one.chances[one.depths == levels - behind].max(initial=0.0) >= deep:
            levels += 1
        chosen = (one.depths <= levels) & (one.chances >= wide)
        return one.kept(chosen), cost.grown(levels, int(chosen.sum()))

    for deep in np.arange(0.1, 0.55, 0.05):
        for wide in (0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.2):
            yield f"levels while {deep:.2f}, nodes from {wide}", partial(way, deep=float(deep), wide=wide)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(CHECKPOINTS / "target"))
    parser.add_argument("--head", default=str(CHECKPOINTS / "head"))
    parser.add_argument("--prompts", type=int, default=40, help="the first so many of checkpoints/prompts.jsonl")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--costs",
        type=float,
        nargs=4,
        metavar=("PLAIN", "DRAFT", "LEVEL", "NODE"),
        help="of a plain round, of one that drafts, of a level and of a node, in any unit, instead of measuring them",
    )
    args = parser.parse_args()
    tune_process()
    target = em.load_target(args.target)
    head = em.load_head(args.head, target)
    rows = read_prompts(CHECKPOINTS / "prompts.jsonl", args.prompts)
    prompts = [encode(row, target, args.max_tokens) for row in rows]
    params = em.SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
    tried = record(target, head, prompts, params)
    cost = Cost(*args.costs) if args.costs else time_rounds(target, head, prompts, params)
    print(
        f"a plain round {cost.plain:.2f}; one that drafts {cost.draft:.2f}, a level {cost.level:.2f}, a node "
        f"{cost.node:.2f}, being a tree {cost.tree:.2f}; {len(tried):,} rounds recorded"
    )
    report(tried, cost)


def report(tried: list[Tried], cost: Cost) -> None:
    kinds = {
        "best chain": best(tried, chains(cost)),
        f"elastic chain, asked {BEHIND} behind": best(tried, elastic_chains(cost, BEHIND)),
        "elastic chain, asked at once": best(tried, elastic_chains(cost, 0)),
        f"elastic chain and what pays beside it, asked {BEHIND} behind": best(tried, flanked_chains(cost, BEHIND)),
        "best tree": best(tried, trees(cost)),
        f"elastic tree, asked {BEHIND} behind": best(tried, elastic_trees(cost, BEHIND)),
        "elastic tree, asked at once": best(tried, elastic_trees(cost, 0)),
    }
    chain = kinds["best chain"].speed
    print("| | tokens a round | of plain | of the best chain | |\n|---|---|---|---|---|")
    for name, found in kinds.items():
        cells = f"{found.tokens:.2f} | {found.speed * cost.plain:.2f} | {found.speed / chain:.3f} | {found.how}"
        print(f"| {name} | {cells} |")


if __name__ == "__main__":
    main()
