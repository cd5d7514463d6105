"""The progress of a request: its tokens, where they end, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import ConfigError
from eagle_mlx.request import Output, Request, TokenLogprob
from eagle_mlx.sampling_params import AsyncGrammar, Grammar, SamplingParams, StopWatcher
from eagle_mlx.text import StopStrings


@dataclass(frozen=True)
class Pending:
    """The draft tokens of one row that rejection has yet to judge, because the logits at their places were NaN.

    To drop them for what they say would bias the text.
    """

    tokens: Sequence[int]
    probs: mx.array | None
    """[k, V] float32, the distributions that the tokens were drawn from; None if they were chosen without chance."""

    def after(self, token: int) -> Pending | None:
        """Return what is still to be judged after the row has emitted `token`: nothing, if it is another one."""
        if token != self.tokens[0] or len(self.tokens) == 1:
            return None
        return Pending(self.tokens[1:], None if self.probs is None else self.probs[1:])


class RequestState:
    """A request on its way through the engine. Anybody may read it; only its own methods change it."""

    def __init__(
        self,
        request: Request,
        stops: StopStrings | None = None,
        grammar: Grammar | None = None,
        watcher: StopWatcher | None = None,
        tokens: Sequence[int] = (),
    ):
        """`stops`, `grammar` and `watcher` follow the tokens, and belong to this request alone."""
        self.request = request
        self.stops, self.grammar, self.watcher = stops, grammar, watcher
        self.tokens = list(tokens)
        self.logprobs: list[TokenLogprob] = []
        self.rounds = 0
        self.drafted_by_position: list[int] = []
        self.accepted_by_position: list[int] = []
        self.finish_reason: str | None = None
        """`stop`, `length`, `cancelled` or `error`; None while it decodes."""
        self.error: str | None = None
        self.refused = False
        """Whether the error is about what the request asked for, and not about the engine."""
        self.cut_off: str | None = None
        """What ended it though there was more to say, such as `time`."""
        self.cached_tokens = 0
        """Prompt tokens that an earlier request has left in the prefix cache."""
        self.read_tokens = 0
        """Prompt tokens in the caches, the cached ones included; updated after each chunk. Any thread may ask."""
        self.asked: list[int] | None = None
        """The draft that an AsyncGrammar has been asked about and has not answered."""
        self.slow = False
        """Whether its grammar's last answer was late."""
        self.rereads = False
        """Whether a draft read as NaN. Its next round drafts nothing, and tells whether the text itself does."""
        self.pending: Pending | None = None
        """Draft tokens that could not be judged because of NaN: plain rounds judge them, one each."""
        self.overran = False
        """Whether the caches hold more of the last round than was taken of it."""
        self.paused = False
        """Whether it waits to be resumed: its row was given to another request, or memory was short."""
        self.pauses = self.rounds_before = self.tokens_before = 0
        """How often it was paused; the rounds and tokens that it had when it was last admitted."""
        self._history = [*request.prompt, *tokens] if request.params.logits_processors else []

    @classmethod
    def open(cls, request: Request, tokenizer: TokenizerWrapper | None) -> RequestState:
        """Return the state of a new request, with a grammar and a stop watcher of its own if its params ask for them.

        Whatever these raise when they are made is raised.
        """
        params = request.params
        grammar = params.grammar() if params.grammar else None
        if isinstance(grammar, AsyncGrammar) and params.rule == "rejection":
            # A draft whose masks are late is dropped, and what it said decides what of the next one is judged.
            # Rejection sampling would then be biased. A coupled row draws by (seed, position) alone.
            request = replace(request, params=replace(params, acceptance="coupled", seed=request.seed))
        stops = StopStrings(params.stop, tokenizer) if params.stop and tokenizer is not None else None
        return cls(request, stops, grammar, params.stop_watcher() if params.stop_watcher else None)

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def limit(self) -> int:
        return self.request.limit

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def length(self) -> int:
        """Tokens in the caches: all but the newest."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def text(self) -> list[int]:
        """Prompt and tokens: all that is read when a paused request is resumed."""
        return [*self.request.prompt, *self.tokens]

    @property
    def leaves(self) -> bool:
        """Whether its row leaves the batch, because it has ended or is paused."""
        return self.finish_reason is not None or self.paused

    @property
    def rounds_since(self) -> int:
        """Rounds since it was last admitted."""
        return self.rounds - self.rounds_before

    @property
    def room(self) -> int:
        """Draft tokens that the next round has a use for."""
        room = 0 if self.rereads or self.pending else self.request.limit - len(self.tokens) - 1
        most = self.request.params.num_speculative_tokens
        return room if most is None else min(room, most)

    def texts(self, draft: Sequence[int]) -> Iterator[list[int]]:
        """For logits processors: yield prompt and tokens, then the same list with one draft token more each time."""
        text, length = self._history, len(self._history)
        try:
            yield text
            for token in draft:
                text.append(token)
                yield text
        finally:
            del text[length:]

    def admit(self) -> None:
        """Stop waiting: its text is read next."""
        self.paused, self.rounds_before, self.tokens_before = False, self.rounds, len(self.tokens)

    def read(self, positions: int) -> None:
        """Note that so many positions of its text are in the caches."""
        self.read_tokens = min(positions, len(self.request.prompt))

    def begin_with(self, cached: int) -> None:
        """Note that so many tokens of the prompt came from the prefix cache."""
        self.cached_tokens = cached

    def pause(self) -> None:
        """Wait to be resumed with the tokens that it has. Grammar, stop strings, seed and counts stay as they are."""
        self.paused = True
        self.pauses += 1

    def take(self, tokens: Sequence[int], drafted: int, logprobs: Sequence[TokenLogprob] = ()) -> int:
        """Take a round's tokens in order, up to the first that ends the row, and return how many; only they count.

        A row that sat the round out takes none.
        """
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
        self._count(drafted, min(taken, len(tokens) - 1))
        return taken

    def fail(self, reason: str, refused: bool = False) -> None:
        """End with an error, which is this row's alone. refused: whether what the request asked for cannot be had."""
        if self.finish_reason is None:
            self.finish_reason, self.error, self.refused = "error", reason, refused

    def cut(self, by: str, reason: str | None = None) -> None:
        """End with what it has, or with an error where there is a reason for one. by: as `cut_off`."""
        if self.finish_reason is None:
            self.cut_off = by
            self.finish_reason, self.error = ("length", None) if reason is None else ("error", reason)

    def fail_by_grammar(self, error: Exception) -> None:
        """End because the grammar raised; a ConfigError says that it has become too complex to follow."""
        self.fail(f"the grammar failed: {error}", refused=isinstance(error, ConfigError))

    def ask_grammar(self, draft: list[int]) -> None:
        """Have an AsyncGrammar begin to find the masks along a draft."""
        assert isinstance(self.grammar, AsyncGrammar)
        self.asked = draft
        try:
            self.grammar.ask(draft)
        except Exception as e:  # a grammar may raise anything, and no other row is concerned
            self.fail_by_grammar(e)

    def masks_are_late(self) -> None:
        self.slow = True

    def masks_came(self, draft: list[int]) -> list[int]:
        """Return the draft that they were asked for; they are late if it is another one than this."""
        asked, self.asked = self.asked or [], None
        self.slow = self.slow and asked != draft
        return asked

    def reread(self, without_draft: bool, pending: Pending | None) -> None:
        """A draft read as NaN. `without_draft`: the next round drafts nothing. `pending`: what was not judged of it."""
        self.rereads, self.pending = without_draft, self.pending or pending

    def finish(self, reason: str) -> None:
        """End with what it has, unless it has ended."""
        self.finish_reason = self.finish_reason or reason

    def close(self) -> None:
        """Let its grammar go, which may hold a process."""
        self.grammar = None

    def output(self, tokenizer: TokenizerWrapper | None) -> Output:
        """What it has come to so far; without a tokenizer the text is empty."""
        tokens = self.tokens
        shown = tokens[:-1] if tokens and tokens[-1] in self.request.stop_ids else tokens
        text = tokenizer.decode(shown) if tokenizer is not None else ""
        text, stop = self.stops.cut(text) if self.stops else (text, None)
        return Output(
            text=text,
            tokens=tokens,
            finish_reason=self.finish_reason or "length",
            prompt_tokens=len(self.request.prompt),
            rounds=self.rounds,
            drafted=sum(self.drafted_by_position),
            accepted=sum(self.accepted_by_position),
            drafted_by_position=self.drafted_by_position,
            accepted_by_position=self.accepted_by_position,
            logprobs=self.logprobs if self.request.params.wants_logprobs else None,
            lossless=self.request.params.lossless,
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
        if self.request.params.logits_processors:
            self._history.append(token)
        if ends or (self.stops is not None and self.stops.complete(token)) or self._is_last(token):
            self.finish_reason = self.finish_reason or "stop"
        elif len(self.tokens) >= self.request.limit:
            self.finish_reason = "length"

    def _is_last(self, token: int) -> bool:
        """Whether the watcher ends the text with this token. Fails this request alone if the watcher raises."""
        try:
            return self.watcher is not None and self.watcher(token)
        except Exception as e:  # a watcher is the caller's code and may raise anything
            self.fail(f"the stop watcher failed: {e}")
            return True

    def _allowed(self, grammar: Grammar, token: int, ends: bool) -> bool:
        """Move the grammar on; where nothing is allowed any more, the text ends before the token."""
        try:
            if not ends and grammar.advance(token):
                return True
            mask = grammar.mask()
            if ends and mask[token].item():
                return True
            if mask.any().item():
                self.fail(f"the grammar does not take token {token}, though the text may not end there")
            else:
                self.finish_reason = "stop"
        except Exception as e:  # whatever a grammar raises is no other row's trouble
            self.fail_by_grammar(e)
        return False

    def _count(self, drafted: int, accepted: int) -> None:
        new = max(0, drafted - len(self.drafted_by_position))
        self.drafted_by_position += [0] * new
        self.accepted_by_position += [0] * new
        for position in range(drafted):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted
