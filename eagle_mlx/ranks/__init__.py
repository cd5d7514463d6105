"""One target over several processes: rank 0 decides, and the other ranks execute its commands."""

from eagle_mlx.ranks.channel import ProcessGroup
from eagle_mlx.ranks.load import load_over_ranks

__all__ = ["ProcessGroup", "load_over_ranks"]
