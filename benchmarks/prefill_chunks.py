"""Measure prefill in chunks of several sizes, with a medium-sized model with random weights.

    python benchmarks/prefill_chunks.py
    python benchmarks/prefill_chunks.py --chunks 512 1024 2048 4096

The sizes take turns. Figures are medians: wall seconds, CPU seconds, and MLX's peak memory.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx
from random_model import MIDDLING, random_model

SETS = {"1 of 3,072": (1, 3072), "8 of 500": (8, 500), "8 of 200": (8, 200)}
"""Numbers and lengths of prompts: one in several chunks, and some that are read together."""


def make_target() -> em.Target:
    model = random_model(MIDDLING)
    mx.eval(model.parameters())
    return em.Target(model, name="random")


def measure(target: em.Target, prompts: list[list[int]], chunk: int) -> tuple[float, float, float]:
    """Return wall and CPU seconds until all prompts have a first token, and the peak memory in MB."""
    engine = em.Engine(target, max_batch=len(prompts), prefill_chunk=chunk)
    mx.synchronize()
    mx.reset_peak_memory()
    clock, cpu = time.perf_counter(), time.process_time()
    engine.generate(prompts, em.SamplingParams(max_tokens=1, ignore_eos=True))
    mx.synchronize()
    return time.perf_counter() - clock, time.process_time() - cpu, mx.get_peak_memory() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048], metavar="N", help="default 512 2048")
    parser.add_argument("--repeats", type=int, default=4, help="default %(default)s, after one that is not counted")
    args = parser.parse_args()
    target, rng = make_target(), np.random.default_rng(0)
    print("| prompts | chunk | s | s of the CPU | peak, MB |\n|---|---|---|---|---|")
    for name, (count, length) in SETS.items():
        prompts = [[int(token) for token in rng.integers(3, MIDDLING.vocab, length)] for _ in range(count)]
        taken: dict[int, list[tuple[float, float, float]]] = {chunk: [] for chunk in args.chunks}
        for repeat in range(args.repeats + 1):
            for chunk in args.chunks:
                seconds = measure(target, prompts, chunk)
                taken[chunk] += [seconds] if repeat else []
        for chunk, figures in taken.items():
            clock, cpu, peak = map(statistics.median, zip(*figures, strict=True))
            print(f"| {name} | {chunk} | {clock:.2f} | {cpu:.2f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
