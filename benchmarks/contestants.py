"""Two trainers that take turns on the same captured tokens: eagle-train's code, and speculators in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eagle_mlx.errors import EagleError
from eagle_mlx.target import Target
from eagle_mlx.train.config import TrainSettings
from eagle_mlx.train.data import Batches, TrainData
from eagle_mlx.train.kinds import KINDS, kind_of
from eagle_mlx.train.step import Stepper, learning_rate_factor, span_of

WORKER = Path(__file__).resolve().parent / "speculators_worker.py"
GLIBC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_ARENA_MAX": "1"}
"""`tune_process` asks glibc for this: keep freed memory. It saves torch page faults as well."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Torch's threads sleep while they wait. Spinning, the default, costs several times the CPU time on a busy machine."""


@dataclass(frozen=True)
class Turn:
    """Some steps of one trainer."""

    steps: int
    tokens: int
    """Tokens of the conversations trained on."""
    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads."""
    loss: float
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds per phase, timed by the trainer itself over all of the turn's steps, or all but the first."""


class Contestant(Protocol):
    name: str

    def turn(self, steps: int, profile: bool = False) -> Turn | None:
        """Run up to this many steps. Return None if no steps are left."""

    def finish(self) -> Path:
        """Return the folder with the trained head."""


class Ours:
    """What `eagle-train` does between evaluations, for one pass over the shards."""

    def __init__(self, target: Target, data: TrainData, config: TrainSettings, folder: Path):
        self.name, self._folder, self._config = "eagle-train", folder / "eagle-train", config
        self.head = KINDS[config.head.kind].new(target, config, data.kept, data.aux_layers)
        self.stepper = Stepper(self.head, target, config)
        batches = Batches(data.samples, config.optimization.rows, config.optimization.length, config.run.seed)
        self._span = span_of(config, batches.steps_per_epoch())
        self._stream = batches.epoch(0)
        self._step = 0

    def turn(self, steps: int, profile: bool = False) -> Turn | None:
        tokens, waited = 0, 0.0
        losses: list[float] = []
        cpu, begin = os.times(), time.perf_counter()
        while len(losses) < steps and not self._span.is_over(self._step, 0.0):
            began = time.perf_counter()
            rows = next(self._stream, None)
            waited += time.perf_counter() - began
            if rows is None:
                break
            at = self._span.progress(self._step, 0.0)
            result = self.stepper(
                rows, learning_rate_factor(at, self._config.optimization.warmup, self._config.optimization.final_lr)
            )
            self._step += 1
            if result is not None:
                tokens += result.tokens
                losses.append(result.loss)
        seconds, after = time.perf_counter() - begin, os.times()
        used = after.user + after.system - cpu.user - cpu.system
        if not losses:
            return None
        return Turn(
            len(losses), tokens, seconds, used, float(np.mean(losses)), {"fetch": waited, "step": seconds - waited}
        )

    def finish(self) -> Path:
        self._stream.close()
        kind_of(self.head).save(self.head, self._folder, "target", {"step": self._step})
        return self._folder


class Speculators:
    """`speculators train` in its own environment, paused between turns."""

    def __init__(self, name: str, python: Path, threads: int, folder: Path, flags: list[str]):
        self.name, self._folder = name, folder / name
        self.operations = folder / f"{name}-operations.json"
        self._steps_left = True
        command = [python, WORKER, "train", self.operations, *flags, "--save-path", self._folder]
        environment = {
            **os.environ,
            **GLIBC,
            **PASSIVE,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment.pop("PYTHONPATH", None)
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment,
            )  # fmt: skip
        self._answer()

    def turn(self, steps: int, profile: bool = False) -> Turn | None:
        if self._process.poll() is not None or not self._steps_left:
            return None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{steps}{' profile' if profile else ''}\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._steps_left = answer["steps"] == steps
        return Turn(**answer) if answer["steps"] else None

    def finish(self) -> Path:
        """Finish the training, with validation and saving."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait():
            raise EagleError(f"speculators' trainer ended with status {self._process.returncode}; see {self._log}")
        return self._folder / "0"

    def stop(self) -> None:
        """End the process in any case."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            end = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise EagleError(f"speculators' trainer ended early: {' '.join(end)} (full output in {self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def convert(python: Path, shards: Path, work: Path) -> float:
    """Write the shards as speculators' offline data into `work`/data, once. Return its `--train-data-ratio`."""
    note = work / "data.json"
    if not note.exists():
        run = subprocess.run([python, WORKER, "convert", shards, work / "data"], stdout=subprocess.PIPE, check=False)
        if run.returncode:
            raise EagleError(f"{shards} could not be converted for speculators; remove {work} before another try")
        note.write_bytes(run.stdout)
    ratio: float = json.loads(note.read_text(encoding="utf-8"))["train_data_ratio"]
    return ratio


def write_vocabulary(data: TrainData, vocab_size: int, work: Path) -> list[str]:
    """Write our draft vocabulary as speculators' two maps. Return the flags that name them."""
    kept = np.arange(vocab_size) if data.kept is None else data.kept
    is_kept = np.zeros(vocab_size, bool)
    is_kept[kept] = True
    np.save(work / "d2t.npy", kept - np.arange(len(kept)))
    np.save(work / "t2d.npy", is_kept)
    sizes = ["--draft-vocab-size", str(len(kept))]
    return [*sizes, "--d2t-path", str(work / "d2t.npy"), "--t2d-path", str(work / "t2d.npy")]


def common_flags(config: TrainSettings, data: TrainData, work: Path, ratio: float) -> list[str]:
    """Return all variants' flags: data, the head's size, unrolled steps, and the settings without a GPU.

    speculators counts layer outputs from 1; 0 is the embedding.
    """
    values = {
        "verifier-name-or-path": config.head.target,
        "data-path": work / "data",
        "train-data-ratio": ratio,
        "total-seq-len": config.optimization.rows * config.optimization.length,
        "ttt-steps": config.optimization.unroll,
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        "num-workers": 1,
        "epochs": 1,
        "on-missing": "raise",
        "seed": config.run.seed,
    }
    flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    if config.optimization.max_steps:
        flags += ["--max-steps", str(config.optimization.max_steps)]
    return [*flags, "--target-layer-ids", *(str(layer + 1) for layer in data.aux_layers)]


def our_settings(config: TrainSettings) -> list[str]:
    """Return flags for our precision, and for our recipe's optimizer, rates, schedule and weights of draft steps."""
    values = {
        "hidden-states-dtype": "float32",
        "optimizer": config.optimization.optimizer,
        "lr": config.optimization.lr,
        "weight-decay": config.optimization.weight_decay,
        "muon-lr": config.optimization.muon_lr or config.optimization.lr,
        "muon-weight-decay": 0.0,
        "muon-adjust-lr-fn": "original" if config.optimization.muon_lr else "match_rms_adamw",
        "scheduler-type": "cosine",
        "scheduler-warmup-ratio": config.optimization.warmup,
        "ttt-step-loss-decay": config.optimization.decay,
    }
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]
