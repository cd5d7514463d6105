"""Proposers: heads, draft models and n-grams. `base.py` is the seam between a proposer and the engine."""

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads import DraftHead, HeadBase
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.head import HeadProposer

ProposerLike = Proposer | DraftHead


def as_proposer(drafter: ProposerLike) -> Proposer:
    """Return the proposer of a head, and a proposer unchanged. Raises ConfigError for anything else."""
    if isinstance(drafter, HeadBase):
        return HeadProposer(drafter)
    if not isinstance(drafter, Proposer):
        raise ConfigError(
            f"proposer must be a head or a proposer, not {drafter!r}; load a head with em.load_head(name, target), use "
            "a small model with em.DraftModelProposer(em.load_target(name)), or derive from proposers.base.Proposer"
        )
    return drafter
