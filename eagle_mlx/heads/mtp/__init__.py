"""Multi-token prediction: a layer of the target's own architecture over its last hidden state."""

from eagle_mlx.heads.base import HeadKind
from eagle_mlx.heads.mtp.formats import FORMATS, save_mtp
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.published import mtp_of_model

KIND = HeadKind("mtp", "MTP", MTPHead, FORMATS, mode="mtp")

__all__ = ["MTPConfig", "MTPHead", "mtp_of_model", "save_mtp"]
