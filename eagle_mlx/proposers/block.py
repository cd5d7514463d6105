"""Draft a whole block in one forward, for heads whose slots read the text and each other.

`HeadState` keeps the context's keys and values; the block's own are written after them and forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.filters import largest
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.eagle3.head import PEagleHead
from eagle_mlx.plan import Plan
from eagle_mlx.proposers.drafting import ChainSampler, Draws, TreeScorer, TreeShape, side_branch_tree


@dataclass(frozen=True)
class BlockDrafter:
    """One block of each row of a batch."""

    head: BlockHead | PEagleHead
    states: mx.array  # [B, n, H], the states of the slots, the last `drafts` of which draft
    drafts: int
    newest: mx.array  # [B, 1] int32, each row's newest token, for heads whose slots depend on the token before them
    sampling: SamplingBatch
    positions: mx.array  # [B] int32, the positions of the first draft tokens

    def draft(self, plan: Plan) -> Draft:
        """Draft a chain, or a chain with side branches, as the plan asks. Rows' chains are equally long."""
        drafts = self.drafts
        arguments = self.sampling, self.positions, self.head.vocab_size, self.head.token_ids
        if plan.is_tree:
            scorer, shape = TreeScorer(*arguments), TreeShape.of(plan.nodes, plan.depth)
            self._draw(scorer)
            children = max(shape.children, -(-plan.nodes // drafts))
            nodes, tree = side_branch_tree(scorer.levels, plan.nodes, children, self.head.token_ids)
            return Draft(nodes, self._alike(nodes.shape[1]), tree=tree)
        sampler = ChainSampler(*arguments)
        return sampler.draft(self._draw(sampler), self._alike(drafts))

    def _alike(self, count: int) -> mx.array:
        return mx.full((self.newest.shape[0],), count, mx.int32)

    def _draw(self, draw: Draws) -> list[mx.array]:
        """Return the block's tokens [B, n] int32, as they were drawn."""
        states, drafts = self.states, self.drafts
        h = states[:, -drafts:]
        logits = self.head.logits(h)
        head = self.head if isinstance(self.head, BlockHead) and self.head.is_sequential else None
        if head is None and self.sampling.changes is None:
            return [draw(logits, mx.arange(drafts, dtype=mx.int32))]
        previous, state, candidates = self.newest, None, None
        if head is not None and (count := head.config.selector_top_k):
            candidates = largest(logits, count)[1]
        elif head is not None and not head.config.first_slot_drafts:  # its recurrent state begins at the first slot
            _, state = head.markov_head.step(previous, states[:, :1], None)
        tokens = list[mx.array]()
        for slot in range(drafts):  # in turn, because penalties and such heads depend on the tokens before
            at = slice(slot, slot + 1)
            final = logits[:, at]
            if head is not None:
                among = None if candidates is None else candidates[:, at]
                final, state = head.slot_logits(previous, h[:, at], final, state, among)
            previous = draw(draw.changed(final, tokens), slot)
            tokens.append(previous)
        return tokens
