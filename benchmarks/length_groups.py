"""Compare rounds of long and short rows in one group with rounds in two groups.

    python benchmarks/length_groups.py
    python benchmarks/length_groups.py --model qwen3-0.6b --layers 7 --long 1024 2048

The rows' caches hold zeros, which cost as much as other keys and values. The two ways take turns; in each turn every
row gets as many tokens. The decision in `engine/groups.py` uses the ratio of bytes: it separates the rows below 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx
from random_model import MIDDLING, QWEN3_06B, random_model

from eagle_mlx.cache import RaggedCache
from eagle_mlx.catalog import embedded
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.groups import RoundReads, size_of
from eagle_mlx.engine.prefix import Prefix
from eagle_mlx.plan import PLAIN
from eagle_mlx.request import make_request
from eagle_mlx.request_state import RequestState

SHAPES = {"middling": MIDDLING, "qwen3-0.6b": QWEN3_06B}
PARAMS = em.SamplingParams(max_tokens=1000, ignore_eos=True)
WARM_UP = 2
"""Rounds that are not counted: the first ones grow the buffers."""


def make_target(name: str, layers: int | None) -> em.Target:
    if name == "included":
        return em.load_target(embedded("target"))
    shape = SHAPES[name]
    model = random_model(replace(shape, layers=layers or shape.layers))
    mx.eval(model.parameters())
    return em.Target(model, name=name)


def make_batch(target: em.Target, lengths: list[int]) -> Batch:
    """Return a batch of rows with caches of this many zeros."""
    rows = [
        Batch(target, None, [RequestState(make_request(target, [5] * n, PARAMS))], past(target, n - 1)) for n in lengths
    ]
    for other in rows[1:]:
        rows[0].append(other)
    mx.eval(rows[0].cache.state)
    return rows[0]


def past(target: em.Target, length: int) -> Prefix:
    cache = RaggedCache.of(target.model, 1)
    target.forward(mx.zeros((1, 1), mx.int32), cache)  # only for the shapes; nothing is computed
    for layer in cache.layers:
        _, heads, _, width = layer.keys.shape
        layer.keys, layer.values = (mx.zeros((1, heads, length, width), layer.keys.dtype) for _ in range(2))
    cache.sync([length])
    return Prefix(length, cache, None)


@dataclass
class Way:
    """The rows in one group or in two, and the times of the turns."""

    batches: list[Batch]

    def __post_init__(self) -> None:
        self.clock: list[float] = []
        self.cpu: list[float] = []

    def turn(self, rounds: int) -> None:
        """Decode this many tokens of every row."""
        clock, cpu = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            for batch in self.batches:
                batch.dispatch(PLAIN).collect()
        self.clock.append((time.perf_counter() - clock) / rounds)
        self.cpu.append((time.process_time() - cpu) / rounds)


def measure(target: em.Target, lengths: list[int], repeats: int, rounds: int) -> tuple[Way, Way]:
    *short, long = lengths
    single, two = Way([make_batch(target, lengths)]), Way([make_batch(target, short), make_batch(target, [long])])
    for way in (single, two):
        way.turn(WARM_UP)
        way.clock.clear()
        way.cpu.clear()
    for repeat in range(repeats):
        for way in (single, two) if repeat % 2 else (two, single):
            way.turn(rounds)
    return single, two


def bytes_ratio(target: em.Target, lengths: list[int]) -> float:
    reads, (*short, long) = RoundReads.of(target, None, size_of(target, None, None)), lengths
    single = reads.fixed + len(lengths) * long * reads.position
    return (2 * reads.fixed + (len(short) * max(short) + long) * reads.position) / single


def line(target: em.Target, lengths: list[int], single: Way, two: Way) -> str:
    def ratio(ones: list[float], twos: list[float]) -> str:
        ratios = sorted(b / a for a, b in zip(ones, twos, strict=True))
        return f"{statistics.median(ratios):.2f} ({ratios[len(ratios) // 4]:.2f} to {ratios[3 * len(ratios) // 4]:.2f})"

    first, second = (1000 * statistics.median(way.clock) for way in (single, two))
    figures = (
        f"{lengths[-1]:,}",
        f"{first:.1f}",
        f"{second:.1f}",
        ratio(single.clock, two.clock),
        ratio(single.cpu, two.cpu),
    )
    return "| " + " | ".join([*figures, f"{bytes_ratio(target, lengths):.2f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("included", *SHAPES), default="included", help="default %(default)s")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of a model with random weights; default all")
    parser.add_argument("--rows", type=int, default=8, help="rows, including the long one; default %(default)s")
    parser.add_argument("--short", type=int, default=256, metavar="TOKENS", help="default %(default)s")
    parser.add_argument("--long", type=int, nargs="+", default=[512, 1024, 2000], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=20, help="turns per way; default %(default)s")
    parser.add_argument("--rounds", type=int, default=4, help="rounds per turn; default %(default)s")
    args = parser.parse_args()
    target = make_target(args.model, args.layers)
    print(
        "| long row | one group, ms | two, ms | ratio (quartiles) | of the CPU | of bytes |\n|---|---|---|---|---|---|"
    )
    for long in args.long:
        lengths = [args.short] * (args.rows - 1) + [long]
        print(line(target, lengths, *measure(target, lengths, args.repeats, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
