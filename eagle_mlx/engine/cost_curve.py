"""Time of a target forward by number of tokens, measured at the start and saved."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import numpy as np

from eagle_mlx.cache import RaggedCache, check_cacheable
from eagle_mlx.errors import require
from eagle_mlx.files import cache_folder, write_whole
from eagle_mlx.machine import describe
from eagle_mlx.target import Target, fingerprint

SIZES = (1, 4, 8, 2, 16, 3, 6, 32, 5, 7, 9)
"""Token counts to measure, in this order, so that a slow target gets a coarse curve in time."""
SECONDS = 1.0  # approximate time limit for measuring, including compilation of kernels
_AGREE = 1.25
"""A size is settled if its two shortest times differ by at most this factor. They differed by up to 1.2 on two quiet
cores, and by 1.4 to 2 while another program ran."""
_VERSION = 3
"""Version of the file format. Files of other versions are ignored."""

Curve = list[tuple[int, float]]  # pairs of tokens and seconds
Times = dict[int, list[float]]  # the one or two shortest times, in seconds, of a forward of so many tokens


def learn_costs(
    target: Target, kv_bits: int | None = None, exact: bool = False, folder: str | Path | None = None
) -> Curve | None:
    """Return a target's cost curve for `ThroughputPolicy`; None if too few sizes could be measured.

    Times are kept in a file in `folder` (default: `costs` in the cache folder). Each call measures the sizes that are
    not settled yet, so that times from a busy machine improve. `kv_bits`, `exact`: the engine's. Raises TargetError if
    the target has no cache of `kv_bits`.
    """
    require("target", target, Target, "a Target, such as em.load_target(name)")
    check_cacheable(target.model, kv_bits=kv_bits)
    about = {
        "version": _VERSION,
        "machine": {name: str(value) for name, value in asdict(describe()).items()},
        "target": fingerprint(target),
        "kv_bits": kv_bits,
    }
    digest = hashlib.blake2s(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    file = Path(folder or cache_folder() / "costs") / f"{digest}.json"
    saved = _read(file)
    times = saved if target.ranks > 1 else measured_times(target, kv_bits, saved)
    if len(times) < 2:
        return None
    if times != saved:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps({"about": about, "times": times}).encode())
    curve = curve_of(times)
    if exact:  # its rounds read two tokens instead of one
        tokens, seconds = zip(*curve, strict=True)
        curve = [(1, float(np.interp(2, tokens, seconds))), *(point for point in curve if point[0] > 1)]
    return curve


def _read(file: Path) -> Times:
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        content = json.loads(file.read_text(encoding="utf-8"))["times"]
        times = {int(size): sorted(float(seconds) for seconds in took) for size, took in content.items()}
        if all(size in SIZES and took and 0 < took[0] and took[-1] < math.inf for size, took in times.items()):
            return times
    return {}


def measured_times(
    target: Target, kv_bits: int | None = None, saved: Times | None = None, seconds: float = SECONDS
) -> Times:
    """Time forwards of one row for about `seconds`, until all sizes are settled. `saved` times count too."""
    cache = RaggedCache.of(target.model, 1, kv_bits)
    compiled, times = set[int](), dict(saved or {})
    began = perf_counter()
    for size in 3 * SIZES:
        shortest = times.get(size, [])
        if len(shortest) == 2 and shortest[1] <= _AGREE * shortest[0]:
            continue
        for _ in range(1 if size in compiled else 2):
            started = perf_counter()
            if started - began > seconds:
                return times
            mx.eval(target.forward(mx.zeros((1, size), mx.int32), cache).logits)
        compiled.add(size)
        times[size] = sorted([*shortest, perf_counter() - started])[:2]
    return times


def curve_of(times: Times) -> Curve:
    """Return the shortest time of each size, corrected for other load, which may only slow a forward down. A size takes
    at most as long as any larger one, and n tokens take at most n times as long as one."""
    sizes = sorted(times)
    least = times[sizes[0]][0] / sizes[0] if sizes else 0.0
    return [(size, min(size * least, *(times[of][0] for of in sizes if of >= size))) for size in sizes]
