"""Block drafters: DFlash and DSpark, whose slots are all drafted in one forward.

Sources of the recipes: deepseek-ai/DeepSpec (losses and their weights), vllm-project/speculators (anchors).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import mlx.core as mx
import numpy as np

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.block import BlockConfig, BlockHead, DFlashHead, DSparkHead
from eagle_mlx.target import Target

from ...config import TrainConfig
from ..base import Kind, layer_shape
from ..least_squares import Matrix, Moments
from .start import begin_linear, lagged
from .unroll import unroll_blocks

_READ = 5
"""Target layers that a published block drafter reads."""
_DECAY = float(np.exp(-1 / 4))
"""exp(-k / 4) is the weight of slot k in the published losses for blocks of about eight slots."""
_RANK = 256
"""Rank of the published Markov heads."""
B = TypeVar("B", bound=BlockHead)


class BlockKind(Kind[B]):
    """What DFlash and DSpark share. `--unroll` is the number of drafts of a block.

    `--loss-weights` are those of the distance |p - q| between the distributions, and of `--loss`.
    """

    in_blocks = True
    unroll = staticmethod(unroll_blocks)
    defaults: ClassVar[Mapping[str, Any]] = {
        "draft_vocab": 32000,
        "unroll": 7,
        "decay": _DECAY,
        "layers": 2,
        "loss": "hard",
        "feature_noise": 0.0,
    }
    foreign: ClassVar[Mapping[str, str]] = {
        "feature_norm": "its norm is fixed",
        "recycle": "it has no draft steps",
        "norm_before_residual": "it has no such norm",
    }

    def head_config(
        self, target: Target, config: TrainConfig, draft_vocab_size: int, aux_layers: tuple[int, ...]
    ) -> BlockConfig:
        """Return the config of a new head for `config.optimization.unroll` drafts.

        With the target's whole vocabulary, the head uses the target's output projection.
        """
        return BlockConfig(
            **layer_shape(target, config),
            draft_vocab_size=draft_vocab_size,
            own_lm_head=draft_vocab_size < target.vocab_size,
            aux_layers=aux_layers,
            num_hidden_layers=config.head.layers or self.defaults["layers"],
            block_size=config.optimization.unroll,
            mask_token_id=mask_token(target),
        )

    def aux_layers(self, target: Target, config: TrainConfig) -> tuple[int, ...]:
        return config.head.aux_layers or spread_layers(target.num_layers)

    def guess(
        self, head: B, target: Target, following: mx.array, aux: list[mx.array], last: mx.array
    ) -> tuple[mx.array, mx.array]:
        wanted = mx.fast.rms_norm(last, None, head.config.rms_norm_eps)
        return lagged(mx.concatenate(aux, axis=-1)[:, :-1], following, wanted[:, 1:])

    def begin_as(self, head: B, guess: Matrix, by: Moments) -> None:
        begin_linear(head, guess, by)

    def mismatches(self, head: B, config: TrainConfig) -> Mapping[str, Any]:
        shape = head.config
        if shape.markov_head == "rnn" and not shape.first_slot_drafts:
            raise ConfigError(
                f"{config.head.init_from} has a recurrent Markov head (markov_head_type rnn) whose first slot drafts "
                "nothing (sample_from_anchor false), which cannot be trained; start from another head"
            )
        if config.optimization.unroll > shape.drafts:
            raise ConfigError(
                f"--unroll is {config.optimization.unroll}, but {config.head.init_from} drafts blocks of "
                f"{shape.drafts}; use --unroll {shape.drafts} or less"
            )
        return super().mismatches(head, config)


class DFlashKind(BlockKind[DFlashHead]):
    """Recipe: cross entropy with the target's token, weighted by slot. The first slot of a block predicts nothing."""

    head_class = DFlashHead

    def head_config(self, target: Target, config: TrainConfig, *rest: Any) -> BlockConfig:
        plain = super().head_config(target, config, *rest)
        return dataclasses.replace(plain, block_size=config.optimization.unroll + 1)


class DSparkKind(BlockKind[DSparkHead]):
    """Recipe: 0.1 of cross entropy, 0.9 of the distance |p - q|, and the cross entropy of the confidence."""

    head_class = DSparkHead
    defaults: ClassVar[Mapping[str, Any]] = {**BlockKind.defaults, "loss_weights": (0.9, 0.1)}
    confidence_weight = 1.0

    def head_config(self, target: Target, config: TrainConfig, *rest: Any) -> BlockConfig:
        return dataclasses.replace(
            super().head_config(target, config, *rest),
            first_slot_drafts=True,
            markov_head="vanilla",
            markov_rank=min(_RANK, target.hidden_size // 4),
            confidence_head=True,
        )


def spread_layers(num_layers: int, count: int = _READ) -> tuple[int, ...]:
    """Return the target layers that a new head reads, evenly from the second to the third from the end.

    Source: z-lab/dflash, for 36 layers 1, 9, 17, 25 and 33.
    """
    last = num_layers - 3
    if last <= 1:
        return (num_layers // 2,)
    return tuple(sorted({round(1 + i * (last - 1) / (count - 1)) for i in range(count)}))


def mask_token(target: Target) -> int:
    """Return the id of a block's mask tokens: an unused id if the embedding has one, else the end of text.

    The embedding stays the target's. Its text never contains an unused id, and no draft follows the end of text.
    """
    tokenizer: Any = target.tokenizer
    if tokenizer is not None and (used := len(tokenizer.get_vocab())) < target.vocab_size:
        return used
    return min(target.eos_token_ids, default=target.vocab_size - 1)
