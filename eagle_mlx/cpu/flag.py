"""Whether a CPU takes ways of its own: the one place that asks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from eagle_mlx.errors import ConfigError

ENVIRONMENT = "EAGLE_MLX_CPU_SHORTCUTS"


def _wish(said: str) -> bool:
    if said not in ("", "0", "1"):
        raise ConfigError(f"{ENVIRONMENT} is {said!r}; set it to 0 to compute on a CPU as on a GPU, or leave it out")
    return said != "0"


_wanted = _wish(os.environ.get(ENVIRONMENT, ""))


def use_shortcuts() -> bool:
    """Whether to compute in the ways that are faster on a CPU: there, unless they are switched off."""
    return _wanted and mx.default_device() == mx.Device(mx.cpu)


@contextmanager
def without_shortcuts() -> Iterator[None]:
    """Compute as on a GPU within the block, in all threads."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before
