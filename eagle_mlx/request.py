"""A request: its prompt, its tokens, where they end, and what is counted of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.sampling_params import AsyncGrammar, Grammar, SamplingParams, StopWatcher
from eagle_mlx.target import Target
from eagle_mlx.text import IncrementalText

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Raw text, token ids, or messages that go through the target's chat template."""


@dataclass(frozen=True)
class TokenLogprob:
    """What the target itself thought of an emitted token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens at that position and their log probabilities, the likeliest first."""


class StopStrings:
    """Watches a text, token by token, for the first of some strings; the work per token does not grow with the text."""

    def __init__(self, strings: Sequence[str], tokenizer: TokenizerWrapper):
        self.strings = strings
        self._texts = IncrementalText(tokenizer)
        self._reach = max(map(len, strings)) - 1
        self._tail = ""
        """The end of the text, as far as a string that is not complete can reach back."""

    @property
    def window(self) -> int:
        """Tokens that the next one is decoded with."""
        return self._texts.length

    def complete(self, token: int) -> bool:
        """Take the next token; whether a string is in the text now."""
        certain, open_end = self._texts.add([token])
        seen = self._tail + certain
        self._tail = seen[len(seen) - min(self._reach, len(seen)) :]
        return any(text in seen + open_end for text in self.strings)

    def cut(self, text: str) -> tuple[str, str | None]:
        """The text up to the earliest string, and that string; of several there, the first that was given."""
        found = [(at, index) for index, string in enumerate(self.strings) if (at := text.find(string)) >= 0]
        if not found:
            return text, None
        at, index = min(found)
        return text[:at], self.strings[index]


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


