"""Measure the parts of a round: the forwards of target and head, and everything else.

    python benchmarks/round_parts.py
    python benchmarks/round_parts.py --target Qwen3-4B-4bit --head out/head --depth 1 4 --context 1024 4096 16384

Prints the costs of a target step, a verify, a draft step and a rollback. Then prints the parts of whole rounds, plain
and with the largest depth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx
from step_costs import measure_costs, measure_rollback

from eagle_mlx.cache import RaggedCache
from eagle_mlx.catalog import embedded
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.prefill import Prefill
from eagle_mlx.engine.prefix_tree import Past
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.precision import in_dtype
from eagle_mlx.machine import describe
from eagle_mlx.plan import PREFILL_CHUNK, Plan
from eagle_mlx.proposers.base import Observation
from eagle_mlx.proposers.head import HeadProposer, HeadState

_WARM_UP = 5


@dataclass(frozen=True)
class Breakdown:
    """Median milliseconds of rounds of one row at about `context` tokens, `depth` drafted."""

    context: int
    depth: int
    round_ms: float
    """As the engine runs it."""
    forwards_ms: float
    """Only the same forwards of head and target, timed in turn with the rounds."""
    rest: float
    """The share of a round outside the forwards: median of the pairs."""
    stages_ms: dict[str, float]
    """A round with a wait after each stage, which takes extra time."""

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {ms:.2f}" for name, ms in self.stages_ms.items())
        return (
            f"round at {self.context} tokens, {self.depth} drafted: {self.round_ms:.2f} ms, of which forwards "
            f"{self.forwards_ms:.2f} ms, the rest {self.rest:.1%}; stage by stage: {stages} ms"
        )


def measure_breakdown(
    target: em.Target, head: DraftHead | None, depth: int, context: int = 128, rounds: int = 60
) -> Breakdown:
    """Measure rounds of a greedy row, each followed by its forwards alone. Without a head or depth, rounds are plain.

    The context may exceed the model's own: costs do not depend on the content.
    """
    target = copy(target)
    target.context_length = max(target.context_length, 2 * context + 8 * (depth + 1) * rounds)
    proposer = HeadProposer(head) if head is not None and depth else None
    depth = depth if proposer is not None else 0
    engine = em.Engine(target, proposer, policy=em.FixedPolicy(depth), max_batch=1, prefix_cache_bytes=1 << 60)
    prompt = [1 + (7 * i) % 97 for i in range(context)]
    long = em.SamplingParams(max_tokens=(depth + 1) * (rounds + _WARM_UP + 1) + 1, ignore_eos=True)
    row = engine.prepare(prompt, long)
    past = _read(Batch(target, proposer, [row]))
    assert engine.prefixes is not None
    engine.prefixes.keep(prompt, past)  # read a long prompt only once
    engine.submit(row)
    while not row.tokens:
        engine.step()
    forwards = _Forwards(target, proposer, past, depth)
    pairs = []
    for _ in range(rounds + _WARM_UP):
        before = row.length
        whole = _seconds(engine.step)
        mx.synchronize()
        seen = row.length - before
        pairs.append((whole, _seconds(lambda at=before, seen=seen: forwards.run(at, seen))))  # type: ignore[misc]
    engine.cancel(row)
    pairs = pairs[_WARM_UP:]
    return Breakdown(
        context,
        depth,
        1e3 * statistics.median(whole for whole, _ in pairs),
        1e3 * statistics.median(alone for _, alone in pairs),
        statistics.median(1 - alone / whole for whole, alone in pairs),
        _stages(Batch(target, proposer, [engine.prepare(prompt, long)], engine.prefixes.find(prompt)), depth, rounds),
    )


def _read(batch: Batch) -> Past:
    """Return the past of a single row after prefill."""
    prefill = Prefill(batch)
    while prefill.left:
        prefill.step(PREFILL_CHUNK)
    *_, past = batch.pasts(0)  # the target's is last
    return past


class _Forwards:
    """Only a round's forwards: the head's, one per draft token, and the target's."""

    def __init__(self, target: em.Target, proposer: HeadProposer | None, past: Past, depth: int):
        self.target, self.head, self.depth = target, proposer.head if proposer else None, depth
        self.cache = past.cache.fork(0, past.length)
        self.drafts = past.state.cache.fork(0, past.length) if isinstance(past.state, HeadState) else RaggedCache(1, 1)

    def run(self, at: int, seen: int) -> None:
        """Repeat the round that found `at` tokens in the caches and emitted `seen`. Its results are dropped."""
        self.cache.sync([at])
        if self.head is not None:
            self.drafts.sync([at - seen])
            aux = [mx.zeros((1, seen, self.target.hidden_size), self.target.dtype)] * len(self.head.aux_layers)
            g = self.head.features(aux)
            for _ in range(self.depth):
                g = self._head_forward(g)[:, -1:]
                mx.async_eval(self.head.logits(g))
                self.drafts.advance(1)
        layers = self.head.aux_layers if self.head is not None else ()
        out = self.target.forward(mx.zeros((1, self.depth + 1), mx.int32), self.cache, layers)
        mx.eval(out.logits, *out.aux)

    def _head_forward(self, g: mx.array) -> mx.array:
        assert self.head is not None
        return self.head(self.head.embed(mx.zeros((1, g.shape[1]), mx.int32)), g, self.drafts)


