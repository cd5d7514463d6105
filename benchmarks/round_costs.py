"""Measure a round's bytes, operations and waits, in the shape of Qwen3-0.6B in 4 bits with a random EAGLE-3 head.

    git worktree add out/older a30cf84
    python benchmarks/round_costs.py --against out/older
    python benchmarks/round_costs.py --layers 2 --vocab 8192 --rows 1        a try in seconds

With random weights almost no draft is accepted, but a round's costs do not depend on that. Bytes of weights and of keys
and values are calculated; everything else is observed. The two versions take turns.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from older import Older

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from random_model import QWEN3_06B, in_four_bits, random_model

DEPTH = 4
DRAFTED = 32_000
"""Draft vocabulary size, as in the published EAGLE-3 heads for Qwen3."""
_PROMPT = [3, 5]
"""Short, because prefill on a CPU is slow, and a round's cost of context is calculated."""
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain, greedy": (0, {}),
    "chain of 4, greedy": (DEPTH, {}),
    "chain of 4, temperature 1": (DEPTH, {"temperature": 1.0, "seed": 1}),
    "the same, top-k 20, top-p 0.95": (DEPTH, {"temperature": 1.0, "seed": 1, "top_k": 20, "top_p": 0.95}),
}
"""Draft tokens, and sampling parameters."""


@dataclass
class Counts:
    """Counts for one round."""

    operations: int = 0
    """Nodes of the graphs given to MLX."""
    waits: int = 0
    """How often the host waited for work that it had dispatched."""
    read: int = 0
    """Bytes of arrays read by the host."""
    peak: int = 0
    """Peak bytes of the round, beyond those before it."""
    kept: int = 0
    """Bytes that the round added."""
    cpu_seconds: float = 0.0
    pending: bool = field(default=False, repr=False)


@contextmanager
def counting(counts: Counts) -> Iterator[None]:
    """Count evaluations and reads within the block."""
    evaluate, dispatch = mx.eval, mx.async_eval
    to_list, item = mx.array.tolist, mx.array.item

    def noting(run: Callable[..., Any], waits: bool, reads: bool) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            began = time.process_time()
            arrays = arrays_in(list(given))
            graph = io.StringIO()
            mx.export_to_dot(graph, *arrays)
            operations = graph.getvalue().count("shape=rectangle")
            counts.operations += operations
            counts.read += sum(x.nbytes for x in arrays) if reads else 0
            if waits and (counts.pending or operations):
                counts.waits += 1
            counts.pending = not waits
            counts.cpu_seconds -= time.process_time() - began
            return run(*given)

        return call

    patches: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = [
        (mx, "eval", evaluate, noting(evaluate, True, False)),
        (mx, "async_eval", dispatch, noting(dispatch, False, False)),
        (mx.array, "tolist", to_list, noting(to_list, True, True)),
        (mx.array, "item", item, noting(item, True, True)),
    ]
    for owner, name, _, patch in patches:
        setattr(owner, name, patch)
    try:
        yield
    finally:
        for owner, name, original, _ in patches:
            setattr(owner, name, original)


def arrays_in(tree: Any) -> list[mx.array]:
    leaves = cast("list[tuple[str, Any]]", tree_flatten(tree))
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def make_model(args: argparse.Namespace) -> nn.Module:
    """Return a model with random weights; the matrices are in 4 bits."""
    return in_four_bits(random_model(replace(QWEN3_06B, layers=args.layers, vocab=args.vocab)))


