"""The parts of block drafters that read the token before a slot: logits that depend on it, and a slot's confidence.

Sources: deepseek-ai/DeepSpec (`deepspec/modeling/dspark`) and sgl-project/SpecForge
(`specforge/modeling/draft/dspark_heads.py`) for DSpark's heads, package `dflash` for DFlash2's selector.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.heads.block.config import BlockConfig


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
        latent, state = self.latent(tokens, h, state)
        return self.markov_w2(latent), state

    def latent(self, tokens: mx.array, h: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """Return [..., r], the input of `markov_w2`, and the next state. Arguments as in `step`."""
        return self.embedding(tokens), None

    def embedding(self, tokens: mx.array) -> mx.array:
        """Embed tokens [...] as [..., r]."""
        out: mx.array = self.markov_w1(tokens)
        return out


class GatedMarkovHead(MarkovHead):
    """The hidden state gates each dimension of the previous token's embedding."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(self, tokens: mx.array, h: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        previous = self.embedding(tokens)
        return mx.sigmoid(self.gate_proj(mx.concatenate([h, previous], axis=-1))) * previous, None


class RnnMarkovHead(MarkovHead):
    """A recurrent cell carries a state through the block."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def latent(self, tokens: mx.array, h: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        previous = self.embedding(tokens)
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
        out: mx.array = self.proj(read)[..., 0].astype(mx.float32)
        return out


class CandidateSelector(nn.Module):
    """DFlash2: scores each slot's likeliest tokens by the token before; no other token is drafted."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)

    def __call__(self, previous: mx.array, h: mx.array, logits: mx.array, candidates: mx.array) -> mx.array:
        """Previous tokens [...] int32, states [..., H], logits [..., V] and candidates [..., K] -> logits [..., V].

        They are minus infinity for all but the candidates.
        """
        read = self.predecessor_codebook(previous) * self.hidden_projection(h)
        pairs = (read[..., None, :] * self.successor_codebook(candidates)).sum(axis=-1)
        scores = mx.take_along_axis(logits, candidates, axis=-1) + pairs
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, logits.dtype), candidates, scores, axis=-1)
