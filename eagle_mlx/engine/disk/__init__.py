"""The prefix cache's disk tier: what was read of texts, in files that a restarted engine goes on from."""

from eagle_mlx.engine.disk.tier import DiskTier, PassedOverError, default_bytes

__all__ = ["DiskTier", "PassedOverError", "default_bytes"]
