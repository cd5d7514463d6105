"""The config of block drafters, and which positions each slot of a block attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from eagle_mlx.formats.fields import check
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
    """Factor of the logits. If it is 1 and there is no soft cap, a head without its own projection computes logits as
    the target does."""
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
        draft_vocab, vocab, layers = self.draft_vocab_size, self.vocab_size, self.num_hidden_layers
        size, group_size, markov, rank = self.hidden_size, self.conv_group_size, self.markov_head, self.markov_rank
        check(self.aux_layers, "aux_layers is empty; a block drafter reads at least one target layer")
        check(draft_vocab <= vocab, f"draft_vocab_size {draft_vocab} is larger than vocab_size {vocab}")
        check(draft_vocab == vocab or self.own_lm_head, "a head with a smaller draft vocabulary needs its own lm_head")
        check(len(self.causal) in (0, layers), f"causal is given for {len(self.causal)} of {layers} layers")
        check(self.drafts > 0, f"block_size is {self.block_size}; a block drafts at least one token")
        mask = self.mask_token_id
        check(0 <= mask < vocab, f"mask_token_id {mask} is not in a vocabulary of {vocab}")
        check(rank == 0 if markov is None else rank > 0, f"markov_head is {markov} but markov_rank is {rank}")
        divides = not self.conv_kernel_size or (group_size > 0 and size % group_size == 0)
        check(divides, f"conv_group_size {group_size} does not divide hidden_size {size}")
        selects = not self.selector_rank or 0 < self.selector_top_k <= vocab
        check(selects, f"selector_top_k is {self.selector_top_k}; it must be between 1 and vocab_size")
        reads_markov = self.confidence_head and self.confidence_with_markov
        check(markov is not None or not reads_markov, "the confidence head reads a Markov head, which is missing")

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

    def mask(self, start: int | mx.array, longest: int, slots: int) -> mx.array | None:
        """Return a mask [B or 1, 1, slots, longest + slots] bool, or None if every slot sees everything.

        Context entries come first, then each row's block, from its own position on. start: each row's number of
        context positions, an int if all have `longest`, else [B] int32.
        """
        if isinstance(start, int) and not self.causal and (self.window is None or longest + slots <= self.window):
            return None
        first = mx.array([start], mx.int32) if isinstance(start, int) else start
        anchor = first[:, None, None]
        keys = mx.arange(longest + slots)[None, None]
        places = anchor + mx.arange(slots)[None, :, None]
        context, block = keys < anchor, (keys >= anchor) & (keys < anchor + slots)
        if self.causal:
            block = block & (keys <= places)
        if self.window is not None and self.window_start == "slot":
            near = keys > places - self.window
            context, block = context & near, block & near
        elif self.window is not None:
            context = context & (keys >= anchor - self.window)
        return (context | block)[:, None]
