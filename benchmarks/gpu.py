"""Measure what a verify, a draft step, a tree and sampling cost on a GPU, with random weights in a common shape.

    pip install -e '.[cuda]'                         on Linux with an NVIDIA GPU; nothing on a Mac
    python benchmarks/gpu.py --json gpu.json         Qwen3-8B in 4 bits, some minutes, 12 GB of memory
    python benchmarks/gpu.py --shape tiny            a try in seconds, also on a CPU

Random weights cost as much as trained ones. Almost no draft is accepted, but that does not change a round's time.
Figures are medians; the parts of a round take turns. A round's cost relative to a plain one is the number of tokens
that it must give to pay.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx
from step_costs import StepCosts, measure_costs

from eagle_mlx.catalog.models import described_target, published_model, published_models
from eagle_mlx.cpu import compute_dtype
from eagle_mlx.files import write_whole
from eagle_mlx.heads.eagle3 import Eagle3Head, random_head
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.machine import describe
from eagle_mlx.memory import gb
from eagle_mlx.plan import RoundResult

_DRAFTED = 32_000
"""Draft vocabulary size, as in the published EAGLE-3 heads for Qwen3; half of a small vocabulary."""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0, "seed": 1},
    "top-k 20, top-p 0.95": {"temperature": 1.0, "seed": 1, "top_k": 20, "top_p": 0.95},
}
"""Sampling parameters of requests."""
_WARM_UP = 4
"""Rounds that are not timed, because they compile kernels."""


@dataclass(frozen=True)
class Round:
    """The median milliseconds of a whole round of the engine."""

    way: str
    rows: int
    depth: int
    nodes: int
    ms: float
    of_plain: float
    """The ratio to plain rounds with these rows: drafting pays if a round gives more tokens than this."""


def round_ms(target: em.Target, head: Eagle3Head, way: str, rows: int, depth: int, nodes: int, repeats: int) -> float:
    """Return the median milliseconds of whole rounds, host time included."""
    engine = em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(depth, nodes), max_batch=rows)
    seconds: list[float] = []

    def note(result: RoundResult) -> None:
        if result.plan.depth == depth:  # skip prefills, and the last rounds, which are cut
            seconds.append(result.seconds)

    engine.observer = note
    params = em.SamplingParams(max_tokens=(repeats + _WARM_UP) * (depth + 1), ignore_eos=True, **WAYS[way])
    requests = [engine.prepare([3, 5, 7, 9], params) for _ in range(rows)]
    for request in requests:
        engine.submit(request)
    while len(seconds) < repeats + _WARM_UP and not engine.idle:
        engine.step()
    for request in requests:
        engine.cancel(request)
    return 1e3 * statistics.median(seconds[_WARM_UP:])


def rounds(
    target: em.Target,
    head: Eagle3Head,
    batches: Sequence[int],
    depths: Sequence[int],
    nodes: Sequence[int],
    repeats: int,
) -> Iterator[Round]:
    """Measure whole rounds: plain, with chains of each depth, and with trees of each size, at most six deep."""
    plans = [*((depth, 0) for depth in depths), *((min(6, size - 1), size) for size in nodes)]
    for way in WAYS:
        for rows in batches:
            plain = round_ms(target, head, way, rows, 0, 0, repeats)
            yield Round(way, rows, 0, 0, plain, 1.0)
            for plan in plans:
                ms = round_ms(target, head, way, rows, *plan, repeats)
                yield Round(way, rows, *plan, ms, ms / plain)


def line(taken: Round) -> str:
    what = "plain" if not taken.depth else f"tree of {taken.nodes}" if taken.nodes else f"chain of {taken.depth}"
    return f"| {taken.way} | {taken.rows} | {what} | {taken.ms:.2f} | {taken.of_plain:.2f} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=published_models(), default="qwen3-8b", help="default %(default)s")
    parser.add_argument("--positions", type=int, default=16, help="maximum positions per verify (default %(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192], help="context tokens before the verify")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8], help="requests at once, for whole rounds")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="draft tokens of chains")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 60], help="draft tokens of trees")
    parser.add_argument("--repeats", type=int, default=30, help="rounds per measurement (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args(argv)
    mx.random.seed(0)
    dtype, shape = compute_dtype() or mx.bfloat16, published_model(args.shape)
    target = described_target("random weights", shape, dtype)
    mx.eval(target.model.parameters())
    head = random_head(target, draft_vocab=min(_DRAFTED, target.vocab_size // 2))
    quantize_for(head, target)
    machine = describe()
    print(f"{machine}\n{args.shape}, random weights in {target.bits} bits, {dtype}, {gb(mx.get_active_memory())}\n")
    steps: list[StepCosts] = []
    measured: list[Round] = []

    def save() -> None:
        """Write the figures so far: each new size of a product may compile kernels for minutes."""
        if args.json is not None:
            content: dict[str, object] = {"machine": vars(machine), "shape": shape, "dtype": str(dtype)}
            content |= {"steps": [asdict(step) for step in steps], "rounds": [asdict(taken) for taken in measured]}
            write_whole(args.json, json.dumps(content, indent=1).encode())

    for context in args.contexts:
        steps.append(measure_costs(target, head, range(1, args.positions), context, args.repeats))
        print(f"{steps[-1]}\n", flush=True)
        save()
    print("| | rows | draft | ms a round | of plain |\n|---|---|---|---|---|", flush=True)
    for taken in rounds(target, head, args.rows, args.depths, args.nodes, args.repeats):
        measured.append(taken)
        print(line(taken), flush=True)
        save()


if __name__ == "__main__":
    main()
