"""EAGLE-3: a decoder layer over several of the target's layers, with its own draft vocabulary."""

from eagle_mlx.heads.base import HeadKind
from eagle_mlx.heads.eagle3.formats import EAGLE3_FORMATS, PEAGLE_FORMATS, save_eagle3
from eagle_mlx.heads.eagle3.head import (
    Eagle3Config,
    Eagle3Head,
    PEagleConfig,
    PEagleHead,
    default_aux_layers,
    random_head,
    unusual_fields,
)

KIND = HeadKind("eagle3", "EAGLE-3", Eagle3Head, EAGLE3_FORMATS, unusual=unusual_fields)
PEAGLE = HeadKind("peagle", "P-EAGLE", PEagleHead, PEAGLE_FORMATS)

__all__ = ["Eagle3Config", "Eagle3Head", "PEagleConfig", "PEagleHead", "default_aux_layers", "random_head"]
__all__ += ["save_eagle3"]
