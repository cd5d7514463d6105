"""Draft with a small language model with the same tokenizer and its own ragged cache."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from eagle_mlx.cache import RaggedCache, check_cacheable, may_pad
from eagle_mlx.cache.lengths import swap_removed
from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import TargetError, require
from eagle_mlx.plan import Abilities, Plan
from eagle_mlx.proposers.base import Observation, Proposer, ProposerState
from eagle_mlx.proposers.drafting import Draws, draft_chain
from eagle_mlx.target import Target, nbytes_of

log = logging.getLogger("eagle_mlx.proposers")
_MOST_READ = 512
"""Maximum positions that a draft reads first, over all rows: a quarter of a default prefill chunk, because all rows
wait. Rows with more unread tokens draft in a later round."""
_MOST_UNREAD = 32
"""Maximum tokens per row left unread while nothing is drafted, and the number read at once then, a short forward in 32
plain rounds. A draft reads as many of each row in any batch."""

_PAUSE = 8
"""Rounds without a draft after which a new prompt is no longer read at once. Exploring plain decoding takes four."""


class DraftModelProposer(Proposer):
    """Drafts with a whole model, usually a smaller one of the target's family (Leviathan et al. 2023, section 2).

    `bind` raises TargetError if the models have different vocabularies, special tokens or end-of-turn tokens: the same
    ids would mean different texts.
    """

    name = "draft"
    movable = True

    def __init__(self, draft: Target):
        require("draft", draft, Target, "a Target, such as em.load_target(name)")
        check_cacheable(draft.model)
        self.draft = draft
        self.abilities = Abilities(trees=True, early_exit=True, may_pad=may_pad(draft.model))
        self.is_positional = RaggedCache.of(draft.model, 1).is_positional
        self.vocab_size = draft.vocab_size
        self.plain_rounds = _PAUSE  # since the last draft for any row
        self._warned = False

    def bind(self, target: Target) -> None:
        check_same_tokenizer(self.draft, target)
        self.vocab_size = target.vocab_size

    def open(self, prompts: Sequence[Sequence[int]]) -> DraftModelState:
        return DraftModelState(self, [_RowText(list(prompt)) for prompt in prompts])

    def warn_of_long_text(self) -> None:
        if not self._warned:
            most = self.draft.context_length
            log.warning("the draft model reads up to %d tokens; longer texts continue without its drafts", most)
        self._warned = True

    @property
    def weight_bytes(self) -> int:
        return self.draft.weight_bytes

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.draft.model)

    def cache_size(self) -> CacheSize:
        cache = RaggedCache.of(self.draft.model, 1)
        self.draft.forward(mx.zeros((1, 1), mx.int32), cache)
        return CacheSize.of(cache)


@dataclass
class _RowText:
    """The text that the draft model has read of one row."""

    unread: list[int]  # the newest tokens, not yet in the cache
    read: int = 0  # number of the row's tokens in the cache
    drafted: int = 0  # number of cache entries of the latest draft, after these
    started: bool = False  # whether a round has asked for its draft; before, the model reads nothing


class DraftModelState(ProposerState):
    """The draft model's cache, and what it has read of each row.

    A prompt is read with the target if other rows draft now: later, it would be read with their next tokens, padded to
    its length. Otherwise, a row is read when a round first drafts for it, so a model that never drafts costs nothing.
    Long texts take several rounds, in which the row does not draft. Accepted tokens stay in the cache; the last one of
    a draft has not been read, so after full acceptance two tokens are unread. A recurrent state returns to where it was
    before the draft, and the next draft reads the accepted tokens again in its first forward.
    """

    def __init__(self, proposer: DraftModelProposer, texts: list[_RowText]):
        self.proposer, self.texts = proposer, texts
        self.cache = RaggedCache.of(proposer.draft.model, len(texts))

    @property
    def draft_cache(self) -> RaggedCache:
        return self.cache

    def length(self, row: int) -> int:
        return self.texts[row].read

    def resume(self, cache: RaggedCache) -> None:
        [text], self.cache = self.texts, cache
        text.read = cache.lengths.upper
        del text.unread[: text.read]

    def prefill(self, seen: Observation) -> None:
        if self.proposer.plain_rounds < _PAUSE:
            self._read_along(list(map(len, seen.tokens)))

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        self.proposer.plain_rounds = 0
        for text in self.texts:
            text.started = True
        most = max(_MOST_UNREAD, _MOST_READ // len(self.texts))
        logits = self._read([text.unread[:most] for text in self.texts])
        fits = [self._fits(text, plan.depth) for text in self.texts]
        if not all(fits):
            self.proposer.warn_of_long_text()
        ready = [int(fit and not text.unread) for text, fit in zip(self.texts, fits, strict=True)]
        drafting = mx.array(ready, mx.int32)
        if logits is None or not any(ready):
            return Draft(mx.zeros((len(ready), 0), mx.int32), drafting)
        chain = partial(self._chain, plan.depth, logits)
        draft = draft_chain(plan, chain, drafting, sampling, positions, self.proposer.vocab_size)
        stays = not self.cache.recurrent and not plan.is_tree  # accepted tokens of a tree may leave the chain
        for text, lookup in zip(self.texts, plan.lookups or [0] * len(ready), strict=True):
            text.drafted = draft.tokens.shape[1] - 1 if stays and not lookup else 0
        return draft

    def _chain(self, depth: int, first: mx.array, draws: Draws) -> list[mx.array]:
        """Draw tokens, the first by the logits [B, 1, V] after each row's newest token."""
        committed = self.cache.save()

        def forward(token: mx.array | None) -> mx.array:
            logits = first
            if token is not None:
                logits = self.proposer.draft.forward(token, self.cache).logits
                self.cache.advance(1)
            return _fitted(logits, self.proposer.vocab_size)

        tokens = draws.chain(depth, forward)
        self.cache.restore(committed)
        return tokens

    def _fits(self, text: _RowText, depth: int = 0) -> bool:
        """Return whether a row's text, with a draft of `depth` tokens, fits the draft model's context."""
        return text.read + len(text.unread) + depth <= self.proposer.draft.context_length

    def _read(self, pieces: list[list[int]]) -> mx.array | None:
        """Read unread tokens of each row whose text fits; return the logits [B, 1, V] after them, None if there are
        none. Those of a row without any mean nothing."""
        pieces = [piece if self._fits(text) else [] for text, piece in zip(self.texts, pieces, strict=True)]
        if not any(pieces):
            return None
        counts = [len(piece) for piece in pieces]
        width, may_pad = max(counts), self.proposer.abilities.may_pad
        is_even = min(counts) == width
        if not is_even and not may_pad:
            width = max(2, width)  # a layer with a state can only take back positions of a wider forward
        tokens = mx.array([piece + [0] * (width - len(piece)) for piece in pieces], mx.int32)
        if may_pad:
            self.cache.expect(counts)
        ends = [max(0, count - 1) for count in counts]
        logits = self.proposer.draft.forward(tokens, self.cache, ends=ends).logits
        self.cache.advance(width if is_even else mx.array(counts, mx.int32), at_most=width)
        for text, piece in zip(self.texts, pieces, strict=True):
            text.unread = text.unread[len(piece) :]
            text.read += len(piece)
        self._sync()
        self.cache.compact()
        return logits

    def _read_along(self, counts: list[int]) -> None:
        """Read up to so many unread tokens of each row, but not its newest one."""
        self._read([text.unread[:-1][:count] for text, count in zip(self.texts, counts, strict=True)])

    def _sync(self) -> None:
        self.cache.sync([text.read for text in self.texts])

    def observe(self, seen: Observation) -> None:
        self.proposer.plain_rounds += 1
        kept = []
        for text, tokens in zip(self.texts, seen.tokens, strict=True):
            kept.append(min(text.drafted, len(tokens) - 1))
            text.unread += tokens[kept[-1] :]
            text.read, text.drafted = text.read + kept[-1], 0
        if any(kept):
            self.cache.advance(mx.array(kept, mx.int32), at_most=max(kept))
            self._sync()
        if any(text.started and len(text.unread) > _MOST_UNREAD for text in self.texts):
            self._read_along([_MOST_UNREAD * text.started for text in self.texts])
            mx.async_eval(self.cache.state)

    def append(self, other: DraftModelState) -> None:
        self.cache.append(other.cache)
        self.texts.extend(other.texts)

    def remove(self, row: int) -> None:
        self.cache.remove(row)
        self.texts = swap_removed(self.texts, row)

    def take(self, row: int) -> DraftModelState:
        taken = DraftModelState(self.proposer, [self.texts[row]])
        taken.cache = self.cache.fork(row, self.texts[row].read)
        mx.eval(taken.cache.state)  # pending computation would keep buffers alive
        self.remove(row)
        return taken


def check_same_tokenizer(draft: Target, target: Target) -> None:
    """Raise TargetError with the difference if two models have different token ids.

    Padding of embeddings is ignored, since it differs within a family. Models without a tokenizer are compared by
    vocabulary size only.
    """
    compared: tuple[str, Any, Any] = ("number of tokens", draft.vocab_size, target.vocab_size)
    if draft.tokenizer is not None and target.tokenizer is not None:
        compared = ("tokens that end a turn", sorted(draft.eos_token_ids), sorted(target.eos_token_ids))
        ours, theirs = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if ours != theirs:
            odd = next(token for token in {**theirs, **ours} if ours.get(token) != theirs.get(token))
            compared = (f"id of {odd!r}", ours.get(odd, "missing"), theirs.get(odd, "missing"))
    what, mine, its = compared
    if mine != its:
        raise TargetError(
            f"the draft model's tokenizer differs from the target's ({what}: {mine} and {its}); "
            f"choose a draft model from the family of {target.name or 'the target'}"
        )


def _fitted(logits: mx.array, vocab_size: int) -> mx.array:
    """Fit logits [B, 1, Vd] to the target's V ids: cut padding, and give missing ids -inf."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=mx.array(-math.inf, logits.dtype))
    return logits[..., :vocab_size]
