"""Multi-token prediction: a layer of the target's own architecture over its last hidden state."""

from eagle_mlx.heads.kinds import Format, HeadKind, of_speculators
from eagle_mlx.heads.mtp.formats import FIELD, load_mtp, save_mtp, save_speculators_mtp
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.published import choices_of, mtp_of_model, mtp_of_tensors

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
    ),
    mode="mtp",
)

__all__ = [
    "KIND",
    "MTPConfig",
    "MTPHead",
    "choices_of",
    "load_mtp",
    "mtp_of_model",
    "mtp_of_tensors",
    "save_mtp",
    "save_speculators_mtp",
]
