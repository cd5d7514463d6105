"""P-EAGLE: an EAGLE-3 head whose later tokens are drafted from mask tokens, all in one forward.

Sources: arXiv 2602.01469; vllm-project/speculators, `models/peagle` (which slots a pass keeps, their masks and loss).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx

from eagle_mlx.heads.eagle3 import Eagle3Head, PEagleConfig, PEagleHead
from eagle_mlx.heads.eagle3.head import DecoderLayer
from eagle_mlx.heads.layers import PlainLayer
from eagle_mlx.target import Target

from ..config import TrainSettings
from ..kind_settings import ANCHOR_SHARE
from ..unroll import Inputs, Step, UnrolledCache, recomputed, take_rows
from .block import mask_token
from .eagle3 import Eagle3Kind, attend, causal_mask, project_each
from .least_squares import Matrix, Moments

_LEAST = 0.2  # the least share of all anchors that a slot keeps
_CONSTANT = 1e-3  # an input of the linear start too small to be used, whose products with the others give their mean


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
    seen = UnrolledCache(segments).make_mask(segments.shape[1]), causal_mask(segments, indices)
    places = [indices[:, :most] + depth for depth, most in enumerate(counts, 1)]
    layers: list[Any] = [head.midlayer, *(head.layers if head.config.num_hidden_layers > 1 else [])]
    for layer in layers:
        step: Step = partial(_layer, layer, *seen, places)
        step = recomputed(layer, step) if recompute else step
        read = step(*read)
    first, *slots = map(head.next_feature, read)
    ends = [sum(counts[:depth]) for depth in range(1, len(counts))]
    each = list(mx.split(slots[0], ends, axis=1)) if slots else []
    return [take_rows(first, indices), *(mx.pad(x, [(0, 0), (0, count - x.shape[1]), (0, 0)]) for x in each)]


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
    found: list[mx.array] = []
    pairs: list[tuple[mx.array, mx.array]] = []
    begin = 0
    for place in places:
        most = place.shape[1]
        q, k, v = (x[:, :, begin : begin + most] for x in of_masks)
        pairs = [(k[:, :, :most], v[:, :, :most]) for k, v in [*pairs, (k, v)]]
        found.append(attend(q * attention.scale, keys, values, past[..., :most, :], pairs))
        begin += most
    return [*outputs, layer.finish(residual, attention.output(mx.concatenate(found, axis=2)))]


class PEagleKind(Eagle3Kind):
    """Loss: EAGLE-3's at each slot. In one pass, fewer anchors keep each later slot.

    `--unroll` is the number of drafts. The published loss is a mean over all slots, so a depth counts by its share.
    """

    head_class: type[Any] = PEagleHead
    in_blocks = True
    unroll: ClassVar[Callable[..., list[mx.array]]] = staticmethod(unroll_masks)

    def share(self, slot: int) -> float:
        return share_of(slot)

    def head_config(self, target: Target, config: TrainSettings, *rest: Any) -> PEagleConfig:
        plain = super().head_config(target, config, *rest)
        return PEagleConfig(**asdict(plain), mask_token_id=mask_token(target))

    def guess(self, head: Eagle3Head, target: Target, *states: Any) -> tuple[mx.array, mx.array]:
        x, wanted = super().guess(head, target, *states)
        return mx.concatenate([x, mx.full((*x.shape[:2], 1), _CONSTANT)], axis=-1), wanted

    def begin_as(self, head: Eagle3Head, guess: Matrix, by: Moments) -> None:
        """Initialize the map, and mask tokens with the mean of what `fc` reads."""
        super().begin_as(head, guess[:-1], by)
        mean = by.xx[-1, : head.fc.weight.shape[1]] / (_CONSTANT * by.count)
        head["mask_hidden"] = mx.array(mean)[None, None]
