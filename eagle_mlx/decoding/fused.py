"""Elementwise functions as one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import mlx.core as mx

from eagle_mlx.cpu import use_shortcuts


def fused(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Let MLX compile an elementwise function of arrays, for all shapes at once: one pass over memory in place of many.

    A CPU takes the function as it is: MLX would compile it with g++, which costs seconds and gains nothing there.
    """
    compiled = mx.compile(function, shapeless=True)

    @wraps(function)
    def call(*arrays: mx.array) -> mx.array:
        result: mx.array = function(*arrays) if use_shortcuts() else compiled(*arrays)
        return result

    return call
