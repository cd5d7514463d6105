"""The kinds of heads that can be trained: their defaults, and the settings that they do not support."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class KindSettings(NamedTuple):
    """Defaults of a kind of head, and settings that it does not support."""

    recipe: str
    """`module:class` in `train/kinds`."""
    defaults: Mapping[str, Any]
    foreign: Mapping[str, str]
    """Settings that it does not support, with reasons."""


ANCHOR_SHARE = 0.7
"""P-EAGLE: the share of anchors that each slot keeps of those of the slot before."""
_BLOCK_DECAY = math.exp(-1 / 4)
"""exp(-k / 4) is the weight of slot k in the published losses for blocks of about eight slots."""
_EAGLE3 = {
    **{"draft_vocab": 32000, "unroll": 7, "decay": 0.8, "layers": 1, "loss": "soft", "feature_noise": 0.0},
    **{"feature_norm": "each", "recycle": "normed"},
}
_ONE_LOSS = {"loss_weights": "--loss is its only loss"}
_ONE_LAYER = {
    "draft_vocab": "it drafts the target's whole vocabulary",
    "aux_layers": "it reads only the target's last layer",
    "layers": "it has one layer",
    "feature_norm": "it has no such norm",
    "recycle": "its format determines it",
    "norm_before_residual": "it has no such norm",
}
_BLOCK = {"draft_vocab": 32000, "unroll": 7, "decay": _BLOCK_DECAY, "layers": 2, "loss": "hard", "feature_noise": 0.0}
_NOT_IN_BLOCKS = {
    "feature_norm": "its norm is fixed",
    "recycle": "it has no draft steps",
    "norm_before_residual": "it has no such norm",
}
KIND_SETTINGS = {
    "peagle": KindSettings(
        "eagle3:PEagleKind",
        {**{name: _EAGLE3[name] for name in _EAGLE3 if name != "recycle"}, "layers": 2, "decay": ANCHOR_SHARE},
        {**_ONE_LOSS, "recycle": "it has no draft steps"},
    ),
    "eagle3": KindSettings("eagle3:Eagle3Kind", _EAGLE3, _ONE_LOSS),
    "eagle": KindSettings(
        "last_layer:EagleKind",
        {"unroll": 1, "decay": 0.8, "loss": "soft", "loss_weights": (1.0, 0.1), "feature_noise": 0.1},
        _ONE_LAYER,
    ),
    "mtp": KindSettings(
        "last_layer:MTPKind",
        {"unroll": 3, "decay": 0.6, "loss": "soft", "feature_noise": 0.0},
        {
            **_ONE_LAYER,
            **dict.fromkeys(("intermediate_size", "heads", "kv_heads"), "its layer has the shape of the target's"),
            **_ONE_LOSS,
        },
    ),
    "dflash": KindSettings("block:DFlashKind", _BLOCK, _NOT_IN_BLOCKS),
    "dflash2": KindSettings(
        "block:DFlash2Kind",
        {name: value for name, value in _BLOCK.items() if name != "draft_vocab"},
        {**_NOT_IN_BLOCKS, "draft_vocab": _ONE_LAYER["draft_vocab"]},
    ),
    "dspark": KindSettings("block:DSparkKind", {**_BLOCK, "loss_weights": (0.9, 0.1)}, _NOT_IN_BLOCKS),
}
LAYOUTS = """\
  dflash       DFlash: z-lab, vLLM, SGLang
  dflash2      DFlash2: z-lab, SGLang
  dspark       DSpark: DeepSpec, vLLM, SGLang
  eagle        EAGLE-1: SafeAILab, SGLang
  eagle3       EAGLE-3: SGLang, vLLM, SpecForge
  mtp          MTP: EAGLE-MLX
  muse         DFlash: mlx-vlm, SGLang
  peagle       P-EAGLE: SpecForge, vLLM
  qwen3_5_mtp  MTP: mlx-vlm
  specforge    DSpark: SpecForge, SGLang
  speculators  MTP, DFlash, DSpark, P-EAGLE, EAGLE-3: speculators, vLLM
"""
"""The formats of `heads.KINDS`, which a test compares."""
