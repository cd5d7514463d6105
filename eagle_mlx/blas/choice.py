"""Choose the BLAS and its threads that are fastest on this machine, by a trial of a few seconds that is kept."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from eagle_mlx.blas import trial as blas_trial
from eagle_mlx.files import cache_folder, write_whole

Purpose = Literal["decoding", "training"]
BLIS = "libblis.so.4"
FALLBACK = "Prescott"
"""OpenBLAS's kernels for an Intel processor that it does not know, from 2004 (its driver/others/dynamic.c)."""
_GAIN = 1.1
"""The least gain for which the default is left. Trials of a quiet machine differ by up to a tenth."""
_SECONDS, _TIMEOUT = 1.0, 30.0
"""Seconds of one library's trial, so that three take four with their starts; and the limit of a trial that hangs."""
_QUIET = 0.25
"""The greatest load per core for a trial: with one busy program, two threads of OpenBLAS take five times as long."""
_ROUNDS = 64  # decoding is judged by a chunk of 256 tokens of a prompt and this many rounds, which is a short answer


class Variant(NamedTuple):
    library: str
    kernels: str  # processor whose kernels OpenBLAS was told to use; empty if it chose
    times: Mapping[tuple[int, int], float]  # seconds by threads and rows (`blas_trial.ROWS`)


@dataclass(frozen=True)
class Choice:
    library: str
    kernels: str
    threads: int  # threads while rounds are computed
    prompt_threads: int  # threads while prompts are computed, and in training
    gain: float = 1.0  # expected speed, relative to OpenBLAS with its own settings


def choose(libraries: Sequence[str], kernels: Callable[[], str | None]) -> Choice | None:
    """Return the choice for this process; None for OpenBLAS with its own settings.

    The first command on a quiet machine measures; others use the result, which is kept until the processor or the
    installed libraries change. `libraries`: names of OpenBLAS; `kernels`: returns the newest ones for this processor.
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
        openblas = ":".join(libraries)
        variants = _trial(openblas), _trial(openblas, kernels() or ""), _trial(BLIS)
        choices = decide([variant for variant in variants if variant is not None], _cores())
        write_whole(file, json.dumps({name: choice and asdict(choice) for name, choice in choices.items()}).encode())
        return choices[purpose]
    return None


def decide(variants: Sequence[Variant], cores: int) -> dict[Purpose, Choice | None]:
    """Return what is best for each purpose; None if the first variant with a thread per core is as good, or nearly.

    BLIS's threads wait in a loop, so in rounds they leave one core to Python.
    """
    few = [rows for rows in blas_trial.ROWS if rows != blas_trial.MANY]
    costs: dict[Purpose, list[tuple[float, Choice]]] = {"decoding": [], "training": []}
    for library, kernels, times in variants:
        counts = sorted({threads for threads, _ in times}, reverse=True)
        many = min(counts, key=lambda threads: times[threads, blas_trial.MANY])
        # In training, each of several parallel streams has one thread.
        costs["training"].append((times[1, blas_trial.MANY], Choice(library, kernels, many, many)))
        for threads in counts:
            if threads == 1 or threads < cores or BLIS not in library:
                rounds = _ROUNDS / len(few) * sum(times[threads, rows] for rows in few)
                cost = rounds + times[many, blas_trial.MANY]
                costs["decoding"].append((cost, Choice(library, kernels, threads, many)))
    best: dict[Purpose, Choice | None] = dict.fromkeys(costs)
    for purpose, entries in costs.items():
        cost, choice = min(entries, key=lambda entry: entry[0], default=(1.0, None))
        if choice is not None and (gain := round(entries[0][0] / cost, 2)) >= _GAIN:
            best[purpose] = replace(choice, gain=gain)
    return best


def _trial(libraries: str, kernels: str = "") -> Variant | None:
    """Return the first of the libraries that can be loaded, with its times; None if none can be used."""
    cores = _cores()
    counts = sorted({1, (cores + 1) // 2, max(1, cores - 1), cores})
    command = [sys.executable, "-S", blas_trial.__file__, libraries, str(_SECONDS), *map(str, counts)]
    environment = {**os.environ, **({"OPENBLAS_CORETYPE": kernels} if kernels else {})}
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=_TIMEOUT)
        library, used, times = json.loads(done.stdout)
        if used != FALLBACK:
            return Variant(library, kernels, {(threads, rows): seconds for threads, rows, seconds in times})
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
