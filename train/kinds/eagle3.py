"""EAGLE-3 and P-EAGLE: read hidden states of several layers; have an own draft vocabulary and output projection.

A head predicts the target's state at the next token from the states at this token and the next token's embedding. With
several layers, its first layer predicts the input of the target's last layers, and copies of those do the rest.
Training unrolls draft steps over a whole batch ("training-time test"): Li et al. 2025, EAGLE-3, section 3.2 and figure
6; SafeAILab/EAGLE and sgl-project/SpecForge.

P-EAGLE drafts its later tokens from mask tokens, all in one forward: arXiv 2602.01469; vllm-project/speculators,
`models/peagle` (which slots a pass keeps, their masks and loss).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import rope_fields
from eagle_mlx.heads.eagle3 import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead, default_aux_layers
from eagle_mlx.heads.eagle3.head import DecoderLayer
from eagle_mlx.heads.layers import Attention, PlainLayer
from eagle_mlx.target import Target, setting_of

from ..config import TrainSettings
from ..kind_settings import ANCHOR_SHARE, KIND_SETTINGS
from ..unroll import HIDDEN, Inputs, Step, UnrolledCache, recomputed, run_steps, take_rows, unroll_feedback
from .base import SPREAD, Kept, Kind, layer_shape, mask_token, plain_weights
from .least_squares import Matrix, Moments, Piece, factors

NOT_IN_A_STEP = ("fc", "fc_norm", "input_norm", "lm_head", "embed_tokens")
"""Parts of the head that a draft step does not use."""
_LEAST = 0.2  # the least share of all anchors that a slot of P-EAGLE keeps
_CONSTANT = 1e-3  # an input of the linear start too small to be used, whose products with the others give their mean


def tie_queries_to_keys(attention: Attention) -> None:
    """Initialize queries like the keys of their group, so that each position attends to itself and similar ones.

    An EAGLE-3 head reads the newest token only through attention. With unrelated queries and keys, all positions get
    equal weight, and the newest token's share falls with the context length (docs/decisions.md).
    """
    keys = attention.k_proj.weight
    dim, width = keys.shape[0] // attention.kv_heads, keys.shape[1]
    # A position's score with itself is 8: its weight is e**8, or 3,000 times that of an unrelated key.
    spread = (8.0 / (dim**0.5 * width)) ** 0.5  # inputs are normed: their squared norm is `width`
    keys = keys * (spread / SPREAD)
    attention.k_proj.weight = keys
    shared = keys.reshape(attention.kv_heads, 1, dim, width)
    by_head = mx.broadcast_to(shared, (attention.kv_heads, attention.heads // attention.kv_heads, dim, width))
    attention.q_proj.weight = by_head.reshape(attention.heads * dim, width)


def attend_to_itself(attention: Attention, matrix: Matrix) -> None:
    """Set value and output weights so that attention to itself applies matrix [H, E] to a position's embedding.

    The embedding is the first part of the attention's input. The matrix is approximated if the rank is too low. The
    query heads of a group share their values, so each contributes an equal part.
    """
    size = attention.o_proj.weight.shape[1] // attention.heads
    left, right = factors(matrix, attention.kv_heads * size)
    values = np.zeros(attention.v_proj.weight.shape, np.float32)
    values[:, : matrix.shape[1]] = right
    group = attention.heads // attention.kv_heads
    part = left.reshape(len(left), attention.kv_heads, 1, size) / group
    output = np.broadcast_to(part, (len(left), attention.kv_heads, group, size))
    attention.v_proj.weight = mx.array(values)
    attention.o_proj.weight = mx.array(np.ascontiguousarray(output).reshape(attention.o_proj.weight.shape))


def aux_layers_for(num_layers: int, layers: int) -> tuple[int, ...]:
    """Return the target layers that a head reads by default, including the one before the copied layers."""
    low, middle, high = default_aux_layers(num_layers)
    return tuple(sorted({low, middle, num_layers - layers if layers > 1 else high}))


def check_reads_front(num_layers: int, layers: int, aux_layers: tuple[int, ...]) -> None:
    """Raise ConfigError if copied layers would need an output that the head does not read."""
    if layers > num_layers:
        raise ConfigError(f"--layers {layers}: must be at most {num_layers}, the number of the target's layers")
    front = num_layers - layers  # the copied layers read its output
    if layers > 1 and front not in aux_layers:
        raise ConfigError(
            f"--layers {layers}: the copied layers continue from the output of the target's layer {front}, which "
            f"the head does not read; add it to --aux-layers, or replace one of {', '.join(map(str, aux_layers))}; "
            "--shards must have been captured with the same layers"
        )


def attention_of(target: Target) -> dict[str, Any]:
    """Return the head config's fields for the attention of the target's last layer: RoPE, and features beyond Llama's.

    Raises ConfigError if a head cannot have this RoPE.
    """
    attention: Any = getattr(target.layers[-1], "self_attn", None)
    biased = ["bias" in getattr(attention, name, {}) for name in ("q_proj", "o_proj")]
    rope = {name: setting_of(target.model, name) for name in ("rope_theta", "rope_scaling", "rope_parameters")}
    try:
        theta, scaling = rope_fields(rope, target.context_length)
    except ConfigError as e:
        raise ConfigError(f"the copied layers need the target's RoPE: {e}; use --layers 1") from e
    flags = {"qk_norm": hasattr(attention, "q_norm"), "qkv_bias": biased == [True, False]}
    return {**flags, "attention_bias": all(biased), "rope_theta": theta, "rope_scaling": scaling}


def last_layers(head: Eagle3Head, target: Target) -> list[dict[str, mx.array]]:
    """Return the weights of the target's last layers, in float32. Raises ConfigError if a head cannot have them."""
    count, copies = head.config.num_hidden_layers, []
    if target.ranks > 1:
        raise ConfigError(f"--layers {count}: with --shard, a machine has only a part of each layer; use --layers 1")
    for number, layer in enumerate(head.layers, target.num_layers - count + 1):
        source = target.layers[number]
        own = _in_halves(source, plain_weights(source))
        wanted = {name: value.shape for name, value in plain_weights(layer).items()}
        has = {name: value.shape for name, value in own.items()}
        if has != wanted:
            odd = sorted(name for name in {**has, **wanted} if has.get(name) != wanted.get(name))
            raise ConfigError(
                f"--layers {count}: layer {number} of {target.name or 'the target'} has weights that a head "
                f"cannot have: {', '.join(odd[:4])}; use --layers 1"
            )
        copies.append(own)
    return copies


