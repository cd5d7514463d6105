"""The progress of a request: its tokens, its finish reason, and its counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import ConfigError
from eagle_mlx.request import Output, Request, TokenLogprob
from eagle_mlx.sampling_params import Grammar, StopWatcher
from eagle_mlx.text import IncrementalText, StopStrings


@dataclass(frozen=True)
class Pending:
    """Draft tokens of a row that rejection sampling could not judge because their logits were NaN.

    Dropping them because of their values would bias the text.
    """

    tokens: Sequence[int]
    probs: mx.array | None  # [k, V] float32: what the tokens were drawn from; None if they were not sampled

    def after(self, token: int) -> Pending | None:
        """Return the tokens left to judge after the row emitted `token`; None if `token` differs from the draft."""
        if token != self.tokens[0] or len(self.tokens) == 1:
            return None
        return Pending(self.tokens[1:], None if self.probs is None else self.probs[1:])


MOST_DRAFT_FAILURES = 3
"""A request whose proposer raised so often in a row decodes plainly to its end: each time, its text is read again."""


class RequestState:
    """The state of a request in the engine. Only its own methods change it."""

    def __init__(
        self,
        request: Request,
        stops: StopStrings | None = None,
        grammar: Grammar | None = None,
        watcher: StopWatcher | None = None,
        tokens: Sequence[int] = (),
        decoder: IncrementalText | None = None,
    ):
        """`stops`, `grammar`, `watcher` and `decoder` are stateful and must not be shared with other requests."""
        self.request, self.prompt, self.client = request, request.prompt, request.client
        self.params, self.limit = request.params, request.limit
        self.stops, self.grammar, self.watcher, self.decoder = stops, grammar, watcher, decoder
        self.tokens = list(tokens)
        self.from_draft = bytearray(len(self.tokens))
        """A byte for each token: 1 if it is an accepted draft token."""
        self.logprobs: list[TokenLogprob] = []
        self.rounds = 0
        self.drafted_by_position: list[int] = []
        self.accepted_by_position: list[int] = []
        self.finish_reason: str | None = None
        """None until the request ends. For this and the next four, see `Output`."""
        self.error: str | None = None
        self.refused = False
        self.cut_off: str | None = None
        self.cached_tokens = 0
        self.read_tokens = 0
        """Prompt tokens in the KV caches, including cached ones. Updated after each chunk. Thread-safe."""
        self.rereads = False
        """Whether a draft led to NaN. The next round drafts nothing, to see if the text itself causes NaN."""
        self.pending: Pending | None = None
        """Draft tokens that could not be judged because of NaN. Plain rounds judge one token each."""
        self.draft_failures = self.failures_in_a_row = 0
        """How often the proposer raised when it drafted for this request: in all, and since the last draft."""
        self.overran = False
        """Whether the caches hold tokens of the last round that the request did not take."""
        self.paused = False
        self.pauses = self.rounds_before = 0
        """The number of pauses, and the rounds at the time of the last admission."""

    @classmethod
    def open(cls, request: Request, tokenizer: TokenizerWrapper | None) -> RequestState:
        """Return the state of a new request, with its own grammar and stop watcher. Raises their errors."""
        params = request.params
        grammar = params.grammar() if params.grammar else None
        stops = StopStrings(params.stop) if params.stop and tokenizer is not None else None
        watcher = params.stop_watcher() if params.stop_watcher else None
        decoder = IncrementalText(tokenizer) if tokenizer is not None and (stops or watcher) else None
        return cls(request, stops, grammar, watcher, decoder=decoder)

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
    def rounds_since(self) -> int:
        """Rounds since it was last admitted."""
        return self.rounds - self.rounds_before

    @property
    def may_draft(self) -> bool:
        return self.failures_in_a_row < MOST_DRAFT_FAILURES

    @property
    def room(self) -> int:
        """The maximum number of useful draft tokens in the next round."""
        room = 0 if self.rereads or self.pending else self.limit - len(self.tokens) - 1
        most = self.params.num_speculative_tokens
        return room if most is None else min(room, most)

    def texts(self, draft: Sequence[int]) -> Iterator[list[int]]:
        """Yield prompt and tokens, then the same list extended by one draft token each time (for logits processors)."""
        text = self.text
        yield text
        for token in draft:
            text.append(token)
            yield text

    def admit(self) -> None:
        """Leave the queue; the text is read next."""
        self.paused, self.rounds_before = False, self.rounds

    def read(self, positions: int) -> None:
        """Record that the caches hold this many positions of the text."""
        self.read_tokens = min(positions, len(self.prompt))

    def reuse(self, cached: int) -> None:
        self.cached_tokens = cached

    def pause(self) -> None:
        """Pause the request. It keeps its tokens, grammar, stop strings, seed and counters."""
        self.paused = True
        self.pauses += 1

    def take(self, tokens: Sequence[int], drafted: int, logprobs: Sequence[TokenLogprob] = ()) -> int:
        """Append a round's tokens, if any, up to the first that ends the request; return how many were taken."""
        if self.finish_reason or not tokens:
            self.overran = bool(tokens)
            return 0
        self.rounds, self.rereads = self.rounds + 1, False
        self.pending = self.pending and self.pending.after(tokens[0])
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
        self._count(drafted, accepted)
        return taken

    def fail(self, reason: str, refused: bool = False) -> None:
        """End with an error. refused: whether the request itself caused it."""
        if self.finish_reason is None:
            self.finish_reason, self.error, self.refused = "error", reason, refused

    def cut(self, by: str, reason: str | None = None) -> None:
        """End with the tokens so far, or with an error if there is a reason for one. by: see `cut_off`."""
        if self.finish_reason is None:
            self.cut_off = by
            self.finish_reason, self.error = ("length", None) if reason is None else ("error", reason)

    def fail_by_grammar(self, error: Exception) -> None:
        """End because the grammar raised an error. A ConfigError means that it became too complex."""
        self.fail(f"the grammar failed: {error}", refused=isinstance(error, ConfigError))

    def reread(self, without_draft: bool, pending: Pending | None) -> None:
        """Record that a draft led to NaN. `without_draft`: draft nothing next round. `pending`: its unjudged tokens."""
        self.rereads, self.pending = without_draft, self.pending or pending

    def draft_ended(self, failed: bool = False) -> None:
        """Count a draft, unless this request may not draft any more. failed: whether the proposer raised."""
        if self.may_draft:
            self.draft_failures += failed
            self.failures_in_a_row = self.failures_in_a_row + 1 if failed else 0

    def finish(self, reason: str) -> None:
        """End with the tokens so far, unless it already ended."""
        self.finish_reason = self.finish_reason or reason

    def output(self, tokenizer: TokenizerWrapper | None) -> Output:
        """Return the output so far. Without a tokenizer the text is empty."""
        tokens = self.tokens
        shown = tokens[:-1] if tokens and tokens[-1] in self.request.stop_ids else tokens
        text = tokenizer.decode(shown) if tokenizer is not None else ""
        text, stop = self.stops.cut(text) if self.stops else (text, None)
        return Output(
            text=text,
            tokens=tokens,
            finish_reason=self.finish_reason or "length",
            prompt_tokens=len(self.prompt),
            rounds=self.rounds,
            drafted=sum(self.drafted_by_position),
            accepted=sum(self.accepted_by_position),
            drafted_by_position=self.drafted_by_position,
            accepted_by_position=self.accepted_by_position,
            logprobs=self.logprobs if self.params.wants_logprobs else None,
            lossless=self.params.lossless,
            draft_failures=self.draft_failures,
            cached_tokens=self.cached_tokens,
            error=self.error,
            refused=self.refused,
            cut_off=self.cut_off,
            stop=stop,
        )

    def _add(self, token: int) -> None:
        ends = token in self.request.stop_ids
        if self.grammar is not None and not self._allowed(self.grammar, token, ends):
            return
        self.tokens.append(token)
        certain, open_end = self.decoder.add([token]) if self.decoder is not None else ("", "")
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

    def _allowed(self, grammar: Grammar, token: int, ends: bool) -> bool:
        """Advance the grammar and return whether the token is allowed. If no token is, the text ends before it."""
        try:
            if not ends and grammar.advance(token):
                return True
            mask = grammar.mask()
            if ends and mask[token].item():
                return True
            if mask.any().item():
                self.fail(f"the grammar rejected token {token}, which its own mask allowed")
            else:
                self.finish_reason = "stop"
        except Exception as e:  # a grammar may raise anything, and other rows must go on
            self.fail_by_grammar(e)
        return False

    def _count(self, drafted: int, accepted: int) -> None:
        new = max(0, drafted - len(self.drafted_by_position))
        self.drafted_by_position += [0] * new
        self.accepted_by_position += [0] * new
        for position in range(drafted):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted
