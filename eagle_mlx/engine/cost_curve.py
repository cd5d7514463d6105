"""Time of a target forward by number of tokens, measured once per machine and saved."""

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

from eagle_mlx.cache import RaggedCache
from eagle_mlx.engine.engine import Engine
from eagle_mlx.files import cache_folder, write_whole
from eagle_mlx.machine import describe
from eagle_mlx.policy import ThroughputPolicy
from eagle_mlx.target import Target, fingerprint

SIZES = (1, 4, 8, 2, 16, 3, 6, 32, 5, 7, 9)
"""Token counts to measure, in this order, so that a slow target gets a coarse curve in time."""
SECONDS = 1.0
"""Approximate time limit for measuring, including compilation of kernels."""
_VERSION = 2
"""Version of the file format. Files of other versions are ignored."""

Curve = list[tuple[int, float]]
"""Pairs of tokens and seconds."""


def learn_costs(engine: Engine, folder: Path | None = None) -> bool:
    """Give the engine's policy its target's cost curve. Return whether it has one now.

    It is read from a file in `folder` (default: `costs` in the cache folder), or measured and saved; file errors are
    ignored. Only `ThroughputPolicy` uses it. Call this before the first request, while the machine is idle.
    """
    policy = engine.policy
    if engine.proposer is None or not isinstance(policy, ThroughputPolicy):
        return False
    about = {
        "version": _VERSION,
        "machine": {name: str(value) for name, value in asdict(describe()).items()},
        "target": fingerprint(engine.target),
        "kv_bits": engine.kv_bits,
    }
    digest = hashlib.blake2s(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    file = (folder or cache_folder() / "costs") / f"{digest}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        content = json.loads(file.read_text(encoding="utf-8"))
        saved = sorted((int(tokens), float(seconds)) for tokens, seconds in content["curve"])
        if _is_curve(saved):
            policy.costs.curve = _of_rounds(saved, engine.exact)
            return True
    if engine.target.is_sharded:  # the other ranks would have to take part
        return False
    curve = measured_curve(engine.target, engine.kv_bits)
    if not _is_curve(curve):
        return False
    policy.costs.curve = _of_rounds(curve, engine.exact)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"about": about, "curve": curve}).encode())
    return True


def measured_curve(target: Target, kv_bits: int | None = None, seconds: float = SECONDS) -> Curve:
    """Time forwards of one row. Return the sizes measured in time, each with its shortest time.

    The curve never decreases with size: other load can make a forward slower, but never faster.
    """
    cache = RaggedCache.of(target.model, 1, kv_bits)
    compiled, shortest = set[int](), dict[int, float]()
    began = perf_counter()
    for size in [*(size for size in SIZES for _ in range(2)), *SIZES, *SIZES]:
        started = perf_counter()
        if started - began > seconds:
            break
        mx.eval(target.forward(mx.zeros((1, size), mx.int32), cache).logits)
        if size in compiled:
            shortest[size] = min(perf_counter() - started, shortest.get(size, seconds))
        compiled.add(size)
    return [(size, min(took for of, took in shortest.items() if of >= size)) for size in sorted(shortest)]


def _of_rounds(curve: Curve, exact: bool) -> Curve:
    """Return the curve of an engine's rounds, which read two tokens instead of one if it is exact."""
    if not exact:
        return curve
    tokens, seconds = zip(*curve, strict=True)
    return [(1, float(np.interp(2, tokens, seconds))), *(point for point in curve if point[0] > 1)]


def _is_curve(curve: Curve) -> bool:
    sizes = {tokens for tokens, _ in curve}
    return len(curve) == len(sizes) > 1 and min(sizes) > 0 and all(0 < seconds < math.inf for _, seconds in curve)
