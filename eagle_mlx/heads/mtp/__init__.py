"""Multi-token prediction: a layer of the target's own architecture over its last hidden state."""

from eagle_mlx.heads.kinds import Format, HeadKind, of_speculators
from eagle_mlx.heads.mtp.formats import FIELD, load_mtp, save_mtp, save_speculators_mtp
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.published import choices_of, mtp_of_model, mtp_of_tensors
from eagle_mlx.heads.mtp.split import MODEL_TYPE, holds_split, load_split, save_split

KIND = HeadKind(
    name="mtp",
    title="MTP",
    head_class=MTPHead,
    formats=(
        Format(
            name="mtp",
            about="EAGLE-MLX",
            readers=(),
            holds=lambda config, _: FIELD in config and config.get("speculators_model_type") is None,
            load=lambda folder, _: load_mtp(folder),
            save=save_mtp,
        ),
        Format(
            name="speculators",
            about="speculators",
            readers=("speculators",),
            holds=of_speculators("mtp"),
            load=lambda folder, _: load_mtp(folder),
            save=save_speculators_mtp,
        ),
        Format(
            name=MODEL_TYPE,
            about="mlx-vlm, as a split MTP layer",
            readers=("mlx-vlm",),
            holds=holds_split,
            load=lambda folder, _: load_split(folder),
            save=save_split,
        ),
    ),
    mode="mtp",
)

__all__ = [
    "KIND",
    "MTPConfig",
    "MTPHead",
    "choices_of",
    "load_mtp",
    "load_split",
    "mtp_of_model",
    "mtp_of_tensors",
    "save_mtp",
    "save_speculators_mtp",
    "save_split",
]
