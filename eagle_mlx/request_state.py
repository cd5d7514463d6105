"""The progress of a request: its text and how that ends, and its counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from operator import eq

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import FORCED
from eagle_mlx.request import Output, Request, TokenLogprob
from eagle_mlx.sampling_params import Grammar
from eagle_mlx.text import IncrementalText, StopStrings

AHEAD = 128
"""Tokens that rounds may add before a request's grammar sees them: twice the most of a draft."""
_LEAST_CHANCE = 0.3  # of a guess: with 0.2, replayed JSON of ten integers took a round less and as much time
MOST_DRAFT_FAILURES = 3
"""A request whose proposer raised so often in a row decodes plainly to its end: each time, its text is read again."""


@dataclass
class RequestCounts:
    """Counts of what a request has read, drafted and accepted, and of interruptions. For most fields, see `Output`."""

    prompt_tokens: int
    cached_tokens: int = 0
    rounds: int = 0
    rounds_before: int = 0  # the rounds at the time of the last admission
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    forced: int = 0
    draft_failures: int = 0
    failures_in_a_row: int = 0  # how often the proposer raised since the last draft
    pauses: int = 0

    @property
    def rounds_since(self) -> int:
        return self.rounds - self.rounds_before

    @property
    def may_draft(self) -> bool:
        return self.failures_in_a_row < MOST_DRAFT_FAILURES

    def reuse(self, cached: int) -> None:
        """Record the positions that came from the prefix cache, unless the request resumes after a pause."""
        if not self.pauses:
            self.cached_tokens = cached

    def draft_ended(self, failed: bool = False) -> None:
        """Count a draft, unless this request may not draft any more. failed: whether the proposer raised."""
        if self.may_draft:
            self.draft_failures += failed
            self.failures_in_a_row = self.failures_in_a_row + 1 if failed else 0

    def round_ended(self, drafted: int, accepted: int, forced: bool = False) -> None:
        """Count a round. forced: whether a grammar forced its draft, which says nothing about what drafts otherwise."""
        self.rounds += 1
        if forced:
            self.forced, drafted = self.forced + accepted, 0
        for counts in (self.drafted_by_position, self.accepted_by_position):
            counts += [0] * (drafted - len(counts))
        for position in range(drafted):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted


class ForcedText:
    """Tokens that a grammar forces next, and guesses between: what mostly followed the same token, or as many free
    tokens since the last forced one."""

    def __init__(self) -> None:
        self._length = -1  # of the text seen so far
        self._last = [-1]  # as from `_after`
        self._followers = defaultdict[int, Counter[int]](Counter)
        self.draft, self.likely = list[int](), 0
        """The draft, and how many of its tokens are expected to be right; if none is, it is empty."""
        self._forced: list[bool] = []  # of each of its tokens

    def look(self, grammar: Grammar, text: Sequence[int], most: int) -> None:
        """Draft up to `most` tokens after a text that continues the previous one, and that the grammar has seen."""
        if self._length == len(text):
            return
        new, self._length = text[max(self._length, 0) :], len(text)
        right = len([*takewhile(bool, map(eq, new, self.draft))])
        for token, forced in zip_longest(new, self._forced[:right]):
            for before in self._last:
                self._followers[before][token] += not forced
            self._last = _after(self._last, token, bool(forced))
        steps, taken, last, chance = list[tuple[int, bool, float]](), 0, self._last, 1.0
        with suppress(Exception):  # a grammar may raise anything; if its mask does too, the request ends
            while taken == len(steps) < most:
                run = np.array(grammar.forced(most - taken)[: most - taken], np.int32).tolist()
                steps += [(token, True, chance) for token in run]
                last = _after(last, run[-1], True) if run else last
                share, guess = self._likeliest(last)
                if (chance := chance * share) < _LEAST_CHANCE:
                    break
                steps.append((guess, False, chance))
                last = _after(last, guess, False)
                while taken < len(steps) and grammar.advance(steps[taken][0]):
                    taken += 1
        with suppress(Exception):
            grammar.rollback(taken)
        self._forced = [forced for _, forced, _ in steps]
        self.likely = int(sum(chance for *_, chance in steps[:most])) * any(self._forced)
        self.draft = [token for token, *_ in steps[:most]] if self.likely else []

    def _likeliest(self, after: Sequence[int]) -> tuple[float, int]:
        """Return the chance of the likeliest guess after any of these, and the guess."""
        counters = [self._followers[before] for before in after]
        top = [(count / (c.total() + 0.5), token) for c in counters for token, count in c.most_common(1)]
        return max(top, default=(0.0, 0))


