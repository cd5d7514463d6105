"""Block drafters: DFlash, DFlash2 and DSpark, which draft all slots in one forward.

All blocks of a batch are computed in one forward: each anchor has a block of its own, and all share the row's context.
A new head is a linear guess: every slot reads the newest context position. Sources: deepseek-ai/DeepSpec (losses and
their weights), vllm-project/speculators (anchors); their trainers mask one long sequence instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.block import BlockConfig, BlockHead, DFlash2Head, DFlashHead, DSparkHead
from eagle_mlx.heads.block.layers import BlockAttention, BlockLayer
from eagle_mlx.target import Target

from ..config import TrainSettings
from ..kind_settings import KIND_SETTINGS
from ..unroll import HIDDEN, Inputs, Step, recomputed, take_rows
from .base import SPREAD, Head, Kind, final_norm, layer_shape, mask_token, projection
from .eagle3 import attend_to_itself
from .least_squares import Matrix, Moments, Piece, factors

KeysValues = tuple[mx.array, mx.array]
LAGS = 3  # slots whose states the map predicts: later ones depend little on the context's newest position


def lagged(states: mx.array, following: mx.array, wanted: mx.array) -> tuple[mx.array, mx.array]:
    """Return inputs and outputs of the linear map for slots 0 to `LAGS` - 1, one after the other.

    states [1, L - 1, D] at positions 0 to L - 2; following [1, L - 1, E], the embeddings of tokens 1 to L - 1; wanted
    [1, L - 1, H], the target's states there. Inputs are [1, N, D + E + 1]: states, embeddings with a mean square of 1,
    which the ridge would suppress if they were smaller than the states, and a constant.
    """
    following = unit(following)
    slots = range(min(LAGS, states.shape[1]))
    read = [states[:, : states.shape[1] - slot] for slot in slots]
    tokens = [following[:, slot:] for slot in slots]
    x = mx.concatenate([mx.concatenate(read, axis=1), mx.concatenate(tokens, axis=1)], axis=-1)
    ones = mx.ones((*x.shape[:2], 1))
    return mx.concatenate([x, ones], axis=-1), mx.concatenate([wanted[:, slot:] for slot in slots], axis=1)


def _output_size(head: BlockHead) -> float:
    """Return the root mean square of the first layer's output: large, because embeddings stay in the residual.

    An embedding as large as the output would raise its own token's logit by sqrt(H) standard deviations of the other
    logits, not by half of one. The final norm removes the size.
    """
    vocabulary = head.config.vocab_size  # about 4,096 of its embeddings are enough for a mean
    some = head.embed(mx.arange(0, vocabulary, max(1, vocabulary // 4096))).astype(mx.float32)
    size: int = head.config.hidden_size
    return 2 * math.sqrt(size) * float(mx.sqrt(mx.mean(mx.square(some))))


def unit(embeddings: mx.array) -> mx.array:
    """Scale vectors [..., E] to a mean square of 1."""
    return mx.fast.rms_norm(embeddings, None, 1e-6)


def _solved(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return x with a x = b, by least squares with a ridge; only the signs of the solution's products matter."""
    return np.linalg.solve(a + 1e-3 * np.trace(a) / len(a) * np.eye(len(a)), b)


def unroll_blocks(head: BlockHead, inputs: Inputs, steps: int, recompute: bool = False) -> list[mx.array]:
    """Return the normed states of the first `steps` drafts of each anchor's block: `steps` times [B, A, H].

    A block sees the context strictly before its anchor, as in decoding: the target has not read the newest token yet.
    With `recompute`, only the inputs of each layer are kept for the gradient.
    """
    embeddings, g, segments, anchors = inputs
    config = head.config
    b, count = anchors.shape
    mask_token = head.embed(mx.array([config.mask_token_id])).astype(embeddings.dtype)
    newest = take_rows(embeddings, anchors)[:, :, None]
    masks = mx.broadcast_to(mask_token, (b, count, config.block_size - 1, newest.shape[-1]))
    x = mx.concatenate([newest, masks], axis=2).reshape(b * count, config.block_size, -1)
    for index, layer in enumerate(head.layers):
        sees = config.sees(index)
        if head.draft_window is not None:  # the layer has no window of its own
            sees = dataclasses.replace(sees, window=head.draft_window, window_start="anchor")
        step: Step = partial(_layer, layer, sees, segments, anchors)
        step = recomputed(layer, step) if recompute else step
        (x,) = step(x, g)
    first = 0 if config.first_slot_drafts else 1
    slots = head.norm(x).reshape(b, count, config.block_size, -1)
    return [slots[:, :, first + step] for step in range(steps)]


