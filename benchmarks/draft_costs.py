"""Time what new heads of several kinds take to draft, in turns, relative to an EAGLE-3 head of one layer.

    python benchmarks/draft_costs.py
    python benchmarks/draft_costs.py --target out/real/smollm2-135m-instruct --heads dflash:2 dspark:2 eagle3:2

A head is a kind, its number of layers and, after a second colon, its draft window. In each turn it first reads two
positions, as after an accepted draft token. New heads draft nothing useful, but cost as much as trained ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from time import process_time

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx
import numpy as np

from eagle_mlx.cache.ragged import KVPiece
from eagle_mlx.catalog import embedded
from eagle_mlx.cpu import tune_process
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.machine import describe
from eagle_mlx.plan import Plan
from eagle_mlx.proposers.base import HeadPiece, Observation
from eagle_mlx.serve.doctor.measure import Step, take_turns
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.kind_settings import KIND_SETTINGS
from eagle_mlx.train.kinds import KINDS, aux_layers_of, resolve

BASE = "eagle3:1"


def new_head(target: em.Target, named: str, draft_vocab: int, most: int) -> em.HeadProposer:
    """Return an untrained head that drafts up to `most` of the `draft_vocab` first tokens, bound to its target."""
    kind, *numbers = named.split(":")
    layers, window = [*map(int, numbers), 1][0], int(numbers[1]) if len(numbers) > 1 else None
    config = resolve(TrainConfig().changed(head=kind, layers=layers, unroll=most), target.hidden_size)
    size = min(draft_vocab, target.vocab_size)
    kept = None if size == target.vocab_size or "draft_vocab" in KIND_SETTINGS[kind].foreign else np.arange(size)
    proposer = em.HeadProposer(KINDS[kind].new(target, config, kept, aux_layers_of(target, config)), window)
    proposer.bind(target)
    return proposer


def draft(target: em.Target, proposer: em.HeadProposer, depth: int, context: int, spent: list[float]) -> Step:
    """Return a call that reads two positions and drafts a greedy chain; it appends its CPU seconds to `spent`."""
    sampling, positions = SamplingBatch.of([em.SamplingParams()], [0]), mx.array([context], mx.int32)

    def observation(count: int) -> Observation:
        states = mx.zeros((1, count, target.hidden_size), target.dtype)
        return Observation([[1] * count], (states,) * len(proposer.aux_layers))

    first = proposer.open([[]])
    first.prefill(observation(1))
    entries = [[mx.repeat(x, context, axis=2) for x in layer] for layer in first.piece(0, 0, 1).entries.layers]
    state = proposer.join([HeadPiece(KVPiece(entries), b"\1" * context)], context)

    def step() -> None:
        begin = process_time()
        state.observe(observation(2))
        mx.eval(state.draft(Plan(depth), sampling, positions).tokens)
        spent.append(process_time() - begin)

    return step


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id of the model (default: the included one)")
    heads = ["dflash:2", "dspark:2", "peagle:2", "eagle3:2"]
    parser.add_argument(
        "--heads",
        nargs="+",
        default=heads,
        metavar="KIND:LAYERS:WINDOW",
        help=f"kinds of heads (default {' '.join(heads)})",
    )
    parser.add_argument("--depth", type=int, default=7, help="draft tokens (default %(default)s)")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="their vocabulary (default %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="tokens before the draft (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=60, help="measurements of each (default %(default)s)")
    args = parser.parse_args(argv)
    tune_process()
    target = em.load_target(args.target or embedded("target"))
    print(f"{describe()}\ntarget: {target.name}\n")
    steps: dict[tuple[str, int], Step] = {}
    spent: dict[tuple[str, int], list[float]] = {}
    for name in dict.fromkeys((BASE, *args.heads)):
        proposer = new_head(target, name, args.draft_vocab, args.depth)
        for depth in (1, args.depth):
            steps[name, depth] = draft(target, proposer, depth, args.context, spent.setdefault((name, depth), []))
    taken = take_turns(steps, args.repeats, warm_up=5, progress="drafts")
    for name in dict.fromkeys(name for name, _ in steps):
        single, chain = taken[name, 1], taken[name, args.depth]
        of_first = median(a / b for a, b in zip(chain, taken[BASE, 1], strict=True))
        print(
            f"{name}: one token {1e3 * median(single):.2f} ms, {args.depth} tokens {1e3 * median(chain):.2f} ms, which "
            f"is {of_first:.2f} times the first draft step of {BASE}; CPU time {1e3 * median(spent[name, 1]):.2f} and "
            f"{1e3 * median(spent[name, args.depth]):.2f} ms"
        )


if __name__ == "__main__":
    main()