def _stages(batch: Batch, depth: int, rounds: int) -> dict[str, float]:
    """Time the stages of rounds. `batch`: its prompt has been read, except at most two last tokens."""
    Prefill(batch, batch.cache.lengths.upper).step(PREFILL_CHUNK)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, took in _staged_round(batch, depth).items():
            seconds.setdefault(name, []).append(took)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def _staged_round(batch: Batch, depth: int) -> dict[str, float]:
    """Run a round like `Batch.dispatch` and `Round.collect`, with a wait after each stage."""
    clock = [time.perf_counter()]
    draft = batch.draft(Plan(depth), batch.drafters(None))
    mx.eval(draft.tokens)
    clock.append(time.perf_counter())
    out = batch.forward(draft)
    mx.eval(out.logits, *out.aux)
    clock.append(time.perf_counter())
    verdict = batch.verify(out.logits, draft)
    mx.eval(verdict.tokens, verdict.accepted)
    clock.append(time.perf_counter())
    batch.commit(verdict)
    mx.eval(batch.newest, batch.cache.lengths.offset, batch.cache.state)
    clock.append(time.perf_counter())
    accepted, drawn = cast(list[int], verdict.accepted.tolist()), cast(list[list[int]], verdict.tokens.tolist())
    kept = [tokens[: count + 1] for tokens, count in zip(drawn, accepted, strict=True)]
    for row, tokens in zip(batch.requests, kept, strict=True):
        row.take(tokens, depth)
    batch.cache.sync([row.length for row in batch.requests])
    if batch.state is not None:
        batch.state.observe(Observation(kept, out.aux))
    clock.append(time.perf_counter())
    names = ("propose", "verify", "accept", "roll back", "Python")
    return {name: b - a for name, a, b in zip(names, clock, clock[1:], strict=False)}


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id of the model (default: the included one, with its head)")
    parser.add_argument("--head", help="folder or hub id of its head; without one, drafts are not timed")
    parser.add_argument("--depth", type=int, nargs="+", default=[4], help="draft tokens per round (default 4)")
    parser.add_argument("--context", type=int, nargs="+", default=[128], help="tokens before a round (default 128)")
    parser.add_argument("--repeats", type=int, default=60, help="measurements per part (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args(argv)
    target = em.load_target(args.target or embedded("target"))
    name = args.head or (None if args.target else embedded("head"))
    head = None if name is None else in_dtype(em.load_head(name, target, check=False), target.dtype)
    machine = describe()
    print(f"{machine}\ntarget: {target.name}\nhead: {name or 'none'}\n")
    steps = measure_costs(target, head, args.depth, repeats=args.repeats)
    rollback = measure_rollback(repeats=args.repeats)
    print(f"{steps}\n{rollback}", flush=True)
    rounds = []
    for context in args.context:
        for depth in sorted({0, max(args.depth)} if head is not None else {0}):
            rounds.append(measure_breakdown(target, head, depth, context, args.repeats))
            print(rounds[-1], flush=True)
    if args.json is not None:
        content = {"machine": vars(machine), "costs": asdict(steps), "rollback": asdict(rollback)}
        args.json.write_text(json.dumps({**content, "rounds": [asdict(result) for result in rounds]}, indent=1))


if __name__ == "__main__":
    main()