def _in_halves(layer: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return a layer's weights for RoPE that rotates halves of a head, also if its own rotates neighboring channels."""
    attention: Any = getattr(layer, "self_attn", None)
    if not getattr(getattr(attention, "rope", None), "traditional", False):
        return weights
    turned = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.q_norm.", "self_attn.k_norm.")
    width = attention.rope.dims

    def even_first(x: mx.array) -> mx.array:  # x [n * width, ...]
        return x.reshape(-1, width // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    return {name: even_first(x) if name.startswith(turned) else x for name, x in weights.items()}


def unroll(head: Eagle3Head, inputs: Inputs, steps: int, recompute: bool = False) -> list[mx.array]:
    """Return the head's output at the given positions for each draft step: `steps` times [B, P, H].

    Step j at index t reads the embedding of token t+1+j and the output of step j-1 at t (the feature for j = 0), with
    rotary position t+j. It attends to the keys of step 0 at indices t' <= t of the same segment, and to those of steps
    1..j at t itself. This is the cache that a row would have after drafting j tokens from index t.

    With `recompute`, only values passed from step to step are kept for the gradient. Heads with several layers or a
    window are unrolled by `unroll_feedback`, which is slower.
    """
    if head.config.num_hidden_layers > 1 or any(head.config.windows):
        return unroll_feedback(head, inputs, steps, recompute)
    embeddings, g, segments, positions = inputs
    attention = head.midlayer.self_attn
    following = mx.concatenate([embeddings[:, 1:], embeddings[:, -1:]], axis=1)
    past_keys, past_values = attention.project(head.midlayer.inputs(following, g)[0])[1:]
    mask = causal_mask(segments, positions, head.draft_window)

    def draft(step: int, h: mx.array, past_keys: mx.array, past_values: mx.array, *own: mx.array) -> list[mx.array]:
        read = mx.minimum(positions + 1 + step, embeddings.shape[1] - 1)
        x, residual = head.midlayer.inputs(take_rows(embeddings, read), h)
        q, k, v = project_each(attention, x, positions + step)
        if step:  # past_keys already includes those of step 0
            own = (*own, k, v)
        pairs = list(zip(own[::2], own[1::2], strict=True))
        attended = attend(q * attention.scale, past_keys, past_values, mask, pairs)
        return [head.next_feature(head.midlayer.finish(residual, attention.output(attended))), *own[-2:]]

    read = [take_rows(g, positions), past_keys, past_values]
    return run_steps(head, draft, read, steps, recompute, NOT_IN_A_STEP)


def causal_mask(segments: mx.array, positions: mx.array, window: int | None = None) -> mx.array:
    """Return the additive mask [B, 1, 1, P, L]: the query at index t attends to the last `window` indices up to t
    within its segment."""
    own = mx.take_along_axis(segments, positions, axis=1)[..., None]
    indices = mx.arange(segments.shape[1])
    seen = (indices <= positions[..., None]) & (segments[:, None] == own)
    if window is not None:
        seen = seen & (indices > positions[..., None] - window)
    return ((1 - seen.astype(mx.float32)) * HIDDEN)[:, None, None]


def attend(
    q: mx.array, past_keys: mx.array, past_values: mx.array, mask: mx.array, own: list[tuple[mx.array, mx.array]]
) -> mx.array:
    """Attend to shared keys and, for each query, to keys at its own index.

    q [B, heads, P, D], scaled; past keys and values [B, kv_heads, L, D]; mask [B, 1, 1, P, L]; `own` holds keys and
    values [B, kv_heads, P, D]. Returns [B, heads, P, D] in the dtype of q; the softmax is in float32.
    """
    b, heads, count, dim = q.shape
    kv_heads, length = past_keys.shape[1:3]
    groups = heads // kv_heads
    grouped = q.reshape(b, kv_heads, groups, count, dim)
    past = (q.reshape(b, kv_heads, groups * count, dim) @ past_keys.swapaxes(-1, -2)).reshape(
        b, kv_heads, groups, count, length
    ).astype(mx.float32) + mask
    scores = [mx.sum((grouped * k[:, :, None]).astype(mx.float32), axis=-1, keepdims=True) for k, _ in own]
    top = mx.max(past, axis=-1, keepdims=True)
    for score in scores:
        top = mx.maximum(top, score)
    top = mx.stop_gradient(top)
    weights = mx.exp(past - top)
    total = mx.sum(weights, axis=-1, keepdims=True)
    shares = weights.reshape(b, kv_heads, groups * count, length).astype(q.dtype)
    out = (shares @ past_values).reshape(grouped.shape)
    for score, (_, v) in zip(scores, own, strict=True):
        weight = mx.exp(score - top)
        total = total + weight
        out = out + weight * v[:, :, None]
    return (out * mx.reciprocal(total)).reshape(q.shape).astype(q.dtype)


def project_each(attention: Attention, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, keys and values [B, heads, P, D] of x [B, P, width] at rotary positions [B, P]."""
    b, count, width = x.shape
    projected = attention.project(x.reshape(b * count, 1, width), positions.reshape(-1))
    q, k, v = (y.reshape(b, count, y.shape[1], y.shape[3]).swapaxes(1, 2) for y in projected)
    return q, k, v


class Eagle3Kind(Kind[Eagle3Head]):
    head_class = Eagle3Head
    unroll: ClassVar[Callable[..., list[mx.array]]] = staticmethod(unroll)

    def head_config(self, target: Target, config: TrainSettings, vocab_size: int, aux_layers: tuple[int, ...]) -> Any:
        layers = config.head.layers or KIND_SETTINGS[config.head.kind].defaults["layers"]
        return Eagle3Config(
            **layer_shape(target, config) | (attention_of(target) if layers > 1 else {}),
            draft_vocab_size=vocab_size,
            target_hidden_size=target.hidden_size,
            aux_layers=aux_layers,
            norm_before_fc=config.head.feature_norm == "all",
            fc_norm=config.head.feature_norm == "each",
            norm_output=config.head.feedback == "normed",
            norm_before_residual=config.head.norm_before_residual,
            num_hidden_layers=layers,
        )

    def check(self, target: Target, config: TrainSettings) -> None:
        layers = config.head.layers or 1
        check_reads_front(target.num_layers, layers, self.aux_layers(target, config))
        super().check(target, config)
        if config.head.norm_before_residual and layers > 1:
            raise ConfigError(
                f"--norm-before-residual cannot be used with --layers {layers}: the copied layers need inputs of the "
                "target's scale; leave one of them out"
            )
        if layers > 1:
            last_layers(self.blank(target, config), target)

    def aux_layers(self, target: Target, config: TrainSettings) -> tuple[int, ...]:
        return config.head.aux_layers or aux_layers_for(target.num_layers, config.head.layers or 1)

    def new(self, target: Target, config: TrainSettings, kept: Kept, aux_layers: tuple[int, ...]) -> Eagle3Head:
        """Return a head that starts as a projection of its feature, before copies of the target's last layers."""
        head = super().new(target, config, kept, aux_layers)
        tie_queries_to_keys(head.midlayer.self_attn)
        if head.config.num_hidden_layers > 1:
            check_reads_front(target.num_layers, head.config.num_hidden_layers, aux_layers)
            for layer, weights in zip(head.layers, last_layers(head, target), strict=True):
                layer.load_weights(list(weights.items()))
        mx.eval(head.parameters())
        return head

    def guess(self, head: Eagle3Head, following: mx.array, aux: list[mx.array], last: mx.array) -> Piece:
        inputs = [head.read(aux)[:, :-1], head.midlayer.input_layernorm(following)]
        if head.config.num_hidden_layers > 1:  # the copies of the target's layers continue from here
            front = head.target.num_layers - head.config.num_hidden_layers
            wanted = aux[head.config.aux_layers.index(front)]
        else:
            wanted = mx.fast.rms_norm(last, None, head.config.rms_norm_eps)
        return mx.concatenate(inputs, axis=-1), wanted[:, 1:]

    def begin_as(self, head: Eagle3Head, guess: Matrix, by: Moments) -> None:
        """Initialize the map. `fc` reads only the states, so the embedding's part goes through self-attention."""
        read = head.fc.weight.shape[1]
        of_states, of_embedding = guess[:read], guess[read:].T
        head.fc.weight = mx.array(of_states.T)
        if head.midlayer.norm_before_residual:  # the norm scales the residual to a mean square of 1
            of_embedding = of_embedding / by.root_mean_square(of_states)
        attend_to_itself(head.midlayer.self_attn, of_embedding)

    def mismatches(self, head: Eagle3Head, config: TrainSettings) -> Mapping[str, Any]:
        shape = head.config
        own = dict(super().mismatches(head, config))
        if (config.head.layers or 0) > shape.num_hidden_layers and not config.head.lora_rank:
            own["layers"] = config.head.layers  # it gets more
        return {
            **own,
            "feature_norm": "each" if shape.fc_norm else "all" if shape.norm_before_fc else "none",
            "recycle": "normed" if shape.norm_output else "output",
            "norm_before_residual": shape.norm_before_residual,
        }


def share_of(slot: int) -> float:
    """Return the share of all anchors that keep this slot, from 0."""
    return max(ANCHOR_SHARE**slot, _LEAST)


def unroll_masks(head: PEagleHead, inputs: Inputs, steps: int, recompute: bool = False) -> list[mx.array]:
    """Return the outputs of the first `steps` drafts of each anchor: `steps` times [B, A, H].

    Draft 0 is the output at the index before the anchor, which reads the anchor's embedding, as in EAGLE-3. Draft d is
    that of the d-th mask token, which sees the indices up to that one and the mask tokens up to itself; it is computed
    for the first anchors alone, by `share_of`, and zero for the others.
    """
    embeddings, g, segments, anchors = inputs
    (rows, count), indices = anchors.shape, mx.maximum(anchors - 1, 0)
    counts = [math.ceil(share_of(depth) * count) for depth in range(1, steps)]
    following = mx.concatenate([embeddings[:, 1:], embeddings[:, -1:]], axis=1)
    read = [following, g]
    if counts:
        read += [x.astype(embeddings.dtype) for x in head.mask_inputs(rows, sum(counts))]
    window = head.draft_window
    seen = UnrolledCache(segments, (), window).make_mask(segments.shape[1]), causal_mask(segments, indices, window)
    places = [indices[:, :most] + depth for depth, most in enumerate(counts, 1)]
    layers: list[Any] = [head.midlayer, *(head.layers if head.config.num_hidden_layers > 1 else [])]
    for layer in layers:
        step: Step = partial(_layer, layer, *seen, places)
        step = recomputed(layer, step) if recompute else step
        read = step(*read)
    first, *slots = map(head.next_feature, read)
    ends = [sum(counts[:depth]) for depth in range(1, len(counts))]
    later = list(mx.split(slots[0], ends, axis=1)) if slots else []
    return [take_rows(first, indices), *(mx.pad(x, [(0, 0), (0, count - x.shape[1]), (0, 0)]) for x in later)]


def _layer(
    layer: DecoderLayer | PlainLayer, causal: mx.array, past: mx.array, places: list[mx.array], *read: mx.array
) -> list[mx.array]:
    """Run a layer over all indices and all mask tokens.

    causal [B, 1, L, L] and past [B, 1, 1, A, L]: masks of the indices and of the anchors; places: for each depth, the
    positions [B, A or fewer] of mask tokens; read: the layer's inputs at the indices, then those of the mask tokens.
    """
    attention: Any = layer.self_attn
    own = len(read) // 2 if places else len(read)
    x, residual = layer.inputs(*read[:own])
    q, keys, values = attention.project(x)
    attended = mx.fast.scaled_dot_product_attention(q, keys, values, scale=attention.scale, mask=causal)
    outputs = [layer.finish(residual, attention.output(attended))]
    if not places:
        return outputs
    x, residual = layer.inputs(*read[own:])
    of_masks = project_each(attention, x, mx.concatenate(places, axis=1))
    of_slots: list[mx.array] = []
    pairs: list[tuple[mx.array, mx.array]] = []
    begin = 0
    for place in places:
        most = place.shape[1]
        q, k, v = (x[:, :, begin : begin + most] for x in of_masks)
        pairs = [(k[:, :, :most], v[:, :, :most]) for k, v in [*pairs, (k, v)]]
        of_slots.append(attend(q * attention.scale, keys, values, past[..., :most, :], pairs))
        begin += most
    return [*outputs, layer.finish(residual, attention.output(mx.concatenate(of_slots, axis=2)))]


class PEagleKind(Eagle3Kind):
    """Loss: EAGLE-3's over all slots that a pass keeps. Later slots keep fewer anchors, so they count less."""

    head_class: type[Any] = PEagleHead
    in_blocks = True
    unroll: ClassVar[Callable[..., list[mx.array]]] = staticmethod(unroll_masks)
    share = staticmethod(share_of)

    def head_config(self, target: Target, config: TrainSettings, *rest: Any) -> PEagleConfig:
        plain = super().head_config(target, config, *rest)
        return PEagleConfig(**asdict(plain), mask_token_id=mask_token(target))

    def guess(self, head: Eagle3Head, *states: Any) -> Piece:
        x, wanted = super().guess(head, *states)
        return mx.concatenate([x, mx.full((*x.shape[:2], 1), _CONSTANT)], axis=-1), wanted

    def begin_as(self, head: Eagle3Head, guess: Matrix, by: Moments) -> None:
        """Initialize the map, and mask tokens with the mean of what `fc` reads."""
        super().begin_as(head, guess[:-1], by)
        mean = by.xx[-1, : head.fc.weight.shape[1]] / (_CONSTANT * by.count)
        head["mask_hidden"] = mx.array(mean)[None, None]