def _after(last: Sequence[int], token: int, forced: bool) -> list[int]:
    """Return what the next token may depend on: this one, and -1 less the number of free tokens since a forced one.

    last: the same for this token.
    """
    return [token, -1 if forced else max(last[-1] - 1, -FORCED)]


def follows(grammar: Grammar, token: int, ends: bool) -> bool | None:
    """Advance a grammar by a token, unless it `ends` the text. Return whether the token is allowed; None if none is."""
    if not ends and grammar.advance(token):
        return True
    mask = grammar.mask()
    if ends and mask[token].item():
        return True
    return False if mask.any().item() else None


class RequestState:
    """The state of a request in the engine: its text and how that ends. Only its own methods change it."""

    def __init__(self, request: Request, tokenizer: TokenizerWrapper | None = None, tokens: Sequence[int] = ()):
        """Open a request with its own grammar and stop watcher. Raises their errors."""
        self.request, self.params = request, request.params
        self.prompt, self.client = request.prompt, request.client
        self.limit, self.image_bytes = request.limit, sum(span.image.nbytes for span in request.images)
        self.grammar = self.params.grammar() if self.params.grammar else None
        self.watcher = self.params.stop_watcher() if self.params.stop_watcher else None
        if (self.params.grammar and self.grammar is None) or (self.params.stop_watcher and self.watcher is None):
            raise ConfigError("grammar or stop_watcher returned None instead of a grammar or watcher; return it")
        self.stops = StopStrings(self.params.stop) if self.params.stop and tokenizer is not None else None
        ends_by_text = self.stops is not None or self.watcher is not None
        self.decoder = IncrementalText(tokenizer) if tokenizer is not None and ends_by_text else None
        self.texts = [""] * len(tokens) if self.decoder is not None else None
        """The text that each token added; None if the request does not decode its text."""
        self.tokens = list(tokens)
        self.from_draft = bytearray(len(self.tokens))  # a byte for each token: 1 if it is an accepted draft token
        self.logprobs: list[TokenLogprob] = []
        self.wants_logprobs, self.lossless = self.params.wants_logprobs, self.params.lossless
        self.counts = RequestCounts(len(self.prompt))
        self.finish_reason: str | None = None
        """None until the request ends. For this and the next three, see `Output`."""
        self.error: str | None = None
        self.refused = False
        self.cut_off: str | None = None
        self.overran = False  # whether the caches hold tokens of the last round that the request did not take
        self.paused = False
        self._forced = ForcedText()

    @property
    def forced(self) -> ForcedText:
        """The tokens to draft next because the grammar forces them, at most `FORCED`."""
        if self.grammar is not None and not self.finish_reason:
            self._forced.look(self.grammar, self.tokens, min(FORCED, self.room))
        return self._forced

    @property
    def length(self) -> int:
        """Tokens in the KV caches: all but the newest."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def text(self) -> list[int]:
        """Prompt and generated tokens. A resumed request reads all of it."""
        return [*self.prompt, *self.tokens]

    @property
    def leaves(self) -> bool:
        """Whether its row leaves the batch, because it ended or is paused."""
        return self.finish_reason is not None or self.paused

    @property
    def room(self) -> int:
        """The maximum number of useful draft tokens in the next round."""
        left, most = self.limit - len(self.tokens) - 1, self.params.num_speculative_tokens
        return left if most is None else min(left, most)

    @property
    def needs_host(self) -> bool:
        """Whether its logits processors or its grammar may change the logits of the next round."""
        free = getattr(self.grammar, "free_tokens", 0 if self.grammar is not None else AHEAD + 1)
        return bool(self.params.logits_processors) or free <= AHEAD

    def admit(self) -> None:
        """Leave the queue; the text is read next."""
        self.paused, self.counts.rounds_before = False, self.counts.rounds

    def pause(self) -> None:
        """Pause the request. It keeps its tokens, grammar, stop strings, seed and counters."""
        self.paused = True
        self.counts.pauses += 1

    def forget_images(self) -> None:
        """Free the features of its images. If they are needed again, they are computed again."""
        for span in self.request.images:
            vars(span.image).pop("features", None)

    def take(
        self, tokens: Sequence[int], drafted: int, logprobs: Sequence[TokenLogprob] = (), forced: bool = False
    ) -> int:
        """Append a round's tokens up to the first that ends the request, if it has not ended; return how many."""
        if self.finish_reason:
            self.overran = True
            return 0
        before = len(self.tokens)
        for token in tokens:
            self._add(token)
            if self.finish_reason:
                break
        taken = len(self.tokens) - before
        self.overran = taken < len(tokens)
        self.logprobs.extend(logprobs[:taken])
        accepted = min(taken, len(tokens) - 1)
        self.from_draft += b"\1" * accepted + bytes(taken - accepted)
        self.counts.round_ended(drafted, accepted, forced)
        return taken

    def fail(self, reason: str, refused: bool = False) -> None:
        """End with an error. refused: whether the request itself caused it."""
        if self.finish_reason is None:
            self.finish_reason, self.error = "error", reason
            self.refused = refused

    def cut(self, by: str, reason: str | None = None) -> None:
        """End with the tokens so far, or with an error if there is a reason for one. by: see `cut_off`."""
        if self.finish_reason is None:
            self.cut_off, self.error = by, reason
            self.finish_reason = "length" if reason is None else "error"

    def fail_by_grammar(self, error: Exception) -> None:
        """End because the grammar raised an error. A ConfigError means that it became too complex."""
        self.fail(f"the grammar failed: {error}", refused=isinstance(error, ConfigError))

    def finish(self, reason: str) -> None:
        self.finish_reason = self.finish_reason or reason

    def output(self, tokenizer: TokenizerWrapper | None) -> Output:
        """Return the output so far. Without a tokenizer the text is empty."""
        tokens, counts = list(self.tokens), self.counts
        shown = tokens[:-1] if tokens and tokens[-1] in self.request.stop_ids else tokens
        text = tokenizer.decode(shown) if tokenizer is not None else ""
        text, stop = self.stops.cut(text) if self.stops else (text, None)
        return Output(
            text=text,
            tokens=tokens,
            finish_reason=self.finish_reason or "",
            prompt_tokens=counts.prompt_tokens,
            rounds=counts.rounds,
            drafted=sum(counts.drafted_by_position),
            accepted=sum(counts.accepted_by_position),
            drafted_by_position=list(counts.drafted_by_position),
            accepted_by_position=list(counts.accepted_by_position),
            logprobs=list(self.logprobs) if self.wants_logprobs else None,
            lossless=self.lossless,
            forced=counts.forced,
            draft_failures=counts.draft_failures,
            cached_tokens=counts.cached_tokens,
            error=self.error,
            refused=self.refused,
            cut_off=self.cut_off,
            stop=stop,
        )

    def _add(self, token: int) -> None:
        ends = token in self.request.stop_ids
        try:
            allowed = self.grammar is None or follows(self.grammar, token, ends)
        except Exception as e:  # a grammar may raise anything, and other rows must go on
            self.fail_by_grammar(e)
            return
        if allowed is None:
            self.finish("stop")
        elif not allowed:
            self.fail(f"the grammar rejected token {token}, which its own mask allowed")
        if not allowed:
            return
        self.tokens.append(token)
        certain, open_end = "", ""
        if self.decoder is not None and self.texts is not None:
            certain, open_end = self.decoder.add([token])
            self.texts.append(certain)
        is_stop = self.stops is not None and self.stops.complete(certain, open_end)
        if ends or is_stop or self._is_last(token, certain):
            self.finish_reason = self.finish_reason or "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"

    def _is_last(self, token: int, text: str) -> bool:
        """Return whether the watcher ends the text here. If the watcher raises, only this request fails."""
        try:
            return self.watcher is not None and self.watcher(token, text)
        except Exception as e:  # a watcher is the caller's code and may raise anything
            self.fail(f"the stop watcher failed: {e}")
            return True
