"""The memory that was predicted for a training step, beside what steps on real data then took.

    .venv/bin/python benchmarks/memory_estimate.py [--json FILE]

Every setting runs in a process of its own on the included target. `arrays` is the peak of MLX's allocator; `process` is
what the system counted, which on Linux includes freed memory that the C library keeps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TARGET = str(Path(__file__).parent.parent / "checkpoints" / "target")
SETTINGS: dict[str, dict[str, Any]] = {
    "EAGLE-3, 4 rows of 256, 3 steps, states in memory": {"rows": 4, "length": 256, "unroll": 3},
    "EAGLE-3, 2 rows of 512, 7 steps, 1,024 drafted, online": {
        **{"rows": 2, "length": 512, "unroll": 7, "draft_vocab": 1024, "states": "online"}
    },
    "EAGLE-3, 8 rows of 128 in 4 parts, 5 steps, 3,072 drafted": {
        **{"rows": 8, "length": 128, "accumulate": 4, "unroll": 5, "draft_vocab": 3072}
    },
    "MTP, 4 rows of 256, 3 steps": {"head": "mtp", "rows": 4, "length": 256},
    "EAGLE-1, 4 rows of 384": {"head": "eagle", "rows": 4, "length": 384},
    "EAGLE-3, 4 rows of 512, 7 steps, --grad-checkpoint": {
        **{"rows": 4, "length": 512, "unroll": 7, "draft_vocab": 3072, "grad_checkpoint": True}
    },
}
STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(SETTINGS[args.one])))
        return
    found = {name: in_own_process(name) for name in SETTINGS}
    print("| setting | predicted, MB | arrays, MB | off by | with the program, MB | process, MB |")
    print("|---|---|---|---|---|---|")
    for name, row in found.items():
        off = row["predicted"] / row["arrays"] - 1
        whole, process = row["whole"] / 1e6, row["process"] / 1e6
        print(
            f"| {name} | {row['predicted'] / 1e6:,.0f} | {row['arrays'] / 1e6:,.0f} | {off:+.0%} | {whole:,.0f} | "
            f"{process:,.0f} |"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def in_own_process(name: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True)
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def measure(changes: dict[str, Any]) -> dict[str, float]:
    """Bytes predicted before the target is loaded, and taken by steps on conversations of the standard library."""
    from eagle_mlx.cpu import tune_process
    from eagle_mlx.shards import Sample
    from eagle_mlx.target import load_target
    from eagle_mlx.train.config import TrainConfig
    from eagle_mlx.train.data import Batches, training_data
    from eagle_mlx.train.kinds import KINDS, resolved
    from eagle_mlx.train.plan import forecast, memory_gb
    from eagle_mlx.train.step import Stepper

    config = resolved(TrainConfig.of(target=TARGET, data=("builtin:python-files",), limit=40, **changes))
    tune_process()
    predicted = forecast(config).memory
    target = load_target(TARGET)
    data = training_data(target, config)
    head = KINDS[config.head.kind].new(target, config, data.kept, data.aux_layers)
    stepper = Stepper(head, target, config)
    for number, rows in enumerate(
        Batches(data.samples, config.optimization.rows, config.optimization.length, config.run.seed).epoch(0)
    ):
        if number == 1:
            reset()  # what capturing took is over
        if number == STEPS:
            break
        stepper(rows, 1.0)
    taken = memory_gb()
    samples = [data.samples[index] for index in range(len(data.samples.lengths))]
    states = sum(sample.aux.nbytes + sample.last.nbytes for sample in samples if isinstance(sample, Sample))
    whole = dataclasses.replace(predicted, states=states)
    return {
        "predicted": predicted.arrays,
        "arrays": taken["peak"] * 1e9,
        "whole": whole.total,
        "process": taken["process_peak"] * 1e9,
    }


def reset() -> None:
    import eagle_mlx  # noqa: F401  (brings the fast BLAS before MLX)

    import mlx.core as mx  # isort: skip

    mx.reset_peak_memory()


if __name__ == "__main__":
    main()
