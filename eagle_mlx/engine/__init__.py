"""The engine: schedules requests, runs rounds of speculative decoding, and returns text."""

from eagle_mlx.engine.engine import Engine

__all__ = ["Engine"]
