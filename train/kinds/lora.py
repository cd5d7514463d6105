"""The weights of an existing head that are trained: all, or only low-rank additions to its matrices (LoRA).

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1. The layers
are mlx_lm's.
"""

from __future__ import annotations

import math
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from eagle_mlx.formats.tensors import in_file_type, weights_of

from ..config import TrainConfig, pass_type
from .base import Head, freeze_embedding

_IN_LOGITS = ("lm_head", "markov_head", "confidence_head")
"""Parts without additions: their matrices have a row for each token, or a single one."""


def choose_trained(head: Head, config: TrainConfig) -> None:
    """Choose which weights of an existing head are trained.

    These are all weights except its own embedding. With a rank, they are only the additions, which begin at zero, to
    the matrices of its layers and to the one in front of them; experts have none. The other weights are then kept in
    the dtype of the passes.
    """
    if not config.head.lora_rank:
        freeze_embedding(head)
        return
    head.load_weights(list(in_file_type(weights_of(head), pass_type(config)).items()))
    head.freeze()
    rng = np.random.default_rng(config.run.seed)
    matrices = [
        (path, part)
        for path, part in sorted(head.named_modules(), key=lambda named: named[0])
        if isinstance(part, nn.Linear) and not path.startswith(_IN_LOGITS)
    ]
    head.update_modules(tree_unflatten([(path, _added(part, config, rng)) for path, part in matrices]))


def _added(part: nn.Linear, config: TrainConfig, rng: np.random.Generator) -> LoRALinear:
    """Return a matrix with an addition of mlx_lm's default scale, begun by `rng` as mlx_lm does."""
    added: LoRALinear = LoRALinear.from_base(part, config.head.lora_rank)
    most = 1 / math.sqrt(part.weight.shape[1])
    added.lora_a = mx.array(rng.uniform(-most, most, added.lora_a.shape), mx.float32)
    return added


def merged(head: Head) -> Head:
    """Return the head with its low-rank additions added to its matrices; the same object if it has none."""
    adapted = {path: part for path, part in head.named_modules() if isinstance(part, LoRALinear)}
    if not adapted:
        return head
    weights = {name.replace(".linear.", "."): x for name, x in weights_of(head).items() if ".lora_" not in name}
    weights |= {f"{path}.weight": part.fuse().weight for path, part in adapted.items()}
    made: Any = type(head)
    plain: Head = made(head.config) if head.d2t is None else made(head.config, head.d2t)
    plain.load_weights(list(weights.items()))
    plain.attach(head.target)
    return plain


def parameters_of(head: Head) -> str:
    """Return the numbers of a head's parameters and of those that are trained, in words."""
    trained, whole = (
        sum(leaf.size for _, leaf in cast("list[tuple[str, mx.array]]", tree_flatten(tree)))
        for tree in (head.trainable_parameters(), head.parameters())
    )
    return f"{whole:,} parameters, of which {trained:,} are trained"
