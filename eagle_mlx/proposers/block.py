"""Draft a whole block in one forward, for heads whose slots read the text and each other.

`HeadState` keeps the context's keys and values; the block's own are written after them and forgotten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.filters import largest
from eagle_mlx.decoding.sampling import SamplingBatch, surprise_of
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
        """Draft a chain, or a chain with side branches, as the plan asks.

        With `plan.stop_below`, each row's chain ends before the first token whose chance, together with those before
        it, is below. The device finds the lengths; the host does not wait for them.
        """
        drafts = self.drafts
        arguments = self.sampling, self.positions, self.head.vocab_size, self.head.token_ids
        if plan.is_tree:
            scorer, shape = TreeScorer(*arguments), TreeShape.of(plan.nodes, plan.depth)
            self._draw(scorer)
            children = max(shape.children, -(-plan.nodes // drafts))
            nodes, tree = side_branch_tree(scorer.levels, plan.nodes, children, self.head.token_ids)
            return Draft(nodes, self._alike(nodes.shape[1]), tree=tree)
        sampler = ChainSampler(*arguments)
        tokens, logits = self._draw(sampler)
        lengths = self._alike(drafts)
        if plan.stop_below is not None:
            most = -math.log(plan.stop_below) if plan.stop_below > 0 else math.inf
            lengths = mx.sum(mx.cumsum(self._surprises(tokens, logits), axis=1) <= most, axis=1).astype(mx.int32)
        return sampler.draft(tokens, lengths)

    def _alike(self, count: int) -> mx.array:
        return mx.full((self.newest.shape[0],), count, mx.int32)

    def _draw(self, draw: Draws) -> tuple[list[mx.array], list[mx.array]]:
        """Return the block's tokens [B, n] int32, as they were drawn, and their logits [B, n, Vd]."""
        states, drafts = self.states, self.drafts
        h = states[:, -drafts:]
        logits = self.head.logits(h)
        head = self.head if isinstance(self.head, BlockHead) and self.head.is_sequential else None
        if head is None and self.sampling.changes is None:
            return [draw(logits, mx.arange(drafts, dtype=mx.int32))], [logits]
        previous, state, candidates = self.newest, None, None
        if head is not None and (count := head.config.selector_top_k):
            candidates = largest(logits, count)[1]
        elif head is not None and not head.config.first_slot_drafts:  # its recurrent state begins at the first slot
            _, state = head.markov_head.step(previous, states[:, :1], None)
        tokens, finals = list[mx.array](), list[mx.array]()
        for slot in range(drafts):  # in turn, because penalties and such heads depend on the tokens before
            at = slice(slot, slot + 1)
            final = logits[:, at]
            if head is not None:
                among = None if candidates is None else candidates[:, at]
                final, state = head.slot_logits(previous, h[:, at], final, state, among)
            finals.append(draw.changed(final, tokens))
            previous = draw(finals[-1], slot)
            tokens.append(previous)
        return tokens, finals

    def _surprises(self, tokens: list[mx.array], logits: list[mx.array]) -> mx.array:
        """Return [B, drafts] float32: minus the logarithm of each token's chance to be accepted if those before it are.

        The chance is that of the confidence head, else that of the most likely token. It never depends on its own
        token, which would change sampled text.
        """
        head = self.head
        if not isinstance(head, BlockHead) or not head.config.confidence_head:
            return surprise_of(mx.concatenate(logits, axis=1), self.sampling)
        before = mx.concatenate([self.newest, *tokens], axis=1)[:, :-1]
        return mx.logaddexp(-head.confidence(self.states[:, -self.drafts :], before), 0.0)
