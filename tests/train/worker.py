"""One process of a distributed run, started by test_distributed.py: trains a few steps and prints what came of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from contextlib import closing
from typing import Any

import numpy as np

from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.train.batches import Batches
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.distributed import World
from eagle_mlx.train.kinds import KINDS, settled
from eagle_mlx.train.samples import InMemory, Tokens
from eagle_mlx.train.step import Stepper
from tests.fakes import tiny_target

CONFIG = settled(TrainConfig(target="tiny", head="eagle", rows=2, length=24, unroll=2, lr=3e-3, lanes=1))


def conversations(silent: int = 1) -> list[Tokens]:
    """Thirteen rows of 24 tokens, so that the last batch has one. A third of them has nothing to learn, the last one
    included where `silent` is 1 and not where it is 2."""
    rng = np.random.default_rng(0)
    return [
        Tokens(rng.integers(0, 128, n).astype(np.int32), np.full(n, i % 3 != silent, np.uint8))
        for i, n in enumerate([24, 20, 24, 23, 24, 22, 24, 24, 21, 24, 24, 24, 23])
    ]


def learnt(config: TrainConfig, world: World, seed: int = 0) -> dict[str, Any]:
    """Losses, norms and tokens of every step, the order of the tokens, and a digest of the weights."""
    target = tiny_target()
    head = KINDS[config.head].new(target, dataclasses.replace(config, seed=seed), None, ())
    stepper = Stepper(head, target, config, world)
    results, rows_seen = [], []
    for silent in (1, 2):
        batches = Batches(InMemory(conversations(silent)), config.rows, config.length, config.seed, world)
        with closing(batches.epoch(0)) as stream:
            for rows in stream:
                rows_seen.append(len(rows.tokens))
                result = stepper(rows, 1.0)
                results.append(result and dataclasses.asdict(result))
    digest = hashlib.sha256(b"".join(np.array(value).tobytes() for _, value in sorted(weights_of(head).items())))
    return {"results": results, "rows": rows_seen, "weights": digest.hexdigest()}


def main() -> None:
    world = World.joined()
    told = world.tell({"place": [1, 2.5], "who": world.rank})
    stop = [world.any(False), world.any(world.rank == world.size - 1)]
    found = learnt(CONFIG, world, seed=world.rank)
    print(json.dumps({"rank": world.rank, "size": world.size, "told": told, "stop": stop, **found}))


if __name__ == "__main__":
    sys.exit(main())
