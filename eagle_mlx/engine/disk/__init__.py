"""The prefix cache's disk tier: saved prefixes that survive a restart of the engine."""

from eagle_mlx.engine.disk.tier import DiskTier, PassedOverError, default_bytes

__all__ = ["DiskTier", "PassedOverError", "default_bytes"]
