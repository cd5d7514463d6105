"""EAGLE-3: a decoder layer over several of the target's layers, with its own draft vocabulary."""

from eagle_mlx.heads.eagle3.head import (
    Eagle3Config,
    Eagle3Head,
    PEagleConfig,
    PEagleHead,
    default_aux_layers,
    random_head,
    unusual_fields,
)
from eagle_mlx.heads.eagle3.peagle import holds_peagle, load_peagle
from eagle_mlx.heads.eagle3.portable import is_portable, load_eagle3, save_eagle3
from eagle_mlx.heads.eagle3.speculators import holds_speculators, load_speculators, save_speculators
from eagle_mlx.heads.kinds import Format, HeadKind, of_speculators

KIND = HeadKind(
    name="eagle3",
    title="EAGLE-3",
    head_class=Eagle3Head,
    formats=(
        Format(
            name="eagle3",
            about="portable EAGLE-3, as SafeAILab and SpecForge write it",
            readers=("SGLang", "vLLM", "SpecForge"),
            holds=is_portable,
            load=load_eagle3,
            save=save_eagle3,
            one_layer_in=("SGLang",),
        ),
        Format(
            name="speculators",
            about="speculators",
            readers=("speculators", "vLLM"),
            holds=holds_speculators,
            load=load_speculators,
            save=save_speculators,
            has_embedding=True,
        ),
    ),
    unusual=lambda head: unusual_fields(head.config),
)

PEAGLE = HeadKind(
    name="peagle",
    title="P-EAGLE",
    head_class=PEagleHead,
    formats=(
        Format(
            name="peagle",
            about="P-EAGLE, as SpecForge writes it",
            readers=("SpecForge", "vLLM"),
            holds=holds_peagle,
            load=load_peagle,
            save=save_eagle3,
        ),
        Format(
            name="speculators",
            about="P-EAGLE, as speculators writes it",
            readers=("speculators", "vLLM"),
            holds=of_speculators("peagle"),
            load=load_speculators,
            save=save_speculators,
            has_embedding=True,
        ),
    ),
)

__all__ = [
    "KIND",
    "PEAGLE",
    "Eagle3Config",
    "Eagle3Head",
    "PEagleConfig",
    "PEagleHead",
    "default_aux_layers",
    "load_eagle3",
    "load_speculators",
    "random_head",
    "save_eagle3",
    "save_speculators",
]
