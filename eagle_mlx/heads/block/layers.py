"""The config and the parts of block drafters: layers whose slots attend to the context and to their own block; and what
reads the token before a slot, to change its logits or to predict its confidence.

Sources: package `dflash` (`DFlash2DraftModel`) for convolutions and the selector; deepseek-ai/DeepSpec
(`deepspec/modeling/dspark`) and SpecForge (`modeling/draft/dspark_heads.py`) for DSpark's heads and Gemma 4's layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.errors import check
from eagle_mlx.heads.layers import MLP, Attention, LayerShape

WindowStart = Literal["slot", "anchor", "around"]
"""The end of an attention window: at each slot, itself included (z-lab, SpecForge, vLLM), or before the anchor,
the same for all slots and without a limit within the block (speculators), or it reaches as many positions as it is long
to either side of each slot (Muse Glimmer)."""
MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerShape):
    """The config of a block drafter. Raises ConfigError if it is inconsistent."""

    draft_vocab_size: int  # size of the draft vocabulary; equal to `vocab_size` if the head drafts all tokens
    aux_layers: tuple[int, ...]  # target layers whose outputs are the context, counted from 0
    block_size: int  # slots of a block: the newest token and mask tokens
    mask_token_id: int
    qk_norm: bool = True
    window_start: WindowStart = "slot"
    causal: tuple[bool, ...] = ()
    """For each layer, whether a slot sees only earlier slots of its block; empty if every layer sees all slots."""
    first_slot_drafts: bool = False
    """Slot k predicts the token after it, so there are as many drafts as slots. If false, slot k predicts its own
    token, and the first slot nothing."""
    own_lm_head: bool = False
    interleaved_rope: bool = False  # RoPE turns neighboring dimensions instead of the two halves of a head
    embedding_scale: float | None = None  # factor of the embeddings; None for the target's own
    output_multiplier: float = 1.0
    """Factor of the logits. If it is 1 and there is no soft cap, a head without its own projection computes logits as
    the target does."""
    logit_softcap: float | None = None  # soft limit of the logits; 0 for none, None for the target's own
    markov_head: MarkovKind | None = None
    markov_rank: int = 0
    confidence_head: bool = False
    confidence_with_markov: bool = True
    """The confidence head also reads the Markov head's embedding of the previous token."""
    conv_kernel_size: int = 0  # DFlash2: slots that a convolution sees; 0 without convolutions
    conv_group_size: int = 0  # dimensions that share a slot's kernel
    selector_rank: int = 0  # DFlash2: width of the candidate selector; 0 without one
    selector_top_k: int = 0  # candidates of each slot
    gemma: bool = False  # the layers are Gemma 4's instead of Qwen3's
    key_is_value: bool = False  # Gemma: the values are the keys before their norm

    def __post_init__(self) -> None:
        super().__post_init__()
        draft_vocab, vocab, layers = self.draft_vocab_size, self.vocab_size, self.num_hidden_layers
        group_size, markov, rank = self.conv_group_size, self.markov_head, self.markov_rank
        check(self.aux_layers, "aux_layers is empty; a block drafter reads at least one target layer")
        check(draft_vocab <= vocab, f"draft_vocab_size {draft_vocab} is larger than vocab_size {vocab}")
        check(draft_vocab == vocab or self.own_lm_head, "a head with a smaller draft vocabulary needs its own lm_head")
        check(len(self.causal) in (0, layers), f"causal is given for {len(self.causal)} of {layers} layers")
        check(self.drafts > 0, f"block_size is {self.block_size}; a block drafts at least one token")
        mask = self.mask_token_id
        check(0 <= mask < vocab, f"mask_token_id {mask} is not in a vocabulary of {vocab}")
        check(rank == 0 if markov is None else rank > 0, f"markov_head is {markov} but markov_rank is {rank}")
        divides = not self.conv_kernel_size or (group_size > 0 and self.hidden_size % group_size == 0)
        check(divides, f"conv_group_size {group_size} does not divide hidden_size {self.hidden_size}")
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
    """The context positions and slots that each slot sees in one layer."""

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
        return ((context | block) & self.near(keys, places, anchor))[:, None]

    def near(self, keys: mx.array, slots: mx.array, anchor: mx.array | int) -> mx.array | bool:
        """Return whether the window of slots has these keys: positions of keys, of slots and of the anchor."""
        if self.window is None:
            return True
        if self.window_start == "anchor":
            return keys >= anchor - self.window
        return keys > slots - self.window if self.window_start == "slot" else mx.abs(keys - slots) <= self.window


