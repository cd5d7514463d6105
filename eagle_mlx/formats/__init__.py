"""Head checkpoints on disk, one file a layout."""

from __future__ import annotations

from eagle_mlx.formats.eagle import load_eagle, save_eagle
from eagle_mlx.formats.eagle3 import load_eagle3, save_eagle3
from eagle_mlx.formats.load import check_fit, load_head
from eagle_mlx.formats.mtp import load_mtp, save_mtp
from eagle_mlx.formats.mtp_source import mtp_of_model, mtp_of_tensors
from eagle_mlx.formats.speculators import load_speculators, save_speculators
from eagle_mlx.formats.speculators_mtp import save_speculators_mtp

__all__ = [
    "check_fit",
    "load_eagle",
    "load_eagle3",
    "load_head",
    "load_mtp",
    "load_speculators",
    "mtp_of_model",
    "mtp_of_tensors",
    "save_eagle",
    "save_eagle3",
    "save_mtp",
    "save_speculators",
    "save_speculators_mtp",
]
