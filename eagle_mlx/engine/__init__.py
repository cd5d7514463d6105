"""Requests in, rounds of speculative decoding, text out: the engine and what only it uses."""

from eagle_mlx.engine.engine import Engine

__all__ = ["Engine"]
