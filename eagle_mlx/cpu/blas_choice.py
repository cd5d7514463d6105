"""Choose the BLAS and its threads that are fastest on this machine, by a trial of a few seconds that is kept."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from eagle_mlx.cpu import blas_trial
from eagle_mlx.files import cache_folder, write_whole

Purpose = Literal["decoding", "training"]
BLIS = "libblis.so.4"
FALLBACK = "Prescott"
"""OpenBLAS's kernels for an Intel processor that it does not know, from 2004 (its driver/others/dynamic.c)."""
_GAIN = 1.1
"""The least gain for which the default is left. Trials of a quiet machine differ by up to a tenth."""
_SECONDS, _PASSES = 0.5, 2
_TIMEOUT = 30.0
_QUIET = 0.6
"""The greatest load per core at which a trial means something."""
_ROUNDS = 64
"""Decoding is judged by a chunk of 256 tokens of a prompt, and so many rounds."""


@dataclass(frozen=True)
class Variant:
    """A library that was tried."""

    library: str
    kernels: str
    """Processor whose kernels OpenBLAS was told to use; empty if it chose."""
    times: Mapping[int, Mapping[int, float]]
    """Seconds by threads and rows (`blas_trial.ROWS`)."""

    def most_rows(self) -> int:
        """Return the number of threads that is best for many rows."""
        return min(self.times, key=lambda threads: self.times[threads][blas_trial.MANY])


@dataclass(frozen=True)
class Choice:
    library: str
    kernels: str
    threads: int
    """Threads while rounds are computed."""
    prompt_threads: int
    """Threads while prompts are computed, and in training."""
    gain: float
    """Expected speed, relative to OpenBLAS with its own settings."""


def choose(libraries: Sequence[str], kernels: str | None) -> Choice | None:
    """Return the choice for this process; None for OpenBLAS with its own settings.

    The first command on a quiet machine measures; others use the result, which is kept until the processor or the
    installed libraries change. `libraries`: names of OpenBLAS; `kernels`: the newest kernels that the processor runs.
    """
    command = Path(sys.argv[0]).name
    file = cache_folder() / "blas" / f"{_machine()}.json"
    purpose: Purpose = "training" if command in ("eagle-train", "eagle-data") else "decoding"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(file.read_text())[purpose]
        return kept and Choice(**kept)
    wanted = command.startswith("eagle-") and not {"-h", "--help", "--version"} & set(sys.argv)
    if not wanted or os.getloadavg()[0] > _QUIET * _cores():
        return None
    with suppress(OSError):  # without a place to keep the result, every command would measure
        file.parent.mkdir(parents=True, exist_ok=True)
        print("measuring which BLAS is fastest here, once (4 s)", file=sys.stderr)
        choices = decide(_measured(libraries, kernels), _cores())
        write_whole(file, json.dumps({name: choice and asdict(choice) for name, choice in choices.items()}).encode())
        return choices[purpose]
    return None


def decide(variants: Sequence[Variant], cores: int) -> dict[Purpose, Choice | None]:
    """Return what is best for each purpose; None if the first variant with a thread per core is as good, or nearly.

    BLIS's threads wait in a loop, so in rounds they leave one core to Python.
    """
    decoding: list[tuple[float, Variant, int]] = []
    training: list[tuple[float, Variant, int]] = []
    for variant in variants:
        many = variant.most_rows()
        training.append((variant.times[1][blas_trial.MANY], variant, many))  # of parallel streams, each has one thread
        prompt = variant.times[many][blas_trial.MANY]
        for threads, by_rows in sorted(variant.times.items(), reverse=True):
            if threads == 1 or threads < cores or BLIS not in variant.library:
                rounds = [seconds for rows, seconds in by_rows.items() if rows != blas_trial.MANY]
                decoding.append((_ROUNDS * sum(rounds) / len(rounds) + prompt, variant, threads))
    return {"decoding": _best(decoding), "training": _best(training)}


def _best(costs: Sequence[tuple[float, Variant, int]]) -> Choice | None:
    """Return the choice of the least cost; None if the first is as good, or nearly."""
    if not costs:
        return None
    cost, variant, threads = min(costs, key=lambda entry: entry[0])
    gain = round(costs[0][0] / cost, 2)
    return Choice(variant.library, variant.kernels, threads, variant.most_rows(), gain) if gain >= _GAIN else None


def _measured(libraries: Sequence[str], kernels: str | None) -> list[Variant]:
    """Return what this machine has, with its times: first OpenBLAS as it is without a choice."""
    openblas = ":".join(libraries)
    variants = [(openblas, ""), *([(openblas, kernels)] if kernels else []), (BLIS, "")]
    measured: dict[tuple[str, str], Variant] = {}
    for libraries_, core in variants * _PASSES:
        variant = _trial(libraries_, core)
        if variant is not None:
            before = measured.get((libraries_, core), variant).times
            least = {
                count: {rows: min(seconds, before[count][rows]) for rows, seconds in by_rows.items()}
                for count, by_rows in variant.times.items()
            }
            measured[libraries_, core] = replace(variant, times=least)
    return list(measured.values())


def _trial(libraries: str, kernels: str) -> Variant | None:
    """Return the first of the libraries that can be loaded, with its times; None if none can be used."""
    cores = _cores()
    counts = sorted({1, (cores + 1) // 2, max(1, cores - 1), cores})
    command = [sys.executable, "-S", blas_trial.__file__, libraries, str(_SECONDS), *map(str, counts)]
    environment = {**os.environ, **({"OPENBLAS_CORETYPE": kernels} if kernels else {})}
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=_TIMEOUT)
        result = json.loads(done.stdout)
        if result["kernels"] != FALLBACK:
            times = {int(n): {int(m): s for m, s in by_rows.items()} for n, by_rows in result["times"].items()}
            return Variant(result["library"], kernels, times)
    return None


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _machine() -> str:
    """Return a name for this processor and its installed libraries, of which the loader's cache keeps a list."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123  (a path reads all cores, which takes long)
        processor = file.read(4096).partition("\n\n")[0]
    lines = [line for line in processor.splitlines() if line.startswith(("model name", "flags", "CPU part"))]
    about: list[object] = [*lines, _cores(), os.environ.get("LD_LIBRARY_PATH")]
    with suppress(OSError):
        status = Path("/etc/ld.so.cache").stat()
        about += [status.st_mtime_ns, status.st_size]
    return hashlib.blake2s(repr(about).encode()).hexdigest()[:16]
