"""The EAGLE-3 head: a decoder layer over the next token's embedding and several target layers' hidden states.

Sources: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test";
flags as in SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators and NVIDIA's Model-Optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.errors import check
from eagle_mlx.heads.base import HeadBase, Mask
from eagle_mlx.heads.layers import MLP, Attention, LayerShape, PlainLayer
from eagle_mlx.target import Target


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the default aux layers, counted from 0: a low, a middle and a high one."""
    if num_layers < 6:
        return (0, num_layers // 2, num_layers - 1)
    return (1, num_layers // 2 - 1, num_layers - 4)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerShape):
    draft_vocab_size: int  # size of the draft vocabulary; equal to `vocab_size` if the head drafts all tokens
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    """Target layers whose outputs are read, counted from 0; empty without `use_aux_hidden_state`."""
    norm_before_residual: bool = False  # the residual stream starts from the normed feature instead of the feature
    norm_before_fc: bool = False  # one norm over the concatenated hidden states before `fc`
    fc_norm: bool = False  # a norm for each of the hidden states before `fc`
    norm_output: bool = False  # feed the next draft step the output after the final norm instead of before it
    norm_logits: bool = True  # the output projection reads the normed output; if false, the output is not normed
    input_layernorm: bool = True  # apply a norm to the embedding
    hidden_norm: bool = True  # apply a norm to the feature
    use_aux_hidden_state: bool = True
    """If false, the feature is the target's last hidden state after its final norm, and there is no `fc`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        draft_vocab, vocab = self.draft_vocab_size, self.vocab_size
        check(draft_vocab <= vocab, f"draft_vocab_size {draft_vocab} is larger than the target's vocabulary {vocab}")
        one_norm = not (self.norm_before_fc and self.fc_norm)
        check(one_norm, "norm_before_fc and fc_norm are both set; a head has one of them or neither")
        if self.use_aux_hidden_state:
            check(self.aux_layers, "aux_layers is empty; an EAGLE-3 head reads at least one target layer")
            return
        reads_none = not (self.aux_layers or self.fc_norm or self.norm_before_fc)
        check(reads_none, "a head without aux hidden states has no aux_layers, no fc_norm and no norm_before_fc")
        size, wanted = self.hidden_size, self.target_hidden_size
        sizes = f"hidden_size is {size} and target_hidden_size is {wanted}"
        check(size == wanted, f"a head without aux hidden states has its target's hidden size, but {sizes}")


_UNUSUAL = (
    *("norm_before_fc", "fc_norm", "norm_output", "qk_norm", "qkv_bias", "attention_bias", "mlp_bias", "norm_logits"),
    *("input_layernorm", "hidden_norm", "use_aux_hidden_state", "num_hidden_layers", "windows"),
)


def unusual_fields(head: Eagle3Head) -> list[str]:
    """Return the names of fields that differ from a plain EAGLE-3 head's."""
    return [name for name in _UNUSUAL if getattr(head.config, name) != getattr(Eagle3Config, name)]


class DecoderLayer(PlainLayer):
    """The first layer; its attention reads the concatenation of embedding and feature."""

    def __init__(self, config: Eagle3Config):
        nn.Module.__init__(self)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.window = config.window_of(0)
        self.self_attn = Attention(config, 2 * size)
        self.mlp = MLP(config)
        self.hidden_norm = nn.RMSNorm(size, eps=eps) if config.hidden_norm else nn.Identity()
        self.input_layernorm = nn.RMSNorm(size, eps=eps) if config.input_layernorm else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def inputs(self, embeddings: mx.array, g: mx.array) -> tuple[mx.array, mx.array]:  # type: ignore[override]  # reads g
        """Embeddings and features [B, L, H] -> the attention's input [B, L, 2H] and the residual [B, L, H]."""
        normed = self.hidden_norm(g)
        x = mx.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        return x, normed if self.norm_before_residual else g

    def __call__(  # type: ignore[override]  # reads g
        self, embeddings: mx.array, g: mx.array, mask: Mask, cache: Any | None
    ) -> mx.array:
        return self.run(*self.inputs(embeddings, g), mask, cache)


class Eagle3Head(HeadBase[Eagle3Config]):
    """An EAGLE-3 head. Its inputs are embeddings: the target's or, if it has one, from its own embedding."""

    def __init__(self, config: Eagle3Config, token_ids: mx.array | None = None):
        super().__init__(config, token_ids)
        size, eps = config.hidden_size, config.rms_norm_eps
        read = config.target_hidden_size * len(config.aux_layers)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(read, eps=eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in config.aux_layers]
        if config.use_aux_hidden_state:
            self.fc = nn.Linear(read, size, bias=False)
        self.midlayer = DecoderLayer(config)
        if config.num_hidden_layers > 1:
            self.layers = [PlainLayer(config, index) for index in range(1, config.num_hidden_layers)]
        if config.norm_logits or config.norm_output:
            self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    @property
    def target_hidden_size(self) -> int:
        return self.config.target_hidden_size

    def features(self, aux: Sequence[mx.array]) -> mx.array:
        """Target's aux hidden states, each [B, L, target_hidden_size] -> features g [B, L, H]."""
        if not self.config.use_aux_hidden_state:
            return self.target.norm(aux[0])
        return self.fc(self.read(aux))

    def read(self, aux: Sequence[mx.array]) -> mx.array:
        """Return the input of `fc`: the hidden states with the head's norms, concatenated."""
        if self.config.fc_norm:
            aux = [norm(x) for norm, x in zip(self.fc_norm, aux, strict=True)]
        read = mx.concatenate(list(aux), axis=-1)
        return self.input_norm(read) if self.config.norm_before_fc else read

    def __call__(self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: Mask = None) -> mx.array:
        """Run the decoder layers.

        embeddings [B, L, H] of tokens t+1, features g [B, L, H] of positions t -> h [B, L, H], the feature of the next
        draft step: before the final norm, or after it with `norm_output`.
        """
        first, *others = cache or [None] * self.config.num_hidden_layers
        h = self.midlayer(embeddings, g, mask, first)
        for layer, kept in zip(self.layers if others else (), others, strict=True):
            h = layer(h, mask, kept)
        return self.next_feature(h)

    def next_feature(self, h: mx.array) -> mx.array:
        """Last layer's output [..., H] -> feature of the next draft step."""
        return self.norm(h) if self.config.norm_output else h

    def logits(self, h: mx.array) -> mx.array:
        """h [..., H] -> logits over the draft vocabulary [..., draft_vocab_size]."""
        normed = self.norm(h) if self.config.norm_logits and not self.config.norm_output else h
        return self.lm_head(normed)


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    mask_token_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        mask = self.mask_token_id
        check(0 <= mask < self.vocab_size, f"mask_token_id {mask} is not in a vocabulary of {self.vocab_size}")
        check(not self.windows, "a layer has a sliding window, which is not supported in P-EAGLE heads")


class PEagleHead(Eagle3Head):
    """P-EAGLE: drafts all tokens in one forward, from mask tokens after the newest position.

    A mask token's inputs are its embedding and `mask_hidden` [1, 1, layers read * Ht], which replaces the target's
    hidden states before all norms. It attends to the text and to the mask tokens before it.
    """

    is_sequential = False

    def __init__(self, config: PEagleConfig, token_ids: mx.array | None = None):
        super().__init__(config, token_ids)
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = mx.zeros((1, 1, config.target_hidden_size * len(config.aux_layers)))

    def mask_inputs(self, rows: int, count: int) -> tuple[mx.array, mx.array]:
        """Return embeddings and features of mask tokens, [rows, count, H]."""
        embedding = self.embed(mx.array([[self.mask_token_id]]))
        g = self.features(list(mx.split(self.mask_hidden, len(self.config.aux_layers), axis=-1)))
        wide, deep = (mx.broadcast_to(x, (rows, count, x.shape[-1])) for x in (embedding, g))
        return wide, deep

    def masks(self, rows: int, count: int, cache: Any) -> mx.array:
        """Return the outputs [rows, count, H] of mask tokens after the cached positions. The cache does not advance."""
        return self(*self.mask_inputs(rows, count), cache)


def random_head(target: Target, draft_vocab: int | None = None) -> Eagle3Head:
    """Return a head of the usual sizes with random weights, whose drafts are always rejected: the worst case.

    `draft_vocab`: the size of its vocabulary, by default the target's.
    """
    dim = 128 if target.hidden_size >= 1024 else 64
    groups = max(1, target.hidden_size // (4 * dim))
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=target.hidden_size,
            intermediate_size=3 * target.hidden_size,
            num_attention_heads=4 * groups,
            num_key_value_heads=groups,
            head_dim=dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab or target.vocab_size,
            target_hidden_size=target.hidden_size,
            aux_layers=default_aux_layers(target.num_layers),
        ),
        None if draft_vocab is None else mx.arange(draft_vocab, dtype=mx.int32),
    )
    head.set_dtype(target.dtype)
    mx.eval(head.parameters())
    return head
