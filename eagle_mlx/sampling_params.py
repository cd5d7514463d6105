"""What a request may ask of the tokens that are drawn for it, and of where they end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args, runtime_checkable

import mlx.core as mx

from eagle_mlx.errors import ConfigError

Acceptance = Literal["auto", "coupled", "rejection", "threshold"]
Rule = Literal["greedy", "coupled", "rejection", "threshold"]

COLDEST = 1e-5
"""Temperatures below this one are greedy: dividing by them would leave the range of float32."""
MOST_LOGPROBS = 20

_MOST_ID = 2**31 - 1

LogitsProcessor = Callable[[list[int], mx.array], mx.array]
"""(prompt and text so far, logits [1, V]) -> logits [1, V], as in mlx-lm.

It is called for every position that is verified, also behind draft tokens that are then refused, so it must not count
its calls; it must neither keep nor change the list.
"""


StopWatcher = Callable[[int], bool]
"""Takes each token of a text in turn, accepted ones alone; true ends the text with this token."""


class Grammar(Protocol):
    """Which tokens may come next in one row's text; matchers of llguidance and xgrammar take three lines to adapt.

    Between rounds it stands behind the row's accepted tokens. Within one it is advanced over the draft, asked at each
    position, and rolled back. (States as values would need no rolling back, but a matcher's state is expensive to copy
    and cheap to undo.)
    """

    def mask(self) -> mx.array:
        """[V] bool, the tokens allowed next; end-of-sequence tokens where the text may end, none where it must."""
        ...

    def advance(self, token: int) -> bool:
        """Take a token; False, without a change, where it is not allowed. A token that ends the text is not passed."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens taken."""
        ...


