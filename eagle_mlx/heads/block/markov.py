"""DSpark's two small heads: a bias of the logits by the previous token, and the chance that a slot is accepted.

Source: deepseek-ai/DeepSpec (`deepspec/modeling/dspark`) and sgl-project/SpecForge
(`specforge/modeling/draft/dspark_heads.py`).
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.heads.block.config import BlockConfig


class MarkovHead(nn.Module):
    """Vanilla: the bias is a product of two matrices of low rank."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def step(self, tokens: mx.array, h: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """Previous tokens [...] int32 in target ids and hidden states h [..., H] -> bias [..., Vd] and the next state.

        `state` [..., r] carries information from slot to slot; None before the first slot, and in stateless heads.
        """
        return self.markov_w2(self.latent(tokens, h)), None

    def latent(self, tokens: mx.array, h: mx.array) -> mx.array:
        """Return [..., r], the input of `markov_w2`."""
        return self.embedding(tokens)

    def embedding(self, tokens: mx.array) -> mx.array:
        """Embed tokens [...] as [..., r]."""
        out: mx.array = self.markov_w1(tokens)
        return out


class GatedMarkovHead(MarkovHead):
    """The hidden state gates each dimension of the previous token's embedding."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(self, tokens: mx.array, h: mx.array) -> mx.array:
        previous = self.embedding(tokens)
        return mx.sigmoid(self.gate_proj(mx.concatenate([h, previous], axis=-1))) * previous


class RnnMarkovHead(MarkovHead):
    """A recurrent cell carries a state through the block."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def step(self, tokens: mx.array, h: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        previous = self.embedding(tokens)
        state = mx.zeros_like(previous) if state is None else state
        gate, candidate, output = mx.split(self.joint_proj(mx.concatenate([state, previous, h], axis=-1)), 3, axis=-1)
        gate = mx.sigmoid(gate)
        return self.markov_w2(mx.tanh(output)), gate * state + (1 - gate) * mx.tanh(candidate)


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
        out: mx.array = self.proj(read)[..., 0].astype(mx.float32)
        return out
