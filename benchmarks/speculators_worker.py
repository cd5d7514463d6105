"""The part of compare_speculators.py that runs with torch and speculators installed: its trainer, turn by turn.

    python benchmarks/speculators_worker.py convert SHARDS FOLDER
    python benchmarks/speculators_worker.py train OPERATIONS.json FLAGS OF `speculators train`

`train` reads from stdin how many steps to take next, and writes a JSON line for each turn. It runs `speculators train`
itself with the given flags; `run_on_cpu` adds what a machine without an accelerator needs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file

HELD_BACK = 8
"""Rows for speculators' mandatory validation: the last rows, repeated at the end."""


def convert(shards: Path, folder: Path) -> float:
    """Convert our shards to speculators' offline data. Return the `--train-data-ratio` that trains on all rows."""
    hidden = folder / "hidden_states"
    hidden.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for path in sorted(shards.glob("*.safetensors")):
        with safe_open(str(path), "numpy") as file:
            keys = ("tokens", "loss_mask", "lengths", "aux", "last")
            tokens, mask, lengths, aux, last = (file.get_tensor(key) for key in keys)
        states = np.concatenate([aux, last], axis=1).reshape(len(tokens), -1, last.shape[1])
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            at = slice(int(end - length), int(end))
            ids = torch.tensor(tokens[at].astype(np.int64))
            file_name = hidden / f"hs_{len(rows)}.safetensors"
            save_file({"hidden_states": torch.tensor(states[at]), "token_ids": ids}, str(file_name))
            rows.append({"input_ids": ids.tolist(), "loss_mask": mask[at].tolist(), "seq_len": len(ids)})
    own = len(rows)
    for index in range(own, own + HELD_BACK):
        (hidden / f"hs_{index}.safetensors").symlink_to(f"hs_{index - HELD_BACK}.safetensors")
        rows.append(rows[index - HELD_BACK])
    data = Dataset.from_list(rows)
    data.set_format("torch")
    data.save_to_disk(str(folder))
    return (own + 0.5) / len(rows)


class Turns(logging.Handler):
    """Makes the trainer run a given number of steps, and reports each turn.

    It reads loss, tokens and times of a step from the trainer's own log.
    """

    def __init__(self, out: TextIO, operations: Path):
        super().__init__()
        self._out, self._operations = out, operations
        self._profiler: Any = None

    def begin(self) -> None:
        """Report readiness, and wait for the first turn."""
        self._say({"ready": True})
        self._wait()

    def emit(self, record: logging.LogRecord) -> None:
        if not (isinstance(record.msg, dict) and "train" in record.msg):
            return
        profile = record.msg["profile"]
        self._losses.append(record.msg["train"]["loss"])
        if len(self._losses) == 1:
            return  # for the trainer, this step began with the pause between turns
        for name in ("fetch", "fwd", "bwd", "opt"):
            self._phases[name] += profile[f"{name}_ms"] / 1e3

    def saw(self, document_ids: torch.Tensor) -> None:
        """Count a batch's tokens. The trainer makes T - 1 positions of a conversation with T tokens."""
        self._tokens += int((document_ids >= 0).sum()) + int(document_ids.max()) + 1

    def step(self) -> None:
        """End a turn if it is complete. The trainer calls this after each step."""
        self._left -= 1
        if not self._left:
            self.report()
            self._wait()

    def report(self) -> None:
        """Report the turn, unless it had no steps."""
        seconds, cpu = time.perf_counter() - self._began, os.times()
        if self._profiler:
            self._profiler.__exit__(None, None, None)
            self._operations.write_text(json.dumps(by_operation(self._profiler)), encoding="utf-8")
            self._profiler = None
        used = cpu.user + cpu.system - self._cpu.user - self._cpu.system
        steps, loss = len(self._losses), float(np.mean(self._losses)) if self._losses else 0.0
        self._say({
            "steps": steps, "tokens": self._tokens, "seconds": seconds, "cpu_seconds": used, "loss": loss,
            "phases": dict(self._phases),
        })  # fmt: skip

    def _wait(self) -> None:
        order = sys.stdin.readline().split()
        if not order:
            sys.exit("nobody asks for steps any more")
        self._left = int(order[0])
        self._tokens, self._losses, self._phases = 0, list[float](), defaultdict[str, float](float)
        if order[1:] == ["profile"]:
            only = [torch.profiler.ProfilerActivity.CPU]
            self._profiler = torch.profiler.profile(activities=only, record_shapes=True)
            self._profiler.__enter__()
        self._cpu, self._began = os.times(), time.perf_counter()

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._out, flush=True)


def by_operation(profiler: Any) -> list[dict[str, Any]]:
    """Return seconds by torch operation and input shapes, without the seconds of operations that it calls."""
    return [
        {"name": event.key, "shapes": event.input_shapes, "seconds": event.self_cpu_time_total / 1e6}
        for event in profiler.key_averages(group_by_input_shape=True)
    ]


def run_on_cpu(module: Any) -> None:
    """Replace what `speculators.train.trainer` expects of an accelerator.

    It uses `cuda:0` as the rank's device and for autocast. It times each step between two synchronizations of the
    accelerator; here there is nothing to wait for.
    """
    module.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_: None
    set_up = module.Trainer.setup_trainer

    def setup_trainer(self: Any) -> None:
        set_up(self)
        self.device_type = "cpu"

    module.Trainer.setup_trainer = setup_trainer


def train(operations: Path, flags: list[str], out: TextIO) -> None:
    """Run `speculators train FLAGS`, waiting before each turn."""
    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run_on_cpu(trainer)
    turns = Turns(out, operations)
    train_epoch = trainer.Trainer.train_epoch

    def in_turns(self: Any, epoch: int) -> None:
        self.model.register_forward_pre_hook(lambda _, __, batch: turns.saw(batch["document_ids"]), with_kwargs=True)
        metrics = logging.getLogger("speculators.metrics")
        metrics.setLevel(logging.INFO)
        metrics.addHandler(turns)
        turns.begin()
        train_epoch(self, epoch, step_callback=turns.step)
        turns.report()
        sys.stdin.read()  # the others are still running; validation and saving come after them

    trainer.Trainer.train_epoch = in_turns
    cli.main(TrainConfig.resolve(flags))


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with the answers
    command, first, *rest = sys.argv[1:]
    if command == "convert":
        print(json.dumps({"train_data_ratio": convert(Path(first), Path(rest[0]))}), file=out, flush=True)
    else:
        train(Path(first), rest, out)


if __name__ == "__main__":
    main()