def with_latents(head: Head, outputs: list[mx.array], tokens: mx.array, anchors: mx.array) -> list[mx.array]:
    """Append what the loss reads of the true tokens [B, L] before each slot to the slots' states [B, A, H].

    Returns arrays [B, A, H + 2 r] for a Markov head: states, inputs of its last matrix, and embeddings of the tokens
    before the slots. A recurrent head's state is that after the slots before. For a selector, [B, A, H + r]: states and
    latents. Each token is embedded once, because the gradient of an embedding is as large as the vocabulary.
    """
    selector = head.candidate_selector if "candidate_selector" in head else None
    embedding = head.markov_head.embedding if selector is None else selector.predecessor_codebook
    embeddings, last = embedding(tokens), tokens.shape[1] - 1
    state, joined = None, []
    for slot, h in enumerate(outputs):
        before = take_rows(embeddings, mx.minimum(anchors + slot, last))
        if selector is not None:
            joined.append(mx.concatenate([h, selector.latent(before, h)], axis=-1))
            continue
        latent, state = head.markov_head.latent(before, h, state)
        joined.append(mx.concatenate([h, latent, before], axis=-1))
    return joined


def _layer(
    layer: BlockLayer, sees: BlockAttention, segments: mx.array, anchors: mx.array, x: mx.array, g: mx.array
) -> list[mx.array]:
    """Return [B * A, b, H] for x [B * A, b, H] and g [B, L, H]."""
    past = layer.self_attn.context(g, 0)
    context, block = _masks(sees, segments, anchors, x.shape[1])

    def attended(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return attend(q, past, context, (k, v), block)

    return [layer(x, None, attended, anchors.reshape(-1))]


def _masks(sees: BlockAttention, segments: mx.array, anchors: mx.array, slots: int) -> tuple[mx.array, mx.array]:
    """Return additive masks: [B, A, b or 1, L] for the context, [b, b] for the block."""
    keys, slot = mx.arange(segments.shape[1]), mx.arange(slots)
    anchor = anchors[..., None, None]
    own = mx.take_along_axis(segments, anchors, axis=1)[..., None, None]
    context = (keys < anchor) & (segments[:, None, None] == own)
    block = slot <= slot[:, None] if sees.causal else mx.ones((slots, slots), mx.bool_)
    context = context & sees.near(keys, anchor + slot[:, None], anchor)
    block = block & sees.near(slot, slot[:, None], 0)
    return (1 - context.astype(mx.float32)) * HIDDEN, (1 - block.astype(mx.float32)) * HIDDEN


def attend(q: mx.array, past: KeysValues, context: mx.array, own: KeysValues, block: mx.array) -> mx.array:
    """Attend to the row's context and to each block's own slots.

    q [B * A, heads, b, D], scaled; past: each [B, kv_heads, L, D]; own: those of the blocks, each
    [B * A, kv_heads, b, D]; masks as from `_masks`. Returns [B * A, heads, b, D] in the dtype of q; the softmax is in
    float32.
    """
    past_keys, past_values = past
    b, kv_heads, length, dim = past_keys.shape
    blocks, heads, slots, _ = q.shape
    count, groups = blocks // b, heads // kv_heads

    def by_head(x: mx.array) -> mx.array:
        """[B * A, heads, b, D] -> [B, kv_heads, heads / kv_heads, A, b, D]."""
        return x.reshape(b, count, kv_heads, -1, slots, dim).transpose(0, 2, 3, 1, 4, 5)

    grouped, keys, values = map(by_head, (q, *own))
    flat = grouped.reshape(b, kv_heads, groups * count * slots, dim)
    shape = b, kv_heads, groups, count, slots, length
    before = (flat @ past_keys.swapaxes(-1, -2)).reshape(shape).astype(mx.float32) + context[:, None, None]
    within = (grouped @ keys.swapaxes(-1, -2)).astype(mx.float32) + block
    top = mx.maximum(mx.max(before, axis=-1, keepdims=True), mx.max(within, axis=-1, keepdims=True))
    top = mx.stop_gradient(top)
    before, within = mx.exp(before - top), mx.exp(within - top)
    total = mx.sum(before, axis=-1, keepdims=True) + mx.sum(within, axis=-1, keepdims=True)
    out = (before.reshape(b, kv_heads, -1, length).astype(q.dtype) @ past_values).reshape(grouped.shape)
    out = (out + within.astype(q.dtype) @ values) * mx.reciprocal(total)
    return out.transpose(0, 3, 1, 2, 4, 5).reshape(q.shape).astype(q.dtype)


B = TypeVar("B", bound=BlockHead)


class BlockKind(Kind[B]):
    """All block drafters. `--loss-weights` are those of the distance |p - q| between distributions, and of `--loss`."""

    in_blocks = True
    unroll = staticmethod(unroll_blocks)

    def head_config(self, target: Target, config: TrainSettings, vocab_size: int, aux_layers: tuple[int, ...]) -> Any:
        return BlockConfig(
            **layer_shape(target, config),
            draft_vocab_size=vocab_size,
            own_lm_head=vocab_size < target.vocab_size,
            aux_layers=aux_layers,
            num_hidden_layers=config.head.layers or KIND_SETTINGS[config.head.kind].defaults["layers"],
            block_size=config.optimization.unroll + 1,
            mask_token_id=mask_token(target),
        )

    def aux_layers(self, target: Target, config: TrainSettings) -> tuple[int, ...]:
        return config.head.aux_layers or spread_layers(target.num_layers)

    def guess(self, head: B, following: mx.array, aux: list[mx.array], last: mx.array) -> Piece:
        wanted = mx.fast.rms_norm(last, None, head.config.rms_norm_eps)
        return lagged(mx.concatenate(aux, axis=-1)[:, :-1], following, wanted[:, 1:])

    def begin_as(self, head: B, guess: Matrix, by: Moments) -> None:
        """Initialize a new head to compute the map [D + E + 1, H] of `lagged` inputs, as far as its ranks allow.

        The token's part goes through the Markov head, if any; the states' part goes through the value path of the first
        layer's attention, whose scores depend on the distance alone: keys are one constant vector for context features
        and its negative for the block's own slots, queries are that vector for every token, and RoPE lowers the score
        with the distance. The norms of queries and keys make them exactly constant.
        """
        target, size = head.target, head.config.hidden_size
        read = head.fc.weight.shape[1]
        of_states, of_token = guess[:read], guess[read:]
        scale = by.root_mean_square(of_states)
        head.fc.weight = mx.array(np.ascontiguousarray(of_states.T))
        head.norm.weight = final_norm(target) * scale
        attention: Any = head.layers[0].self_attn
        mask = np.array(unit(head.embed(mx.array([head.config.mask_token_id])).astype(mx.float32)))[0]
        count, sums = by.count, by.xx[-1]
        features, tokens = of_states.T @ by.xx[:read, :read] @ of_states, by.xx[read:-1, read:-1]
        sum_features, sum_tokens = of_states.T @ sums[:read], sums[read:-1]
        features, sum_features = features / scale**2, sum_features / scale
        masks = count * np.outer(mask, mask)
        queries = _solved(tokens + masks, sum_tokens + count * mask)
        keys = _solved(features + tokens + masks, sum_features - sum_tokens - count * mask)
        for layer, weights in ((attention.q_proj, queries), (attention.k_proj, keys)):
            noise = layer.weight * (0.1 / SPREAD / size**0.5)
            layer.weight = noise + mx.array(np.tile(weights, (layer.weight.shape[0], 1)).astype(np.float32))
        # With 8, scores of 64 dimensions differ by 2 to 5 between the two newest positions.
        attention.q_norm.weight = mx.full(attention.q_norm.weight.shape, 8.0)
        rank = attention.kv_heads * attention.q_norm.weight.shape[0]
        _, directions = np.linalg.eigh(features)
        kept = directions[:, -rank:]
        attend_to_itself(attention, (_output_size(head) * kept @ kept.T).astype(np.float32))
        if head.config.markov_head is not None:
            left, right = factors(np.ascontiguousarray(of_token.T), head.config.markov_rank)
            vocabulary = unit(head.embed(mx.arange(target.vocab_size)).astype(mx.float32))
            vocabulary = mx.concatenate([vocabulary, mx.ones((target.vocab_size, 1))], axis=-1)
            head.markov_head.markov_w1.weight = vocabulary @ mx.array(right).T
            rows = projection(target) if head.token_ids is None else projection(target)[head.token_ids]
            head.markov_head.markov_w2.weight = (rows * final_norm(target)) @ mx.array(left)

    def mismatches(self, head: B, config: TrainSettings) -> Mapping[str, Any]:
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
    """Loss: cross entropy with the target's token, weighted by slot. The first slot of a block predicts nothing."""

    head_class = DFlashHead


class DFlash2Kind(BlockKind[DFlash2Head]):
    """Loss: DFlash's, and the cross entropy of the selector among its candidates, after the true token before.

    Convolutions begin as identities, and the selector with scores of zero. Source: NeMo Automodel's `dflash2_core.py`
    for both, and for labels that are not among the candidates. The label is the target's token, as in speculators.
    """

    head_class = DFlash2Head
    selector_weight = 1.0

    def head_config(self, target: Target, config: TrainSettings, *rest: Any) -> BlockConfig:
        plain: BlockConfig = super().head_config(target, config, *rest)
        return dataclasses.replace(  # sizes of published heads, smaller for tiny targets
            plain,
            conv_kernel_size=2,
            conv_group_size=math.gcd(16, target.hidden_size),
            selector_rank=min(256, target.hidden_size // 4),
            selector_top_k=min(16, target.vocab_size),
        )


class DSparkKind(BlockKind[DSparkHead]):
    """Loss: 0.1 of cross entropy, 0.9 of the distance |p - q|, and the cross entropy of the confidence."""

    head_class = DSparkHead
    confidence_weight = 1.0

    def head_config(self, target: Target, config: TrainSettings, *rest: Any) -> BlockConfig:
        plain: BlockConfig = super().head_config(target, config, *rest)
        return dataclasses.replace(
            plain,
            block_size=config.optimization.unroll,
            first_slot_drafts=True,
            markov_head="vanilla",
            markov_rank=min(256, target.hidden_size // 4),  # as in published heads
            confidence_head=True,
        )


def spread_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Return layers evenly from the second to the third from the end. Source: z-lab/dflash, 1, 9, …, 33 of 36."""
    last = num_layers - 3
    if last <= 1:
        return (num_layers // 2,)
    return tuple(sorted({round(1 + i * (last - 1) / (count - 1)) for i in range(count)}))
