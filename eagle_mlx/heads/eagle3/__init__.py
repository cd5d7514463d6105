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
from eagle_mlx.heads.eagle3.portable import holds_peagle, is_portable, load_eagle3, load_peagle, save_eagle3
from eagle_mlx.heads.eagle3.speculators import holds_speculators, load_speculators, save_speculators
from eagle_mlx.heads.kinds import Format, HeadKind, of_speculators

_WRITERS = "portable EAGLE-3, as SafeAILab and SpecForge write it"
_PORTABLE = is_portable, load_eagle3, save_eagle3
_PORTABLE_PEAGLE = holds_peagle, load_peagle, save_eagle3
_BY_SPECULATORS = load_speculators, save_speculators
_EAGLE3_FORMATS = (
    Format("eagle3", _WRITERS, ("SGLang", "vLLM", "SpecForge"), *_PORTABLE, one_layer_in=("SGLang",)),
    Format(
        "speculators", "speculators", ("speculators", "vLLM"), holds_speculators, *_BY_SPECULATORS, has_embedding=True
    ),
)
_PEAGLE_FORMATS = (
    Format("peagle", "P-EAGLE, as SpecForge writes it", ("SpecForge", "vLLM"), *_PORTABLE_PEAGLE),
    Format(
        "speculators",
        "P-EAGLE, as speculators writes it",
        ("speculators", "vLLM"),
        of_speculators("peagle"),
        *_BY_SPECULATORS,
        has_embedding=True,
    ),
)
KIND = HeadKind("eagle3", "EAGLE-3", Eagle3Head, _EAGLE3_FORMATS, unusual=lambda head: unusual_fields(head.config))
PEAGLE = HeadKind("peagle", "P-EAGLE", PEagleHead, _PEAGLE_FORMATS)

__all__ = [
    "Eagle3Config",
    "Eagle3Head",
    "PEagleConfig",
    "PEagleHead",
    "default_aux_layers",
    "random_head",
    "save_eagle3",
]
