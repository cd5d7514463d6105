"""Requests in, rounds of speculative decoding, text out: the engine and what only it uses."""

from eagle_mlx.engine.engine import Engine
from eagle_mlx.engine.output import Chunk, Output

__all__ = ["Chunk", "Engine", "Output"]
