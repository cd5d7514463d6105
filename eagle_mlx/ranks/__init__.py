"""Several processes of one run, and what they say to one another."""

from eagle_mlx.ranks.world import World

__all__ = ["World"]
