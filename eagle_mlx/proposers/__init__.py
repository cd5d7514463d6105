"""Proposers: heads, draft models and n-grams. `base.py` is the seam between a proposer and the engine."""

from eagle_mlx.errors import require
from eagle_mlx.heads import DraftHead, HeadBase
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.head import HeadProposer

ProposerLike = Proposer | DraftHead


def as_proposer(drafter: ProposerLike) -> Proposer:
    """Return the proposer of a head, and a proposer unchanged. Raises ConfigError for anything else."""
    if isinstance(drafter, HeadBase):
        return HeadProposer(drafter)
    ways = "em.load_head(name, target), em.DraftModelProposer(em.load_target(name)), or derived from proposers.base"
    require("proposer", drafter, Proposer, f"a head or a proposer ({ways}.Proposer)")
    return drafter
