"""One target over several processes: rank 0 decides, and the other ranks execute its commands."""

from eagle_mlx.ranks.channel import TIMEOUT, Channel, RankStatus
from eagle_mlx.ranks.follower import follow
from eagle_mlx.ranks.leader import LeadingTarget
from eagle_mlx.ranks.load import load_over_ranks, shard_layers, shard_tensors
from eagle_mlx.ranks.world import World

__all__ = [
    "TIMEOUT",
    "Channel",
    "LeadingTarget",
    "RankStatus",
    "World",
    "follow",
    "load_over_ranks",
    "shard_layers",
    "shard_tensors",
]
