"""Multi-token prediction: a layer of the target's own architecture over its last hidden state."""

from pathlib import Path

from eagle_mlx.heads.kinds import Format, HeadKind, Tensors
from eagle_mlx.heads.mtp.format import FIELD, load_mtp, save_mtp
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.published import choices_of, is_source, mtp_of_model, mtp_of_tensors
from eagle_mlx.heads.mtp.speculators import save_speculators_mtp


def _hint(folder: Path, tensors: Tensors) -> str | None:
    if not is_source(tensors):
        return None
    return (
        f"{folder} holds a whole model or its MTP layers as they were published; take the head out of it first: "
        f"eagle-convert mtp --source {folder}"
    )


KIND = HeadKind(
    name="mtp",
    title="MTP",
    head_class=MTPHead,
    formats=(
        Format(
            name="mtp",
            about="EAGLE-MLX",
            read_by="this project's own",
            holds=lambda config, _: FIELD in config and config.get("speculators_model_type") is None,
            load=lambda folder, _: load_mtp(folder),
            save=save_mtp,
        ),
        Format(
            name="speculators",
            about="speculators",
            read_by="that of speculators, whose `stitch-mtp` puts the head into its model for vLLM",
            holds=lambda config, _: config.get("speculators_model_type") == "mtp",
            load=lambda folder, _: load_mtp(folder),
            save=save_speculators_mtp,
        ),
    ),
    mode="mtp",
    hint=_hint,
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
