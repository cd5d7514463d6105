"""Measure what decoding loses while the disk tier writes: the ratio of speeds with a busy and an idle writer.

    python benchmarks/prefix_writer.py
    python benchmarks/prefix_writer.py --target out/real/smollm2-135m-instruct --pairs 10

One row decodes plainly. Turns with a writer that always has work alternate with turns in which it has none, and each
pair changes the order. The writer writes the target's own keys and values to the tier's own files: blocks, checksums,
and removal of the oldest. A writer that is always busy is the worst case. The last line says how long one text keeps it
busy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx
import numpy as np

from eagle_mlx.cache import RaggedCache
from eagle_mlx.catalog import embedded
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.engine.disk.snapshot_file import BLOCK
from eagle_mlx.engine.prefix_tree import Past, keys_of
from eagle_mlx.request_state import RequestState

ROOM_TEXTS = 8
"""Texts that fit in the files. After that, each new text removes the oldest."""


@dataclass(frozen=True)
class Turn:
    seconds: float
    written: int
    """Bytes."""


class Decoding:
    """One row that decodes endlessly. It starts again when the context is full."""

    def __init__(self, target: em.Target):
        self.engine = em.Engine(target, max_batch=1)
        self.row = self._begin()

    def _begin(self) -> RequestState:
        most = self.engine.target.context_length - 9
        row = self.engine.prepare([1] * 8, em.SamplingParams(max_tokens=most, ignore_eos=True))
        self.engine.submit(row)
        while not row.tokens:
            self.engine.step()
        return row

    def tokens(self, count: int) -> float:
        """Decode this many tokens. Return the seconds."""
        if self.row.params.max_tokens - len(self.row.tokens) < 2 * count:
            self.engine.cancel(self.row)
            self.row = self._begin()
        begin, last = time.perf_counter(), len(self.row.tokens) + count
        while len(self.row.tokens) < last:
            self.engine.step()
        return time.perf_counter() - begin


class Writing:
    """A disk tier in a folder, and a text of some blocks that is offered under new names."""

    def __init__(self, folder: Path, target: em.Target, blocks: int):
        cache = RaggedCache.of(target.model, 1)
        if not cache.is_positional:
            raise SystemExit("error: the target must have layers that keep every position; name another --target")
        self.tokens = blocks * BLOCK
        for _ in range(blocks):
            target.forward(mx.array([[1 + i % 64 for i in range(BLOCK)]]), cache)
            cache.advance(BLOCK)
            mx.eval(cache.state)
        self.past = Past(self.tokens, cache)
        self.nbytes = self.past.piece(0, self.tokens).nbytes
        self.tier = DiskTier(folder, ROOM_TEXTS * self.nbytes, target)
        self.outline = cache.outline(0, self.tokens)
        self.rng, self.vocab = np.random.default_rng(0), target.vocab_size

    def offer(self) -> None:
        """Offer the text once more."""
        tokens = [int(token) for token in self.rng.integers(0, self.vocab, self.tokens + 1)]
        self.tier.offer(keys_of(tokens), self.past, self.outline)

    @property
    def is_busy(self) -> bool:
        return self.tier.bytes_waiting > 0

    def wait(self) -> None:
        while self.is_busy:
            time.sleep(0.001)


def turn(decoding: Decoding, writing: Writing, tokens: int, busy: bool) -> Turn:
    """Decode this many tokens. If `busy`, keep at least two texts waiting for the writer."""
    writing.wait()
    before, seconds = writing.tier.bytes_written, 0.0
    for _ in range(tokens):
        while busy and writing.tier.bytes_waiting < 2 * writing.nbytes:
            writing.offer()
        seconds += decoding.tokens(1)
    return Turn(seconds, writing.tier.bytes_written - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default=str(embedded("target")), help="folder or hub id (default: included)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per turn (default 64)")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of turns; the median counts (default 20)")
    parser.add_argument("--text", type=int, default=2048, help="tokens per text that is written (default 2048)")
    args = parser.parse_args()
    target = em.load_target(args.target)
    decoding = Decoding(target)
    ratios, turns = list[float](), dict[bool, list[Turn]]({True: [], False: []})
    with tempfile.TemporaryDirectory() as folder:
        writing = Writing(Path(folder), target, max(1, args.text // BLOCK))
        for busy in (True, False):
            turn(decoding, writing, args.tokens, busy)
        for pair in range(args.pairs):
            for busy in (pair % 2 == 0, pair % 2 == 1):
                turns[busy].append(turn(decoding, writing, args.tokens, busy))
            ratios.append(turns[False][-1].seconds / turns[True][-1].seconds)
        writing.wait()
        begin = time.perf_counter()
        writing.offer()
        writing.wait()
        alone = time.perf_counter() - begin
        writing.tier.close(60)
    speed = {busy: args.tokens / statistics.median(turn.seconds for turn in turns[busy]) for busy in turns}
    low, middle, high = statistics.quantiles(ratios, n=4)
    written = sum(turn.written for turn in turns[True]) / sum(turn.seconds for turn in turns[True])
    print("| tokens/s alone | with the writer busy | of alone, median | quartiles | written, MB/s |")
    print("|---|---|---|---|---|")
    print(f"| {speed[False]:.1f} | {speed[True]:.1f} | {middle:.3f} | {low:.3f} to {high:.3f} | {written / 1e6:.0f} |")
    print(f"\na text of {writing.tokens} tokens, {writing.nbytes / 1e6:.0f} MB, is written in {alone:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
