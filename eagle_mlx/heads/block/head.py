"""Block drafters: one forward over the newest token and mask tokens drafts a whole block.

Sources: z-lab's DFlash (package `dflash`), deepseek-ai/DeepSpec and vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.heads.base import HeadBase, Mask
from eagle_mlx.heads.block import layers as parts
from eagle_mlx.heads.block.layers import BlockAttention, BlockConfig
from eagle_mlx.target import Target, setting_of


class BlockHead(HeadBase[BlockConfig]):
    """A head whose slots attend to the target's hidden states before the newest token, and to each other."""

    def __init__(self, config: BlockConfig, token_ids: mx.array | None = None):
        super().__init__(config, token_ids)
        size, eps = config.hidden_size, config.rms_norm_eps
        self._scale, self._softcap = 1.0, config.logit_softcap
        self._as_target = False
        self.fc = nn.Linear(size * len(config.aux_layers), size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        layer = parts.ConvolvedLayer if config.conv_kernel_size else parts.BlockLayer
        if config.gemma:
            layer = parts.GemmaLayer
        self.layers = [layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(size, eps=eps)
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.markov_head is not None:
            self.markov_head = parts.MARKOV_HEADS[config.markov_head](config)
        if config.selector_rank:
            self.candidate_selector = parts.CandidateSelector(config)
        if config.confidence_head:
            self.confidence_head = parts.ConfidenceHead(config)

    def attach(self, target: Target) -> None:
        """Use the target's parts, and its ways to scale embeddings and logits unless the head has its own."""
        super().attach(target)
        own = self.config
        of_gemma = str(setting_of(target.model, "model_type")).startswith("gemma")  # Gemma scales its embeddings
        scale = target.hidden_size**0.5 if of_gemma else 1.0
        self._scale = scale if own.embedding_scale is None else own.embedding_scale
        self._as_target = not own.own_lm_head and own.output_multiplier == 1 and own.logit_softcap is None
        if not self._as_target:
            self._softcap = target.logit_cap if own.logit_softcap is None else own.logit_softcap

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids [...] -> embeddings [..., H], scaled as the target's."""
        out = super().embed(tokens)
        return out if self._scale == 1 else out * mx.array(self._scale, out.dtype)

    def features(self, aux: Sequence[mx.array]) -> mx.array:
        """Target's aux hidden states, each [B, L, H] -> context features [B, L, H]."""
        out: mx.array = self.hidden_norm(self.fc(mx.concatenate(list(aux), axis=-1)))
        return out

    def extend(self, g: mx.array, cache: Any) -> None:
        """Write keys and values of context features g [B, L, H] into a cache, whose lengths the caller advances."""
        for layer, kept in zip(self.layers, cache, strict=True):
            kept.update_and_fetch(*layer.self_attn.context(g, kept.offset))

    def __call__(self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: Mask = None) -> mx.array:
        """Run a block after its context.

        embeddings [B, b, H] of the newest token and mask tokens; g [B, L, H], the context's features at positions
        0..L-1, not read if there is a cache. `mask` is not used. Returns [B, b, H], normed.
        """
        slots, x = embeddings.shape[1], embeddings
        longest = g.shape[1]
        start: int | mx.array = longest
        context, seen = start, None
        if cache is not None:
            lengths = cache[0].lengths
            start, longest, seen = cache[0].offset, lengths.upper, cache[0].seen(slots)
            context = longest if lengths.uniform else lengths.offset
        masks: dict[BlockAttention, mx.array | None] = {}
        for index, (layer, kept) in enumerate(zip(self.layers, cache or [None] * len(self.layers), strict=True)):
            sees = self.config.sees(index)
            if sees not in masks:
                own = sees.mask(context, longest, slots)
                if seen is not None:
                    own = seen if own is None else own & seen
                masks[sees] = own
            past = layer.self_attn.context(g, 0) if kept is None else kept
            x = layer(x, masks[sees], past, start)
        out: mx.array = self.norm(x)
        return out

    def block(self, newest: mx.array, cache: Any, drafts: int) -> mx.array:
        """Return the states of the slots up to the one that predicts the last of `drafts` tokens, [B, n, H].

        newest: [B, 1] int32, each row's newest token, which is not in the cache. Unless every layer is causal, later
        slots change earlier ones, so the whole block is read, as in training.
        """
        config = self.config
        first = 0 if config.first_slot_drafts else 1
        slots = first + drafts if config.is_causal else config.block_size
        masks = mx.full((newest.shape[0], slots - 1), config.mask_token_id, mx.int32)
        x = self.embed(mx.concatenate([newest, masks], axis=1))
        return self(x, x[:, :0], cache)[:, : first + drafts]

    def logits(self, h: mx.array) -> mx.array:
        """h [..., H], normed -> logits over the draft vocabulary [..., Vd], without the Markov head's bias."""
        if self._as_target:
            return self.target.logits(h)
        out: mx.array = self.lm_head(h) if self.config.own_lm_head else self.target.lm_head(h)
        if self.config.output_multiplier != 1:
            out = out * self.config.output_multiplier
        if self._softcap:
            out = mx.tanh(out / self._softcap) * self._softcap
        return out

    @property
    def is_sequential(self) -> bool:
        """Whether a slot's logits depend on the token before it."""
        return self.config.markov_head is not None or self.config.selector_rank > 0

    def slot_logits(
        self, previous: mx.array, h: mx.array, logits: mx.array, state: mx.array | None, candidates: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Return the final logits [..., Vd] of slots of a sequential head, and the state for the next slot.

        previous [...] int32, the tokens before, in target ids; h [..., H] and logits [..., Vd] of the slots; state: of
        the slot before, None for the first; candidates [..., K]: for a selector, the tokens with the largest logits.
        """
        if candidates is not None:
            return self.candidate_selector(previous, h, logits, candidates), None
        bias, state = self.markov_head.step(previous, h, state)
        return logits + bias, state


class DFlashHead(BlockHead):
    """DFlash: all slots are independent given the block."""


class DFlash2Head(BlockHead):
    """DFlash2: DFlash's network with convolutions, whose slots also depend on the token before them."""


class DSparkHead(BlockHead):
    """DSpark: DFlash's network, whose slots also depend on the token before them."""
