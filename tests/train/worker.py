"""One process of a distributed run, started by test_distributed.py: train a few steps and print the results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.hidden_states import Example
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data.batches import Batches
from eagle_mlx.train.data.examples import InMemory
from eagle_mlx.train.data.sources import TrainData
from eagle_mlx.train.distributed import World
from eagle_mlx.train.kinds import KINDS, resolve
from eagle_mlx.train.run import data_fingerprint, run_worker, set_up, train
from eagle_mlx.train.step.step import Stepper
from tests.fakes import tiny_target

CONFIG = resolve(TrainConfig.of(target="tiny", head="eagle", rows=2, length=24, unroll=2, lr=3e-3, lanes=1), 32)


def conversations(silent: int = 1) -> list[Example]:
    """Return thirteen rows of 24 tokens, so that the last batch has one row.

    A third of them has no labels. This includes the last row if `silent` is 1, but not if it is 2.
    """
    rng = np.random.default_rng(0)
    return [
        Example(rng.integers(0, 128, n).astype(np.int32), np.full(n, i % 3 != silent, np.uint8))
        for i, n in enumerate([24, 20, 24, 23, 24, 22, 24, 24, 21, 24, 24, 24, 23])
    ]


def learnt(config: TrainConfig, world: World, seed: int = 0) -> dict[str, Any]:
    """Return losses, norms and tokens of every step, the order of the tokens, and a digest of the weights."""
    target = tiny_target()
    head = KINDS[config.head.kind].new(target, config.changed(seed=seed), None, ())
    stepper = Stepper(head, target, config, world)
    stepper.sync()
    results, rows_seen = [], []
    for silent in (1, 2):
        batches = Batches(
            InMemory(conversations(silent)),
            config.optimization.rows,
            config.optimization.length,
            config.run.seed,
            world,
        )
        with closing(batches.epoch(0)) as stream:
            for rows in stream:
                rows_seen.append(len(rows.tokens))
                result = stepper(rows, 1.0)
                results.append(result and dataclasses.asdict(result))
    digest = hashlib.sha256(b"".join(np.array(value).tobytes() for _, value in sorted(weights_of(head).items())))
    return {"results": results, "rows": rows_seen, "weights": digest.hexdigest()}


class StopAt(Stop):
    """Simulates a signal before the n-th command."""

    def __init__(self, checks: int):
        super().__init__()
        self._checks = checks

    @property
    def asked(self) -> bool:
        self._checks -= 1
        return self._checks < 0


def whole_run(
    folder: Path, world: World, rows: int = CONFIG.optimization.rows, stop: Stop | None = None
) -> list[dict[str, Any]]:
    """Make or resume a run in `folder`/out. Return the metrics of its steps, in the first process."""
    out, stop = folder / "out", stop or Stop()
    settings = {"max_steps": 6, "eval_steps": 4, "eval_tokens": 4, "eval_prompts": 2, "eval_batch": 2, "log_steps": 1}
    config = CONFIG.changed(**settings, output=str(out), rows=rows)
    target, data = tiny_target(tokenizer=True), TrainData(InMemory(conversations(2)), (), None, {})
    if not world.is_rank_zero:
        run_worker(target, data, config, None, world, stop)
        return []
    resume = out if out.exists() else None
    with set_up(target, config, data_fingerprint(data), resume=resume, stop=stop, world=world) as setup:
        train(setup, data, [[1, 2, 3], [4, 5, 6]])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def main() -> None:
    world = World.init()
    received = world.broadcast({"place": [1, 2.5], "who": world.rank})
    stop = [world.any(False), world.any(world.rank == world.size - 1)]
    result = learnt(CONFIG, world, seed=world.rank)
    result |= {"rank": world.rank, "size": world.size, "received": received, "stop": stop}
    if sys.argv[1:]:
        folder, stopped = Path(sys.argv[1]), False
        try:
            whole_run(folder, world, stop=None if world.is_rank_zero else StopAt(int(sys.argv[2])))
        except Stopped:
            stopped = True
        finished = (folder / "out" / "report.json").exists()
        result |= {"stopped": stopped, "finished": finished, "steps": whole_run(folder, world)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
