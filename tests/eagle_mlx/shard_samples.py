"""Examples with hidden states, and folders of shards of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eagle_mlx.hidden_states import Example, HiddenStates, rounded
from eagle_mlx.shards import ShardMeta, ShardWriter

META = ShardMeta("tiny", hidden_size=4, vocab_size=50, aux_layers=(1, 3))


def sample(length: int, seed: int = 0) -> Example:
    rng = np.random.default_rng(seed)
    return Example(
        rng.integers(0, 50, length).astype(np.int32),
        rng.integers(0, 2, length).astype(np.uint8),
        HiddenStates(
            META.aux_layers,
            rounded(rng.normal(size=(length, 8)).astype(np.float32)),
            rounded(rng.normal(size=(length, 4)).astype(np.float32)),
        ),
        int(rng.integers(0, 1 << 64, dtype=np.uint64)),
    )


def same(a: Example, b: Example) -> bool:
    pairs = (
        (a.tokens, b.tokens),
        (a.loss_mask, b.loss_mask),
        (a.states.features, b.states.features),
        (a.states.last, b.states.last),
    )
    return a.key == b.key and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def write(folder: Path, lengths: list[int], tokens_per_shard: int = 20) -> list[Example]:
    samples = [sample(length, seed) for seed, length in enumerate(lengths)]
    write_all(folder, samples, META, tokens_per_shard)
    return samples


def write_all(
    folder: Path, samples: list[Example], meta: ShardMeta, tokens_per_shard: int = 4096, **options: Any
) -> None:
    """Write shards of at least `tokens_per_shard` tokens."""
    with ShardWriter(folder, meta, {"samples": "these"}, **options) as writer:
        shard: list[Example] = []
        for index, example in enumerate(samples, 1):
            shard.append(example)
            if index == len(samples) or sum(map(len, shard)) >= tokens_per_shard:
                writer.write(len(writer.files), shard)
                shard = []
