"""Measure what a training step costs besides its computation: capturing hidden states, and reading them from disk.

    python benchmarks/train_step.py --shards out/shards --steps 40

Online, the target reads each batch when it is trained on. Each round times, in turn, a whole step on one batch and its
two parts alone: the target's forward, and the head's forward, loss and gradient. Offline, the hidden states come from
shards; it times how long a step waits for its batch, and reading alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eagle_mlx import blas
from eagle_mlx.cpu import tune_process
from eagle_mlx.errors import EagleError
from eagle_mlx.machine import describe
from eagle_mlx.target import Target, load_target
from eagle_mlx.train.config import TrainSettings, load_config
from eagle_mlx.train.data import Batches, Rows, TrainData, training_data
from eagle_mlx.train.kinds import KINDS, resolve
from eagle_mlx.train.step import Stepper

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
from pieces import Pieces, Time, timed

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
ONLINE_BAR, LOADING_BAR = 1.35, 0.05
_WARM_UP = 3
"""Rounds that are not counted."""


def online(target: Target, data: TrainData, config: TrainSettings, steps: int) -> list[dict[str, Time]]:
    """Time whole steps with capture, and their parts alone, batch by batch in turn."""
    head = KINDS[config.head.kind].new(target, config, data.kept, data.aux_layers)
    stepper, pieces = Stepper(head, target, config), Pieces(head, target, config)
    rounds: list[dict[str, Time]] = []
    batches = Batches(data.samples, config.optimization.rows, config.optimization.length, config.run.seed)
    with contextlib.closing(batches.epoch(0)) as stream:
        for number in range(_WARM_UP + steps):
            rows = next(stream)
            bare = dataclasses.replace(rows, states=None)
            runs: dict[str, Any] = {
                "step": partial(stepper, bare, 1e-3),
                "target": pieces.target_forward(bare),
                "head": pieces.head_both_ways(rows),
            }
            order = sorted(runs, key=lambda name: (list(runs).index(name) + number) % len(runs))
            times = {name: timed(runs[name]) for name in order}
            rounds += [times] if number >= _WARM_UP else []
    return rounds


def offline(target: Target, data: TrainData, config: TrainSettings, steps: int) -> dict[str, Any]:
    """Time steps on shards: each step, its wait for its batch, and CPU seconds of reading alone."""
    head = KINDS[config.head.kind].new(target, config, data.kept, data.aux_layers)
    stepper = Stepper(head, target, config)
    batches = Batches(data.samples, config.optimization.rows, config.optimization.length, config.run.seed)
    waits, learns = [], []
    with contextlib.closing(batches.epoch(0)) as stream:
        for number in range(_WARM_UP + steps):
            begin = time.perf_counter()
            rows: Rows = next(stream)
            waited = time.perf_counter() - begin
            learnt = timed(partial(stepper, rows, 1e-3))
            if number >= _WARM_UP:
                waits.append(waited)
                learns.append(learnt)

    def read() -> None:
        with contextlib.closing(batches.epoch(1)) as stream:
            for _ in range(steps):
                next(stream)

    reading = timed(read)
    step = sum(step_time.seconds for step_time in learns)
    return {
        "steps": steps,
        "step_seconds": float(np.median([step_time.seconds for step_time in learns])),
        "wait_seconds": float(np.median(waits)),
        "wait_share": sum(waits) / (sum(waits) + step),
        "reading_cpu_share": reading.cpu_seconds / (sum(step_time.cpu_seconds for step_time in learns) or 1.0),
    }  # fmt: skip


def summary(rounds: list[dict[str, Time]]) -> dict[str, Any]:
    """Return medians of the rounds: seconds of the step and of its parts, and the step relative to the parts' sum."""
    medians: dict[str, Any] = {"rounds": len(rounds)}
    for field in ("seconds", "cpu_seconds"):
        values = {name: np.array([getattr(times[name], field) for times in rounds]) for name in rounds[0]}
        ratios = values["step"] / (values["target"] + values["head"])
        medians[field] = {name: float(np.median(times)) for name, times in values.items()}
        medians[field] |= {"ratio": float(np.median(ratios)), "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist()}
    return medians


def table(figures: dict[str, Any]) -> str:
    """Return a Markdown table."""
    lines = [
        "| online, medians | step | target's forward alone | head's forward, loss and gradient alone | step / sum |"
    ]
    lines.append("|---|---|---|---|---|")
    for field, title in (("seconds", "ms"), ("cpu_seconds", "CPU ms")):
        row = figures["online"][field]
        low, high = row["quartiles"]
        cells = [f"{1e3 * row[name]:.0f}" for name in ("step", "target", "head")]
        lines.append(f"| {title} | {' | '.join(cells)} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) |")
    read = figures["offline"]
    lines += ["", "| offline | step | waits for its batch | share of the time | reading alone, CPU time of a step's |"]
    lines.append("|---|---|---|---|---|")
    lines.append(
        f"| medians | {1e3 * read['step_seconds']:.0f} ms | {1e3 * read['wait_seconds']:.2f} ms "
        f"| {100 * read['wait_share']:.1f} % | {100 * read['reading_cpu_share']:.1f} % |"
    )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True, help="folder of `eagle-data collect`")
    parser.add_argument("--target", type=Path, default=CHECKPOINTS / "target")
    parser.add_argument("--config", type=Path, default=CHECKPOINTS / "head.yaml", help="training recipe")
    parser.add_argument("--steps", type=int, default=40, help="measured steps, both online and offline (40)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    print(f"blas: {blas.activate()}")
    tune_process()
    try:
        target = load_target(args.target)
        config = resolve(
            load_config(args.config, {"target": str(args.target), "shards": str(args.shards)}), target.hidden_size
        )
        data = training_data(target, config)
        rounds = online(target, data, config, args.steps)
        figures = {"online": summary(rounds), "offline": offline(target, data, config, args.steps)}
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(table(figures))
    met = {
        "online": figures["online"]["seconds"]["ratio"] <= ONLINE_BAR,
        "loading": figures["offline"]["wait_share"] <= LOADING_BAR,
    }
    print(f"\nat most {ONLINE_BAR} times: {met['online']}; at most {LOADING_BAR:.0%} loading: {met['loading']}")
    if args.json:
        args.json.write_text(json.dumps({**figures, "machine": vars(describe())}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
