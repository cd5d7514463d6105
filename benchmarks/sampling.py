"""Measure what sampling costs compared with greedy decoding: acceptance of a draft, from logits to tokens.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --rows 32 --vocab 49152
    git worktree add out/older a30cf84
    python benchmarks/sampling.py --against out/older

All sampling methods take turns, so other load on the machine affects all alike. Figures are medians. CPU seconds are
those of the whole process, which other load changes least; on a GPU, use wall time.

`--against` names a checkout of another version, which takes turns with this one. The last lines give this version's
share of the other's time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from older import Older

from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.decoding.verify import verify
from eagle_mlx.sampling_params import SamplingParams

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx

_WARM_UP = 2
"""Rounds that are not counted."""
_WARM = 0.6  # the temperature for Qwen3 with reasoning
WAYS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(_WARM, seed=1),
    "coupled, top-k 20, top-p 0.95": SamplingParams(_WARM, seed=1, top_k=20, top_p=0.95),
    "coupled, top-p 0.95": SamplingParams(_WARM, seed=1, top_p=0.95),
    "coupled, min-p 0.05": SamplingParams(_WARM, seed=1, min_p=0.05),
    "rejection": SamplingParams(_WARM),
    "rejection, top-k 20, top-p 0.95": SamplingParams(_WARM, top_k=20, top_p=0.95),
}


@dataclass(frozen=True)
class Version:
    """The measured functions of one version of the library."""

    params: Any
    """Its SamplingParams."""
    batch: Any
    """Its SamplingBatch."""
    verify: Any
    """Its verify."""

    @classmethod
    def of(cls, older: Older) -> Version:
        return cls(
            older.module("sampling_params", "params").SamplingParams,
            older.module("decoding.sampling", "sampling").SamplingBatch,
            older.module("decoding.verify", "verify").verify,
        )


def verdicts(version: Version, logits: mx.array) -> dict[str, Callable[[], None]]:
    """Return a call for each sampling method that computes the verdict and waits for it."""
    rows, width, vocab = logits.shape
    drafts = mx.argmax(logits[:, :-1], axis=-1).astype(mx.int32)
    lengths = mx.full((rows,), width - 1, mx.int32)
    q = mx.full((rows, width - 1, vocab), 1 / vocab)
    positions = mx.broadcast_to(mx.arange(100, 100 + width, dtype=mx.int32), (rows, width))
    mx.eval(drafts, lengths, q, positions)

    def call(wish: SamplingParams) -> Callable[[], None]:
        params = version.params(wish.temperature, wish.top_k, wish.top_p, wish.min_p, seed=wish.seed)
        batch = version.batch.of([params] * rows, range(rows))
        drawn_from = q if params.rule == "rejection" else None

        def run() -> None:
            verdict = version.verify(logits, drafts, lengths, drawn_from, batch, positions)
            mx.eval(verdict.accepted, verdict.tokens)

        return run

    return {name: call(params) for name, params in WAYS.items()}


def measure(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median wall and CPU milliseconds of each call."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(_WARM_UP + rounds):
        for name, call in calls.items():
            clock, cpu = time.perf_counter(), time.process_time()
            call()
            now = (1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - cpu))
            taken[name] += [now] if number >= _WARM_UP else []
    return {name: (statistics.median(x), statistics.median(y)) for name, (x, y) in _columns(taken).items()}


def _columns(taken: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[list[float], list[float]]]:
    return {name: ([x for x, _ in times], [y for _, y in times]) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1, help="rows of the batch; default %(default)s")
    parser.add_argument("--positions", type=int, default=5, help="one more than draft tokens; default %(default)s")
    parser.add_argument("--vocab", type=int, default=151936, help="default %(default)s, that of Qwen3")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="default %(default)s")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of another version")
    args = parser.parse_args()
    if args.positions < 2:
        parser.error("--positions must be at least 2: a draft token and the one after it")
    # Scaled normals: a few tokens have most of the mass, as in real text.
    values = np.random.default_rng(0).normal(scale=3, size=(args.rows, args.positions, args.vocab))
    logits = mx.array(values.astype(np.float32)).astype(getattr(mx, args.dtype))
    calls = verdicts(Version(SamplingParams, SamplingBatch, verify), logits)
    if args.against:
        before = verdicts(Version.of(Older(args.against)), logits)
        calls |= {f"{name} (older)": call for name, call in before.items()}
    seconds = measure(calls, args.rounds)
    print(f"{args.rows} x {args.positions} positions of {args.vocab} {args.dtype} logits, median of {args.rounds}\n")
    print("| | ms | ms of the CPU |\n|---|---|---|")
    for name, (clock, cpu) in seconds.items():
        print(f"| {name} | {clock:.2f} | {cpu:.2f} |")
    if args.against:
        print("\nCPU time as a share of the older version's:")
        for name in WAYS:
            print(f"{name}: {seconds[name][1] / seconds[f'{name} (older)'][1]:.2f}")


if __name__ == "__main__":
    main()