KeysValues = tuple[mx.array, mx.array]  # keys and values, each [B, kv_heads, L, D]


class ContextAttention(Attention):
    """Attention of a block's slots to the context's keys and values, followed by the block's own."""

    def __init__(self, config: BlockConfig):
        super().__init__(config, config.hidden_size, config.interleaved_rope)
        self.head_dim = config.head_dim

    def context(self, c: mx.array, offset: int | mx.array) -> KeysValues:
        """Context features c [B, L, H] at positions offset + 0..L-1 -> their keys and values."""
        shape = *c.shape[:2], self.kv_heads, self.head_dim
        k, v = self.k_proj(c).reshape(shape), self.v_proj(c).reshape(shape)
        k = self.k_norm(k) if self.normed else k
        return self.rope(k.transpose(0, 2, 1, 3), offset=offset), v.transpose(0, 2, 1, 3)

    def slots(self, x: mx.array, mask: mx.array | None, past: Any, offset: int | mx.array) -> mx.array:
        """x [B, b, H] of a block at positions offset + 0..b-1 -> [B, b, H].

        past: the layer's cache, or keys and values of the context, or a function that attends to the context too: its
        arguments are the block's scaled queries, keys and values.
        """
        q, k, v = self.project(x, offset)
        if callable(past):
            return self.output(past(q * self.scale, k, v))
        if isinstance(past, tuple):
            k, v = mx.concatenate([past[0], k], axis=2), mx.concatenate([past[1], v], axis=2)
        else:
            k, v = past.update_and_fetch(k, v)
        return self.output(mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask))


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer whose attention also reads the context."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = ContextAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def __call__(self, x: mx.array, mask: mx.array | None, past: Any, offset: int | mx.array) -> mx.array:
        """x [B, b, H] -> [B, b, H]; other arguments as in `ContextAttention.slots`."""
        h = x + self.self_attn.slots(self.input_layernorm(x), mask, past, offset)
        return h + self.mlp(self.post_attention_layernorm(h))


class GemmaAttention(ContextAttention):
    """Gemma 4: queries are not scaled; values are normed without a weight, and may be the keys before their norm."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.scale, self.eps = 1.0, config.rms_norm_eps
        if config.key_is_value:
            self.pop("v_proj")

    def context(self, c: mx.array, offset: int | mx.array) -> KeysValues:
        shape = *c.shape[:2], self.kv_heads, self.head_dim
        k = self.k_proj(c).reshape(shape)
        v = self.v_proj(c).reshape(shape) if "v_proj" in self else k
        v = mx.fast.rms_norm(v, None, self.eps).transpose(0, 2, 1, 3)
        return self.rope(self.k_norm(k).transpose(0, 2, 1, 3), offset=offset), v

    def project(self, x: mx.array, offset: int | mx.array = 0) -> tuple[mx.array, mx.array, mx.array]:
        q = self.q_norm(self.q_proj(x).reshape(*x.shape[:2], self.heads, self.head_dim))
        return self.rope(q.transpose(0, 2, 1, 3), offset=offset), *self.context(x, offset)


class GemmaMLP(MLP):
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class GemmaLayer(BlockLayer):
    """Gemma 4: each sublayer has a norm before and after it, and the layer has a factor."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = GemmaAttention(config), GemmaMLP(config)
        self.pre_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, mask: mx.array | None, past: Any, offset: int | mx.array) -> mx.array:
        attended = self.self_attn.slots(self.input_layernorm(x), mask, past, offset)
        h = x + self.post_attention_layernorm(attended)
        out: mx.array = h + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h)))
        return out * self.layer_scalar


class GroupedConvolution(nn.Module):
    """DFlash2: two causal convolutions over slots, before and after a sublayer.

    Each kernel is a fixed one per dimension plus one per group of dimensions that depends on the slot.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.group, self.width = config.conv_group_size, config.conv_kernel_size
        groups = config.hidden_size // self.group
        self.base_kernel = mx.zeros((2, self.width, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.width * groups, bias=False)

    def kernels(self, x: mx.array) -> mx.array:
        """Return both kernels of each slot, [2, width, B, b, H], from the sublayer's input x [B, b, H]."""
        b, slots, size = x.shape
        dynamic = self.kernel_projection(x).reshape(b, slots, 2, self.width, size // self.group)
        dynamic = mx.repeat(dynamic.transpose(2, 3, 0, 1, 4), self.group, axis=-1)
        return dynamic + self.base_kernel[:, :, None, None]

    def __call__(self, x: mx.array, kernel: mx.array) -> mx.array:
        """x [B, b, H] and a kernel [width, B, b, H] -> [B, b, H]; slots before the first are zero."""
        count = x.shape[1]
        shifted = (mx.pad(x, [(0, 0), (back, 0), (0, 0)])[:, :count] for back in range(self.width))
        return sum(factor * slots for factor, slots in zip(kernel, shifted, strict=True))  # type: ignore[return-value]  # not 0


class ConvolvedLayer(BlockLayer):
    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.attention_conv, self.mlp_conv = GroupedConvolution(config), GroupedConvolution(config)

    def __call__(self, x: mx.array, mask: mx.array | None, past: Any, offset: int | mx.array) -> mx.array:
        a = self.input_layernorm(x)
        before, after = self.attention_conv.kernels(a)
        attended = self.self_attn.slots(self.attention_conv(a, before), mask, past, offset)
        h = x + self.attention_conv(attended, after)
        a = self.post_attention_layernorm(h)
        before, after = self.mlp_conv.kernels(a)
        return h + self.mlp_conv(self.mlp(self.mlp_conv(a, before)), after)


class MarkovHead(nn.Module):
    """A bias of the logits by the previous token. Vanilla: the bias is a product of two matrices of low rank."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def step(self, tokens: mx.array, h: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """Previous tokens [...] int32 in target ids and hidden states h [..., H] -> bias [..., Vd] and the next state.

        `state` [..., r] carries information from slot to slot; None before the first slot, and in stateless heads.
        """
        latent, state = self.latent(self.embedding(tokens), h, state)
        return self.markov_w2(latent), state

    def latent(self, previous: mx.array, h: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """Return [..., r], the input of `markov_w2`, and the next state.

        previous [..., r]: embeddings of the previous tokens; other arguments as in `step`.
        """
        return previous, None

    def embedding(self, tokens: mx.array) -> mx.array:
        """Embed tokens [...] as [..., r]."""
        out: mx.array = self.markov_w1(tokens)
        return out


class GatedMarkovHead(MarkovHead):
    """The hidden state gates each dimension of the previous token's embedding."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(self, previous: mx.array, h: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        return mx.sigmoid(self.gate_proj(mx.concatenate([h, previous], axis=-1))) * previous, None


class RnnMarkovHead(MarkovHead):
    """A recurrent cell carries a state through the block."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def latent(self, previous: mx.array, h: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        state = mx.zeros_like(previous) if state is None else state
        gate, candidate, output = mx.split(self.joint_proj(mx.concatenate([state, previous, h], axis=-1)), 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(output), gate * state + (1 - gate) * mx.tanh(candidate)


MARKOV_HEADS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}


class ConfidenceHead(nn.Module):
    """Predicts the chance that the token of a slot is accepted, given that those before it are."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        read = config.markov_rank if config.confidence_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + read, 1)

    def __call__(self, h: mx.array, previous: mx.array | None = None) -> mx.array:
        """h [..., H] and the previous token's embedding [..., r], if it is read -> logits [...] float32."""
        read = h if previous is None else mx.concatenate([h, previous], axis=-1)
        return self.proj(read)[..., 0].astype(mx.float32)


class CandidateSelector(nn.Module):
    """DFlash2: scores each slot's likeliest tokens by the token before; no other token is drafted."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)

    def __call__(self, previous: mx.array, h: mx.array, logits: mx.array, candidates: mx.array) -> mx.array:
        """Tokens before [...], h [..., H], logits [..., V], candidates [..., K] -> logits, -inf for other tokens."""
        scores = self.scores(self.latent(self.predecessor_codebook(previous), h), logits, candidates)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, logits.dtype), candidates, scores, axis=-1)

    def latent(self, previous: mx.array, h: mx.array) -> mx.array:
        """Return what scores depend on, [..., r], from the previous tokens' embeddings [..., r] and h [..., H]."""
        return previous * self.hidden_projection(h)

    def scores(self, latent: mx.array, logits: mx.array, candidates: mx.array) -> mx.array:
        """Return the scores [..., K] of candidates [..., K]; logits [..., V]."""
        pairs: mx.array = (latent[..., None, :] * self.successor_codebook(candidates)).sum(axis=-1)
        return mx.take_along_axis(logits, candidates, axis=-1) + pairs
