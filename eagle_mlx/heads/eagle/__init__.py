"""EAGLE-1 and EAGLE-2: one layer over the target's last hidden state."""

from eagle_mlx.heads.eagle.format import holds_eagle, load_eagle, save_eagle
from eagle_mlx.heads.eagle.head import EagleConfig, EagleHead
from eagle_mlx.heads.kinds import Format, HeadKind

KIND = HeadKind(
    name="eagle",
    title="EAGLE-1",
    head_class=EagleHead,
    formats=(
        Format(
            name="eagle",
            about="EAGLE-1, as SafeAILab writes it",
            read_by="that of SafeAILab and SGLang",
            holds=holds_eagle,
            load=lambda folder, _: load_eagle(folder),
            save=save_eagle,
            servers=lambda head: ("sglang",),
            has_embedding=True,
        ),
    ),
)

__all__ = ["KIND", "EagleConfig", "EagleHead", "load_eagle", "save_eagle"]