@runtime_checkable
class AsyncGrammar(Grammar, Protocol):
    """A grammar that finds its masks elsewhere, in a thread or a process, while the target reads the draft.

    A row whose masks are late sits the round out, and the others go on. Between `ask` and an answer that is not None
    nothing else is called.
    """

    def ask(self, draft: Sequence[int]) -> None:
        """Begin to find the masks along a draft, which holds no token that ends the text; wait for nothing."""
        ...

    def answer(self, seconds: float) -> list[mx.array] | None:
        """The masks at the draft's positions, each [V] bool, up to its first illegal token; the grammar stands where it
        stood. None where they are not there after so many seconds. It may be called again either way. An answer without
        masks, or a mask of another shape, ends the request with an error.
        """
        ...


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens drawn. Raises ConfigError, with the field's name, for a value out of range.

    The target's logits go through repetition penalty, frequency and presence penalty, logit bias, logits processors
    and grammar, in this order, each seeing the text that plain decoding would have had at that position. Then come
    the filters, in the order temperature, top_k, top_p, min_p, each applied to what the one before it left; tokens that
    tie with the last one kept are kept too.
    """

    temperature: float = 0.0
    """0 is greedy: the argmax over the whole vocabulary."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all, 1 is greedy."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum; 1 keeps all."""
    min_p: float = 0.0
    """Keep the tokens at least this fraction as likely as the likeliest; 0 keeps all."""
    seed: int | None = None
    """With coupled acceptance the same seed gives the same tokens, in any company and at any draft length."""
    max_tokens: int = 256
    """Tokens to generate at most."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, beside the model's own end-of-sequence tokens."""
    acceptance: Acceptance = "auto"
    """How drafts are accepted when sampling; auto: coupled with a seed, rejection without. Both are lossless.

    With an `AsyncGrammar` rejection becomes coupled, because drafts may be dropped while masks are late. A request
    without a seed gets a random one. That costs 7 to 9 % of a model's accepted drafts, and none of those of n-grams
    (simulated over peaked distributions of 1,000 tokens).

    `threshold` is **not**: it keeps every draft token that the target finds likely enough, so that the text follows the
    proposer as well, and depends on what it drafts.
    """
    num_speculative_tokens: int | None = None
    """Draft tokens a round at most, fewer than the policy's number where that is higher; 0 drafts none."""
    ngrams_only: bool = False
    """Let n-grams alone draft for this request if the proposer has them and a model. The text stays the same."""
    threshold: float = 0.3
    """The least probability of a draft token that `threshold` acceptance keeps; where greedy, only the argmax is."""
    ignore_eos: bool = False
    """Generate on after an end-of-sequence token. Nothing can follow one in a text with a grammar: it ends anyway."""
    stop: tuple[str, ...] = ()
    """Strings that end the text, which is cut before the earliest; the token that completes one is the last."""
    stop_watcher: Callable[[], StopWatcher] | None = None
    """Makes what watches the text for its end. It sees no draft, so it costs no wait for the device.

    The text keeps the token that ends it. A watcher that raises ends its own request with an error.
    """
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the text (CTRL, 2019); 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the generated text."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for every time that it is in the generated text."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Callables on the host. They cost a second wait for the device in each round of the batch."""
    grammar: Callable[[], Grammar] | None = None
    """Makes the grammar that the text must follow. Costs a second wait a round, as processors do.

    The finish reason is `stop` only where the grammar allowed the text to end; a grammar that contradicts its own mask
    ends the row with an error.
    """
    logprobs: bool = False
    """Report the target's own log probability of every token: of its logits as they are, whatever stands above."""
    top_logprobs: int = 0
    """Report so many of the target's likeliest tokens at every position too; implies logprobs."""

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "logits_processors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        self._check_numbers()
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop must be strings that are not empty; got {self.stop!r}")
        if not all(callable(each) for each in (*self.logits_processors, self.grammar or dict)):
            raise ConfigError("logits_processors must be callables, and grammar one that makes a grammar")
        if not callable(self.stop_watcher or dict):
            raise ConfigError("stop_watcher must be a callable that makes a watcher")
        if self.acceptance not in get_args(Acceptance):
            raise ConfigError(f"acceptance must be one of {', '.join(get_args(Acceptance))}; got {self.acceptance!r}")

    def _check_numbers(self) -> None:
        _require("temperature", self.temperature, float, 0, 1e6, "a number from 0 (greedy) to 1e6")
        _require("top_k", self.top_k, int, 0, _MOST_ID, "an integer of at least 0 (0 keeps all)")
        _require("top_p", self.top_p, float, math.ulp(0), 1, "a number above 0 and at most 1 (1 keeps all)")
        _require("min_p", self.min_p, float, 0, 1, "a number from 0 (keeps all) to 1")
        _require("threshold", self.threshold, float, 1e-6, 1, "a probability, a number above 0 and at most 1")
        _require("max_tokens", self.max_tokens, int, 1, math.inf, "an integer of at least 1")
        if self.num_speculative_tokens is not None:
            _require(
                "num_speculative_tokens", self.num_speculative_tokens, int, 0, _MOST_ID, "an integer from 0, or None"
            )
        if self.seed is not None:
            _require("seed", self.seed, int, -(2**63), 2**64 - 1, "an integer of 64 bits, or None")
        for token in self.stop_token_ids:
            _require("stop_token_ids", token, int, 0, _MOST_ID, "token ids, integers of at least 0")
        _require(
            "repetition_penalty", self.repetition_penalty, float, 1e-3, 1e3, "a number from 0.001 to 1000 (1: off)"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), float, -100, 100, "a number from -100 to 100 (0: off)")
        for token, bias in self.logit_bias.items():
            _require("logit_bias", token, int, 0, _MOST_ID, "a number for each token id, ids of at least 0")
            _require("logit_bias", bias, float, -1e4, 1e4, "numbers from -10000 to 10000 by token id")
        _require("top_logprobs", self.top_logprobs, int, 0, MOST_LOGPROBS, f"an integer from 0 to {MOST_LOGPROBS}")

    @property
    def rule(self) -> Rule:
        """The rule by which this request's drafts are accepted."""
        if self.temperature < COLDEST or self.top_k == 1:
            return "greedy"
        if self.acceptance == "auto":
            return "rejection" if self.seed is None else "coupled"
        return self.acceptance

    @property
    def lossless(self) -> bool:
        """Whether the tokens follow the target's own distribution, whatever is drafted."""
        return self.rule != "threshold"

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_host(self) -> bool:
        """Whether the host must see the draft before it is verified."""
        return bool(self.logits_processors) or self.grammar is not None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs or self.top_logprobs > 0


def _require(name: str, value: float, kind: type[int] | type[float], least: float, most: float, meaning: str) -> None:
    kinds = (int,) if kind is int else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} must be {meaning}; got {value!r}")