@dataclass(eq=False)
class Request:
    """A request and its place in the decoding."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int
    """Tokens that it may emit."""
    stop_ids: frozenset[int]
    stops: StopStrings | None = None
    grammar: Grammar | None = None
    """Stands behind the tokens."""
    watcher: StopWatcher | None = None
    """Has seen the tokens."""
    boundaries: tuple[int, ...] = ()
    """Tokens of the prompt that later prompts may begin with, where there is more to keep than at its end."""
    client: str = ""
    """Who asks: clients take turns where requests wait. Those of the empty name are one client."""
    namespace: str = ""
    """Whose texts in the prefix cache it may go on from, and whose its own text becomes. Those of the empty name share.
    """
    asked: list[int] | None = None
    """The draft that an AsyncGrammar has been asked about and has not answered."""
    slow: bool = False
    """Whether its grammar's last answer was late."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    rounds: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """`stop`, `length`, `cancelled` or `error`; None while it decodes."""
    error: str | None = None
    refused: bool = False
    """Whether the error is about what the request asked for, and not about the engine."""
    cached_tokens: int = 0
    """Prompt tokens that an earlier request has left in the prefix cache."""
    read_tokens: int = 0
    """Prompt tokens that are in the caches, those among them; counted a chunk at a time. Any thread may ask."""
    cut_off: str | None = None
    """What ended it though there was more to say, such as `time`."""
    rereads: bool = False
    """Whether a draft read as NaN. Its next round drafts nothing, and tells whether the text itself does."""
    pending: Pending | None = None
    """Draft tokens that could not be judged because of NaN: plain rounds judge them, one each."""
    overran: bool = False
    """Whether the caches hold more of the last round than was taken of it."""
    paused: bool = False
    """Whether it waits to be resumed: its row was given to another request, or memory was short."""
    pauses: int = 0
    rounds_before: int = 0
    """Rounds that it had when it was last admitted."""
    tokens_before: int = 0
    """Tokens that it had then."""
    history: list[int] = field(default_factory=list)
    """Prompt and tokens, kept for logits processors alone."""

    def __post_init__(self) -> None:
        if self.params.logits_processors:
            self.history = [*self.prompt, *self.tokens]

    @property
    def length(self) -> int:
        """Tokens in the caches: all but the newest."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def text(self) -> list[int]:
        """Prompt and tokens: all that is read when a paused request is resumed."""
        return [*self.prompt, *self.tokens]

    @property
    def leaves(self) -> bool:
        """Whether its row leaves the batch, because it has ended or is paused."""
        return self.finish_reason is not None or self.paused

    @property
    def rounds_since(self) -> int:
        """Rounds since it was last admitted."""
        return self.rounds - self.rounds_before

    def pause(self) -> None:
        """Wait to be resumed with the tokens that it has. Grammar, stop strings, seed and counts stay as they are."""
        self.paused = True
        self.pauses += 1

    def admit(self) -> None:
        """Stop waiting: its text is read next."""
        self.paused, self.rounds_before, self.tokens_before = False, self.rounds, len(self.tokens)

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

    @property
    def room(self) -> int:
        """Draft tokens that the next round has a use for."""
        room = 0 if self.rereads or self.pending else self.limit - len(self.tokens) - 1
        most = self.params.num_speculative_tokens
        return room if most is None else min(room, most)

    def _add(self, token: int) -> None:
        ends = token in self.stop_ids
        if self.grammar is not None and not self._allowed(self.grammar, token, ends):
            return
        self.tokens.append(token)
        if self.params.logits_processors:
            self.history.append(token)
        if ends or (self.stops is not None and self.stops.complete(token)) or self._is_last(token):
            self.finish_reason = self.finish_reason or "stop"
        elif len(self.tokens) >= self.limit:
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


def make_request(target: Target, prompt: Prompt, params: SamplingParams, boundaries: Sequence[int] = ()) -> Request:
    """A row that has not been decoded yet. `boundaries`: as in `Request`.

    Raises PromptError for a prompt that is empty or longer than the target's context, boundaries outside of it, or
    params that the target cannot serve.
    """
    tokens = encode(target, prompt)
    context = target.context_length
    if not tokens:
        raise PromptError("a prompt is empty; give at least one token")
    if len(tokens) >= context:
        raise PromptError(
            f"a prompt of {len(tokens)} tokens does not fit the target's context of {context}; shorten it"
        )
    if not (0 <= min(tokens) and max(tokens) < target.vocab_size):
        raise PromptError(f"a prompt holds a token id outside the target's vocabulary of {target.vocab_size}")
    if max(params.logit_bias, default=0) >= target.vocab_size:
        raise PromptError(f"logit_bias names a token id outside the target's vocabulary of {target.vocab_size}")
    if outside := [boundary for boundary in boundaries if not 0 <= boundary <= len(tokens)]:
        raise PromptError(f"boundaries names {outside[0]}, but the prompt has {len(tokens)} tokens")
    goes_on = params.ignore_eos and params.grammar is None
    seed = secrets.randbits(63) if params.seed is None else params.seed
    grammar = params.grammar() if params.grammar else None
    if isinstance(grammar, AsyncGrammar) and params.rule == "rejection":
        # A draft whose masks are late is dropped, and what it said decides what of the next one is judged. Rejection
        # sampling would then be biased. A coupled row draws by (seed, position) alone, whatever is drafted.
        params = replace(params, acceptance="coupled", seed=seed)
    return Request(
        prompt=tokens,
        params=params,
        seed=seed,
        limit=min(params.max_tokens, context - len(tokens)),
        stop_ids=frozenset(params.stop_token_ids) | (frozenset() if goes_on else target.eos_token_ids),
        stops=_stops(target, params),
        grammar=grammar,
        watcher=params.stop_watcher() if params.stop_watcher else None,
        boundaries=tuple(boundaries),
    )


def encode(target: Target, prompt: Prompt) -> list[int]:
    """The prompt's token ids. Raises PromptError for text where there is no tokenizer."""
    if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
        return list(cast(Sequence[int], prompt))
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise PromptError("this target has no tokenizer; give prompts as lists of token ids")
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    return list(tokenizer.apply_chat_template(list(prompt), tokenize=True, add_generation_prompt=True))


def _stops(target: Target, params: SamplingParams) -> StopStrings | None:
    if not params.stop:
        return None
    if target.tokenizer is None:
        raise PromptError("this target has no tokenizer; give stop_token_ids instead of stop")
    return StopStrings(params.stop, target.tokenizer)
