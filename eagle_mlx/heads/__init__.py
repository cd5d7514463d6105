"""Draft heads: one module or folder per kind, with the network and its file layouts. `kinds.py` is the registry."""

from eagle_mlx.heads import block, eagle, eagle3, mtp
from eagle_mlx.heads.base import DraftHead, HeadBase
from eagle_mlx.heads.kinds import KINDS, Format, HeadKind, kind_of
from eagle_mlx.heads.load import check_fit, load_head

# Kinds that name themselves come before those that are recognized by their tensors.
_ALL = (mtp.KIND, block.DFLASH, block.DFLASH2, block.DSPARK, eagle3.PEAGLE, eagle3.KIND, eagle.KIND)
KINDS.update({kind.name: kind for kind in _ALL})

__all__ = ["KINDS", "DraftHead", "Format", "HeadBase", "HeadKind", "check_fit", "kind_of", "load_head"]
