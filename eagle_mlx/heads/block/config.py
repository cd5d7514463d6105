"""The config of block drafters, and which positions each slot of a block attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.layers import LayerShape

WindowStart = Literal["slot", "anchor"]
"""Where an attention window ends: at each slot, itself included (z-lab, SpecForge, vLLM), or before the anchor, the
same for all slots and without a limit within the block (speculators)."""
MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerShape):
    """The config of a block drafter. Raises ConfigError if it is inconsistent."""

    draft_vocab_size: int
    """Size of the draft vocabulary; equal to `vocab_size` if the head drafts all tokens."""
    aux_layers: tuple[int, ...]
    """Target layers whose outputs are the context, counted from 0."""
    block_size: int
    """Slots of a block: the newest token and mask tokens."""
    mask_token_id: int
    qk_norm: bool = True
    window_start: WindowStart = "slot"
    causal: tuple[bool, ...] = ()
    """For each layer, whether a slot sees only earlier slots of its block; empty if every layer sees all slots."""
    first_slot_drafts: bool = False
    """Slot k predicts the token after it, so there are as many drafts as slots. If false, slot k predicts its own
    token, and the first slot nothing."""
    own_lm_head: bool = False
    interleaved_rope: bool = False
    """RoPE turns neighboring dimensions instead of the two halves of a head."""
    embedding_scale: float | None = None
    """Factor of the embeddings; None for the target's own."""
    output_multiplier: float = 1.0
    """Factor of the logits."""
    logit_softcap: float | None = None
    """Soft limit of the logits; None for the target's own."""
    markov_head: MarkovKind | None = None
    markov_rank: int = 0
    confidence_head: bool = False
    confidence_with_markov: bool = True
    """The confidence head also reads the Markov head's embedding of the previous token."""
    conv_kernel_size: int = 0
    """DFlash2: slots that a convolution sees; 0 without convolutions."""
    conv_group_size: int = 0
    """Dimensions that share a slot's kernel."""
    selector_rank: int = 0
    """DFlash2: width of the candidate selector; 0 without one."""
    selector_top_k: int = 0
    """Candidates of each slot."""
    gemma: bool = False
    """The layers are Gemma 4's instead of Qwen3's."""
    key_is_value: bool = False
    """Gemma: the values are the keys before their norm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.aux_layers:
            raise ConfigError("aux_layers is empty; a block drafter reads at least one target layer")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size {self.draft_vocab_size} is larger than vocab_size {self.vocab_size}")
        if self.draft_vocab_size < self.vocab_size and not self.own_lm_head:
            raise ConfigError("a head with a smaller draft vocabulary needs its own lm_head")
        if self.causal and len(self.causal) != self.num_hidden_layers:
            raise ConfigError(f"causal is given for {len(self.causal)} of {self.num_hidden_layers} layers")
        if self.drafts < 1:
            raise ConfigError(f"block_size is {self.block_size}; a block drafts at least one token")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id {self.mask_token_id} is not in a vocabulary of {self.vocab_size}")
        if (self.markov_head is None) != (self.markov_rank == 0) or self.markov_rank < 0:
            raise ConfigError(f"markov_head is {self.markov_head} but markov_rank is {self.markov_rank}")
        if self.conv_kernel_size and (self.conv_group_size < 1 or self.hidden_size % self.conv_group_size):
            raise ConfigError(f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}")
        if self.selector_rank and not 0 < self.selector_top_k <= self.vocab_size:
            raise ConfigError(f"selector_top_k is {self.selector_top_k}; it must be between 1 and vocab_size")
        if self.confidence_head and self.confidence_with_markov and self.markov_head is None:
            raise ConfigError("the confidence head reads a Markov head, which is missing")

    @property
    def drafts(self) -> int:
        """The maximum number of tokens that a block drafts."""
        return self.block_size if self.first_slot_drafts else self.block_size - 1

    def sees(self, layer: int) -> BlockAttention:
        """Return what a layer's slots see."""
        causal = bool(self.causal) and self.causal[layer]
        return BlockAttention(self.window_of(layer), causal, self.window_start)

    @property
    def is_causal(self) -> bool:
        """Whether a shorter block gives the same drafts: no layer sees later slots."""
        return bool(self.causal) and all(self.causal)


@dataclass(frozen=True)
class BlockAttention:
    """Which context positions and slots each slot sees in one layer."""

    window: int | None
    causal: bool
    window_start: WindowStart

    def mask(self, start: int | mx.array, longest: int, slots: int, queries: int) -> mx.array | None:
        """Return a mask [B or 1, 1, queries, longest + slots] bool, or None if every slot sees everything.

        Context entries come first, then each row's block, from its own position on. start: each row's number of
        context positions, an int if all have `longest`, else [B] int32; queries: the slots and padding after them.
        """
        if isinstance(start, int) and not self.causal and (self.window is None or longest + slots <= self.window):
            return None
        first = mx.array([start], mx.int32) if isinstance(start, int) else start
        anchor = first[:, None, None]
        keys = mx.arange(longest + slots)[None, None]
        places = anchor + mx.arange(queries)[None, :, None]
        context, block = keys < anchor, (keys >= anchor) & (keys < anchor + slots)
        if self.causal:
            block = block & (keys <= places)
        if self.window is not None and self.window_start == "slot":
            near = keys > places - self.window
            context, block = context & near, block & near
        elif self.window is not None:
            context = context & (keys >= anchor - self.window)
        return (context | block)[:, None]