class Version:
    """One version of the library with the model and head, and an engine for each mode and number of rows."""

    def __init__(self, name: str, library: Any, heads: Any, model: nn.Module, weights: Any | None = None):
        self.name, self._library = name, library
        self.target = library.Target(model, name="Qwen3-0.6B's shape")
        size, drafted = self.target.vocab_size, min(DRAFTED, self.target.vocab_size // 2)
        config = heads.Eagle3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=size,
            draft_vocab_size=drafted,
            target_hidden_size=1024,
            aux_layers=heads.default_aux_layers(self.target.num_layers),
        )
        self.head: Any = heads.Eagle3Head(config, mx.arange(drafted, dtype=mx.int32))
        in_four_bits(self.head)
        if weights is not None:
            self.head.update(tree_map(lambda x: x, weights))

    def round(self, way: str, rows: int) -> Counts:
        """Return the costs of one round of this many requests, after prefill and first tokens."""
        library, (depth, wish) = self._library, WAYS[way]
        proposer = library.HeadProposer(self.head) if depth else None
        engine = library.Engine(self.target, proposer, policy=library.FixedPolicy(depth), max_batch=rows)
        params = library.SamplingParams(max_tokens=100, ignore_eos=True, **wish)
        requests = [engine.prepare(_PROMPT, params) for _ in range(rows)]
        for request in requests:
            engine.submit(request)
        while not all(request.tokens for request in requests):
            engine.step()
        if not depth:
            engine.step()  # the first plain round dispatches two
        mx.synchronize()
        counts, before = Counts(), mx.get_active_memory()
        mx.reset_peak_memory()
        began = time.process_time()
        with counting(counts):
            engine.step()
        mx.synchronize()
        counts.cpu_seconds += time.process_time() - began
        counts.peak, counts.kept = mx.get_peak_memory() - before, mx.get_active_memory() - before
        for request in requests:
            engine.cancel(request)
        return counts


def nbytes(module: nn.Module) -> int:
    return sum(x.nbytes for x in arrays_in(module.parameters()))


def weights_read(version: Version, depth: int) -> int:
    """Return the bytes of weights that a round reads: the target's, and the head's per draft token, but `fc` once."""
    target, head = nbytes(version.target.model), nbytes(version.head)
    return target + (head + (depth - 1) * (head - nbytes(version.head.fc)) if depth else 0)


def kv_read(model: nn.Module, depth: int) -> int:
    """Return the bytes of keys and values that a round reads per row and 1,000 context tokens, in the weights' type."""
    args = model.args
    position = 2 * args.num_key_value_heads * args.head_dim * model.model.norm.weight.dtype.size
    return int(1000 * position * (args.num_hidden_layers + depth))  # the head has one layer with as many heads


def mega(count: float) -> str:
    return f"{count / 1e6:.1f}"


TITLE = (
    "",
    "rows",
    "weights read, MB",
    "keys and values per 1,000 tokens, MB",
    "operations",
    "waits",
    "read by the host, bytes",
    "peak, MB",
    "kept, MB",
    "seconds of the CPU",
)


def line(way: str, rows: int, counts: Sequence[Counts], version: Version) -> str:
    """Return a line of the table. With two versions, the older one's figures come first."""
    depth = WAYS[way][0]
    figures: tuple[Callable[[Counts], str], ...] = (
        lambda c: f"{c.operations:,}",
        lambda c: str(c.waits),
        lambda c: str(c.read),
        lambda c: mega(c.peak),
        lambda c: mega(c.kept),
        lambda c: f"{c.cpu_seconds:.2f}",
    )
    cells = [way, str(rows), mega(weights_read(version, depth)), mega(rows * kv_read(version.target.model, depth))]
    return "| " + " | ".join([*cells, *(" → ".join(map(figure, counts)) for figure in figures)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=QWEN3_06B.layers, help="default %(default)s")
    parser.add_argument("--vocab", type=int, default=QWEN3_06B.vocab, help="default %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="default 1 4")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of another version")
    args = parser.parse_args()
    mx.random.seed(0)
    from eagle_mlx.heads import eagle3

    model = make_model(args)
    versions = [Version("now", em, eagle3, model)]
    if args.against:
        older = Older(args.against)
        # Each version hooks its own model. The weights are shared.
        twin = make_model(args)
        twin.update(model.parameters())
        library, heads = older.package(), older.module("heads.eagle3")
        versions.insert(0, Version("older", library, heads, twin, versions[0].head.parameters()))
    print("| " + " | ".join(TITLE) + " |\n" + "|" + "---|" * len(TITLE))
    for rows in args.rows:
        for way in WAYS:
            print(line(way, rows, [version.round(way, rows) for version in versions], versions[0]), flush=True)


if __name__ == "__main__":
    main()
