"""Draft with a trained head of any kind, from the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from eagle_mlx.cache import RaggedCache, without_row
from eagle_mlx.cache.draft_window import DraftWindow
from eagle_mlx.cache.lengths import swap_removed
from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import ConfigError, HeadError, check, require
from eagle_mlx.formats.tensors import arrays_of
from eagle_mlx.heads import KINDS, HeadBase, check_fit
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.eagle3.head import PEagleHead
from eagle_mlx.heads.precision import in_dtype
from eagle_mlx.hooks import Hooks, PlacesOneByOne, add_to_rope
from eagle_mlx.plan import Abilities, Plan
from eagle_mlx.proposers.base import DROPPED, HeadPiece, Observation, Proposer, ProposerState
from eagle_mlx.proposers.drafting import Draws, TreeScorer, TreeShape, draft_chain, draw_block, grow_tree
from eagle_mlx.target import Target, nbytes_of

SINK = 4
"""Entries at the start of a text that a head keeps if it was not trained with a window. Source: Xiao et al. 2023."""


def window_of(head: DraftHead, size: int | None, sink: int | None) -> DraftWindow | None:
    """Return the draft window of a head, None for the whole text; arguments as in `HeadProposer`."""
    for name, value in (("draft_window", size), ("draft_sink", sink)):
        require(name, value or 0, int, "an integer of at least 0", 0)
    size = head.draft_window if size is None else size
    if not size:
        check(not sink, "draft_sink keeps entries before a draft window; set draft_window, too")
        return None
    if any(getattr(head.config, "windows", ())):
        raise ConfigError("this head's layers have sliding windows of their own, so it takes no draft_window")
    return DraftWindow(size, (0 if head.draft_window else SINK) if sink is None else sink)


class HeadProposer(Proposer):
    """Drafts with a trained head, bound to its target."""

    movable = True

    def __init__(self, head: DraftHead, draft_window: int | None = None, draft_sink: int | None = None):
        """Draft with a head that sees the first `draft_sink` and the newest `draft_window` entries of a text.

        `draft_window`: 0 for the whole text; by default, the window that the head was trained with, if any. Raises
        ConfigError if the head's layers have windows of their own, or if it is no head.
        """
        require("head", head, HeadBase, "a head, such as em.load_head(name, target)")
        self.draft_window = window_of(head, draft_window, draft_sink)
        self.head: DraftHead = head  # once bound, a copy in the target's dtype if the dtypes differ
        self.name = next((kind.mode for kind in KINDS.values() if isinstance(head, kind.head_class)), "eagle")
        """The name for `--spec-decode`; `eagle` for an unknown kind of head."""
        # The target reads a whole block even if rows end early, so early exits save nothing.
        self.abilities = Abilities(trees=True, early_exit=not isinstance(head, BlockHead | PEagleHead))
        self._target: Target | None = None

    @property
    def aux_layers(self) -> tuple[int, ...]:  # type: ignore[override]  # those of some heads depend on the target
        return self.head.aux_layers

    @property
    def target(self) -> Target:
        if self._target is None:
            raise HeadError("this head is not bound to a target; build an Engine with it first")
        return self._target

    def bind(self, target: Target) -> None:
        check_fit(self.head, target)
        self.head.attach(target)
        self.head = in_dtype(self.head, target.dtype)
        self._hooks = Hooks.of(self.head)
        add_to_rope(self.head, self._hooks, PlacesOneByOne)
        self._target = target

    def exchange(self, other: HeadProposer) -> None:
        """Exchange weights with another bound head of the same shape, between steps of an engine.

        Texts stay as they are, whatever drafts. Entries that the former head wrote stay in the caches of rows and
        prefixes. Raises HeadError if the shapes differ.
        """
        ours, theirs = (arrays_of(proposer.head.parameters()) for proposer in (self, other))
        shapes = [{name: (x.shape, x.dtype) for name, x in weights.items()} for weights in (ours, theirs)]
        if shapes[0] != shapes[1] or self.head.vocab_size != other.head.vocab_size:
            raise HeadError("the two heads have different shapes, so one cannot take the place of the other")
        self.head.update(tree_unflatten(list(theirs.items())))
        other.head.update(tree_unflatten(list(ours.items())))
        own_ids = self.head.token_ids
        self.head.use_vocabulary(other.head.token_ids)
        other.head.use_vocabulary(own_ids)

    def open(self, prompts: Sequence[Sequence[int]]) -> HeadState:
        return HeadState(self, len(prompts))

    def join(self, pieces: Sequence[HeadPiece], length: int, prompt: Sequence[int] = ()) -> HeadState:
        state, marks = HeadState(self, 1), bytearray(b"".join(piece.marks for piece in pieces)[:length])
        state._marks = [marks]
        state.cache = state.cache.joined([piece.entries for piece in pieces], marks.count(1))
        if self.draft_window is not None:
            state.cache.lengths.dropped = [marks.count(DROPPED)]
            before_gap = marks.count(1, 0, marks.rfind(DROPPED) + 1)  # a sink, or the window of a shorter text, too
            state._drop(self.draft_window, [max(0, before_gap - self.draft_window.sink)])
        return state

    @property
    def weight_bytes(self) -> int:
        return nbytes_of(self.head)

    def cache_size(self) -> CacheSize:
        state = HeadState(self, 1)
        states = mx.zeros((1, 1, self.target.hidden_size), self.target.dtype)
        state._forward(mx.zeros((1, 1), mx.int32), self.head.features([states] * len(self.aux_layers)))
        return CacheSize.of(state.cache)


_MOST_UNREAD = 32
"""Maximum positions per row left unread while nothing is drafted. Reading all costs up to 10 % in large batches."""
_KEPT_UNREAD = 8  # newest positions kept for the next draft when this maximum is exceeded


@dataclass
class _Pending:
    """Committed positions that the head has not read yet."""

    tokens: list[list[int]]  # for each row, the token after each position
    aux: list[tuple[mx.array, ...]]  # the target's hidden states in chunks, one [B, L, H] for each layer
    embeddings: mx.array | None = None  # [B, L, H], of the first L tokens, if some are images that the head reads

    @property
    def longest(self) -> int:
        return max(map(len, self.tokens))

    @property
    def even(self) -> bool:
        """Whether all rows have the same number of positions, so more can be appended without a gap."""
        return len(set(map(len, self.tokens))) == 1

    def drop_oldest(self, kept: int) -> int:
        """Drop the oldest chunks while at least `kept` positions remain; return the number dropped per row."""
        dropped = 0
        while self.longest - self.aux[0][0].shape[1] >= kept:
            count = self.aux.pop(0)[0].shape[1]
            for tokens in self.tokens:
                del tokens[:count]
            dropped += count
        return dropped


class HeadState(ProposerState):
    """The head's cache, and each row's hidden state for the first draft token.

    Entry t combines the target's hidden state at position t and the token at t + 1, so the cache is one entry behind
    the text. Entries written while drafting use the head's own output; they are recomputed from the target's.

    If a head has not drafted for a while, it reads only the newest positions, and the gap stays in its cache. This
    saves time and costs some acceptance later.
    """

    def __init__(self, proposer: HeadProposer, rows: int):
        self.proposer, self.head = proposer, proposer.head
        self.target = proposer.target
        layers, window = self.head.cache_layers, proposer.draft_window
        self.cache = RaggedCache(layers, rows) if window is None else window.cache(layers, rows)
        self._marks = [bytearray() for _ in range(rows)]  # as in `HeadPiece`, for each row
        self._pending: _Pending | None = None
        self._in_prompts = False  # whether the pending positions belong to prompts
        in_blocks = isinstance(self.head, BlockHead)
        self.hidden = mx.zeros(
            (rows, 1, 1 if in_blocks else self.head.hidden_size), mx.int32 if in_blocks else self.target.dtype
        )
        """[rows, 1, H]: features at each row's newest position, from which the head drafts; for heads that draft blocks
        [rows, 1, 1] int32, the newest token."""

    def prefill(self, seen: Observation) -> None:
        """Read the previous chunk; this one is read with the next, so the target's first token does not wait for it."""
        self._read_pending()
        self._append_pending(seen)
        self._in_prompts = True

    def observe(self, seen: Observation) -> None:
        pending = self._append_pending(seen)
        if self._in_prompts:
            self._read_pending()
            return
        if pending.longest > _MOST_UNREAD and pending.even:
            dropped = pending.drop_oldest(_KEPT_UNREAD)
            for marks in self._marks:
                marks.extend(bytes(dropped))

    def _append_pending(self, seen: Observation) -> _Pending:
        if self._pending is None or not self._pending.even:
            self._read_pending()
            self._pending = _Pending([[] for _ in seen.tokens], [], seen.embeddings)
        for row, tokens in zip(self._pending.tokens, seen.tokens, strict=True):
            row.extend(tokens)
        longest = max(map(len, seen.tokens))
        self._pending.aux.append(tuple(x[:, :longest] for x in seen.aux))
        return self._pending

    def _read_pending(self) -> None:
        """Read the pending positions, and keep each row's newest hidden state [B, 1, H]."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        counts = [len(tokens) for tokens in pending.tokens]
        tokens = mx.array([row + [0] * (pending.longest - len(row)) for row in pending.tokens], mx.int32)
        layers = [x[0] if len(x) == 1 else mx.concatenate(list(x), axis=1) for x in zip(*pending.aux, strict=True)]
        h = self._forward(tokens, self.head.features(layers), pending.embeddings)
        if pending.even:
            self.hidden = h[:, -1:]
            self.cache.lengths.advance(counts[0])
        else:
            kept = mx.array(counts, mx.int32)
            newest = mx.take_along_axis(h, mx.maximum(kept - 1, 0)[:, None, None], axis=1)
            self.hidden = mx.where(kept[:, None, None] > 0, newest, self.hidden)
            self.cache.lengths.advance(kept, at_most=pending.longest)
        for marks, count in zip(self._marks, counts, strict=True):
            marks.extend(b"\1" * count)
        self.cache.lengths.sync([marks.count(1) for marks in self._marks])
        window, bounds = self.proposer.draft_window, self.cache.lengths.bounds
        if window is not None and max(bounds) > window.most:
            self._drop(window, [max(0, bound - window.kept) for bound in bounds])
        if self._in_prompts:
            mx.async_eval(self.hidden, self.cache.state)
            self._in_prompts = False

    def _drop(self, window: DraftWindow, counts: Sequence[int]) -> None:
        """Drop the oldest `counts` entries of each row after its sink."""
        if any(counts):
            for marks, count in zip(self._marks, counts, strict=True):
                present = np.flatnonzero(np.frombuffer(marks, np.uint8) == 1)
                for position in present[window.sink : window.sink + count].tolist():
                    marks[position] = DROPPED
            self.cache.drop(counts)

    def _forward(self, tokens: mx.array, features: mx.array, first: mx.array | None = None) -> mx.array:
        """Read tokens and features; `first`: embeddings of the first tokens, instead of the head's own."""
        if isinstance(self.head, BlockHead):
            self.head.extend(features, self.cache)
            return tokens[..., None]
        embeddings = self.head.embed(tokens)
        if first is not None:
            embeddings = mx.concatenate([first.astype(embeddings.dtype), embeddings[:, first.shape[1] :]], axis=1)
        return self.head(embeddings, features, self.cache)

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        self._read_pending()
        ready = mx.array([int(1 in marks) for marks in self._marks], mx.int32)  # rows without a position cannot draft
        arguments = sampling, positions, self.target.vocab_size, self.head.token_ids
        committed = self.cache.lengths.begin_draft()
        if isinstance(self.head, BlockHead | PEagleHead):
            draft = draft_chain(plan, self._block(self.head, plan.depth), ready, *arguments)
        elif plan.is_tree and TreeShape.of(plan.nodes, plan.depth).width > 1:
            draft = self._tree(plan, TreeScorer(*arguments), ready)
        else:
            draft = draft_chain(plan, partial(self._chain, plan.depth), ready, *arguments)
        self.cache.lengths.restore(committed)
        return draft

    def _block(self, head: BlockHead | PEagleHead, depth: int) -> Callable[[Draws], list[mx.array]]:
        if isinstance(head, BlockHead):
            drafts, newest = min(depth, head.config.drafts), self.hidden[..., 0]
            return partial(draw_block, head, head.block(newest, self.cache, drafts), newest, drafts)
        states = self.hidden
        if depth > 1:
            states = mx.concatenate([states, head.masks(states.shape[0], depth - 1, self.cache)], axis=1)
        return partial(draw_block, head, states, states[..., :0], depth)

    def _chain(self, depth: int, draws: Draws) -> list[mx.array]:
        hidden = self.hidden

        def forward(token: mx.array | None) -> mx.array:
            nonlocal hidden
            if token is not None:
                hidden = self._forward(token, hidden)
                self.cache.lengths.advance(1)
            return self.head.logits(hidden)

        return draws.chain(depth, forward)

    def _tree(self, plan: Plan, scores: TreeScorer, ready: mx.array) -> Draft:
        def scores_of(hidden: mx.array, level: int) -> mx.array:
            return scores.of(self.head.logits(hidden), level)

        tokens, tree = grow_tree(self.head, self.cache, self.hidden, scores_of, plan.depth, plan.nodes)
        return Draft(tokens, plan.nodes * ready, tree=tree)

    def append(self, other: HeadState) -> None:
        self._read_pending()
        other._read_pending()
        self.cache.append(other.cache)
        self._marks.extend(other._marks)
        self.hidden = mx.concatenate([self.hidden, other.hidden], axis=0)

    def remove(self, row: int) -> None:
        self._read_pending()
        self.cache.remove(row)
        self._marks = swap_removed(self._marks, row)
        self.hidden = without_row(self.hidden, row)

    def take(self, row: int) -> HeadState:
        length = self.length(row)
        taken = self.proposer.join([self.piece(row, 0, length)], length)
        taken.hidden = self.hidden[row : row + 1]
        mx.eval(taken.hidden, taken.cache.state)  # pending computation would keep buffers alive
        self.remove(row)
        return taken

    def length(self, row: int) -> int:
        """Return the number of positions, including skipped ones."""
        self._read_pending()
        return len(self._marks[row])

    def piece(self, row: int, start: int, end: int) -> HeadPiece:
        """Return a copy of the entries without the newest hidden state; the next reader reads at least one position."""
        self._read_pending()
        marks = self._marks[row]
        entries = self.cache.piece(row, marks.count(1, 0, start), marks.count(1, 0, end))
        return HeadPiece(entries, bytes(marks[start:end]))
