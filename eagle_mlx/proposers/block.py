"""Draft a whole block in one forward, for heads whose slots read the text and each other.

`HeadState` keeps the context's keys and values; the block's own are written after them and forgotten.
"""

from __future__ import annotations

import mlx.core as mx

from eagle_mlx.decoding.filters import largest
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.eagle3.head import PEagleHead
from eagle_mlx.proposers.drafting import Draws


def draw_block(
    head: BlockHead | PEagleHead, states: mx.array, newest: mx.array, drafts: int, draw: Draws
) -> list[mx.array]:
    """Return a block's tokens as they were drawn, [B, n] int32 each.

    states: [B, n, H], the states of the slots, the last `drafts` of which draft; newest: [B, 1] int32, each row's
    newest token, for heads whose slots depend on the token before them.
    """
    h = states[:, -drafts:]
    logits = head.logits(h)
    sequential = head if isinstance(head, BlockHead) and head.is_sequential else None
    if sequential is None and draw.sampling.changes is None:
        return [draw(logits, mx.arange(drafts, dtype=mx.int32))]
    previous, state, candidates = newest, None, None
    if sequential is not None and (count := sequential.config.selector_top_k):
        candidates = largest(logits, count)[1]
    elif sequential is not None and not sequential.config.first_slot_drafts:  # its state begins at the first slot
        _, state = sequential.markov_head.step(previous, states[:, :1], None)
    tokens = list[mx.array]()
    for slot in range(drafts):  # in turn, because penalties and such heads depend on the tokens before
        at = slice(slot, slot + 1)
        final = logits[:, at]
        if sequential is not None:
            among = None if candidates is None else candidates[:, at]
            final, state = sequential.slot_logits(previous, h[:, at], final, state, among)
        previous = draw(draw.changed(final, tokens), slot)
        tokens.append(previous)
    return tokens
