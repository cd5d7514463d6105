"""Sampling parameters of a request, and its stop conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from eagle_mlx.errors import ConfigError, require
from eagle_mlx.setting import Limit

if TYPE_CHECKING:
    import mlx.core as mx

Acceptance = Literal["auto", "coupled", "rejection", "threshold"]
Rule = Literal["greedy", "coupled", "rejection", "threshold"]
Drafter = Literal["model", "ngrams", "none"]
"""A way to draft: the proposer's head or draft model, its n-grams, or nothing. Only `none` concerns other proposers."""

COLDEST = 1e-5  # lower temperatures are greedy, since dividing by them would overflow float32
MOST_LOGPROBS = 20

_MOST_ID = 2**31 - 1

_PENALTY = (float, -100, 100, "a number from -100 to 100 (0: off)")
_RANGES: Mapping[str, tuple[type[float], float, float, str]] = {
    "temperature": (float, 0, 1e6, "a number from 0 (greedy) to 1e6"),
    "top_k": (int, 0, _MOST_ID, "an integer of at least 0 (0 keeps all)"),
    "top_p": (float, math.ulp(0), 1, "a number above 0 and at most 1 (1 keeps all)"),
    "min_p": (float, 0, 1, "a number from 0 (keeps all) to 1"),
    "threshold": (float, 1e-6, 1, "a probability, a number above 0 and at most 1"),
    "max_tokens": (int, 1, math.inf, "an integer of at least 1"),
    "num_speculative_tokens": (int, 0, _MOST_ID, "an integer of at least 0, or None"),
    "seed": (int, -(2**63), 2**64 - 1, "an integer of 64 bits, or None"),
    "repetition_penalty": (float, 1e-3, 1e3, "a number from 0.001 to 1000"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "top_logprobs": (int, 0, MOST_LOGPROBS, f"an integer from 0 to {MOST_LOGPROBS}"),
    "logprobs": (bool, 0, 1, "True or False (top_logprobs sets how many)"),
    **dict.fromkeys(("ignore_eos", "memory", "learn"), (bool, 0, 1, "True or False")),
}
"""Types, limits and descriptions of the numbers and bools in `SamplingParams`."""

LogitsProcessor = Callable[[list[int], "mx.array"], "mx.array"]
"""Takes the prompt with the text so far and logits [1, V]; returns logits [1, V], as in mlx-lm.

It is called for every verified position, including those after rejected draft tokens, so it must not count its calls.
It must neither keep nor change the list.
"""


StopWatcher = Callable[[int, str], bool]
"""Called with each accepted token in turn, and the text that is certain with it; returning true ends the text."""


class Grammar(Protocol):
    """The tokens allowed next in one row. Matchers of llguidance and xgrammar need three lines to adapt.

    Between rounds, it has seen the row's accepted tokens. In a round, it advances over the draft, returns a mask at
    each position, and is rolled back, because matchers are expensive to copy. If it has an attribute `free_tokens`, it
    is not asked for masks while this is above 128: the next tokens may then be any, as many as this says.
    """

    def mask(self) -> mx.array:
        """Return the tokens allowed next, [V] bool, with end tokens if the text may end; all false if it must end."""

    def advance(self, token: int) -> bool:
        """Add a token; return False, without a change, if it is not allowed. Tokens that end the text are not added."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""

    def forced(self, most: int) -> Sequence[int]:
        """Return up to `most` tokens of the text that must follow, as it is likely to be written; empty if unknown.
        They are drafts, so other tokens may spell it. The grammar must not change."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Raises ConfigError, with the field's name, if a value is out of range.

    The target's logits pass through repetition penalty, frequency and presence penalty, logit bias, logits processors
    and grammar, in this order. Each sees the same text as in plain decoding. Then come temperature, top_k, top_p and
    min_p, each applied to the remaining tokens. Ties with the last token kept are kept too.
    """

    temperature: float = 0.0  # 0 is greedy: the argmax over the whole vocabulary
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all, 1 is greedy
    top_p: float = 1.0  # keep the fewest most likely tokens whose probabilities reach this sum; 1 keeps all
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the most likely one; 0 keeps all
    seed: int | None = None
    """With coupled acceptance, the same seed gives the same tokens in any batch and at any draft length."""
    max_tokens: int = 256  # maximum number of tokens to generate
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, in addition to the model's own end-of-sequence tokens."""
    acceptance: Acceptance = "auto"
    """The rule that accepts drafts when sampling. `auto` is coupled with a seed, rejection without; both are lossless.

    `threshold` is **not** lossless: it keeps draft tokens that the target finds likely enough.
    """
    num_speculative_tokens: int | None = None
    """Maximum number of draft tokens per round, if lower than the policy's; 0 drafts none."""
    drafter: Drafter | None = None
    """The way to draft for this request; by default `Engine.drafter`. The text is the same."""
    memory: bool = True
    """Whether earlier texts of the request's namespace may draft for it, and it for later ones, if there is a memory.
    The text is the same."""
    learn: bool = True
    """Whether a head may learn from the text, if the engine collects texts (`Engine.collector`)."""
    threshold: float = 0.3
    """Minimum probability of a draft token for `threshold` acceptance. Greedy decoding accepts only the argmax."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token. A text with a grammar still ends there."""
    stop: tuple[str, ...] = ()
    """Strings that end the text, which is cut before the earliest. The token that completes it is the last."""
    stop_watcher: Callable[[], StopWatcher] | None = None
    """Creates a watcher that can end the text. A watcher that raises ends its own request with an error."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or text (CTRL, 2019); 1 is off."""
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the generated text
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time it occurs in the generated text
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to the logits of these tokens
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Callables on the host. They cost a second sync in each round of the batch."""
    grammar: Callable[[], Grammar] | None = None
    """Creates the grammar that the text must follow. Costs a second sync per round, as processors do.

    A grammar that contradicts its own mask ends the request with an error.
    """
    logprobs: bool = False  # report each token's log probability, from the target's unmodified logits
    top_logprobs: int = 0  # number of most likely tokens to report at every position; implies logprobs

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        kinds = {"stop": tuple, "stop_token_ids": tuple, "logits_processors": tuple, "logit_bias": dict}
        for name, kind in kinds.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except (TypeError, ValueError):
                raise _error(name, f"a {kind.__name__}", value) from None
        self._check_numbers()
        if not all(isinstance(text, str) and text for text in self.stop):
            raise _error("stop", "non-empty strings", self.stop)
        for processor in self.logits_processors:
            require("logits_processors", processor, Callable, "callables")
        for name in ("grammar", "stop_watcher"):
            require(name, getattr(self, name), Callable | None, f"a callable that creates a {name.split('_')[-1]}")
        if self.acceptance not in get_args(Acceptance):
            raise _error("acceptance", f"one of {', '.join(get_args(Acceptance))}", self.acceptance)
        if self.drafter not in (None, *get_args(Drafter)):
            raise _error("drafter", f"one of {', '.join(get_args(Drafter))}, or None", self.drafter)

    def _check_numbers(self) -> None:
        for name, (kind, least, most, meaning) in _RANGES.items():
            if (value := getattr(self, name)) is not None or name not in ("seed", "num_speculative_tokens"):
                require(name, value, kind, meaning, least, most)
        for token in self.stop_token_ids:
            require("stop_token_ids", token, int, "token ids, integers of at least 0", 0, _MOST_ID)
        for token, bias in self.logit_bias.items():
            require("logit_bias", token, int, "a number for each token id, ids of at least 0", 0, _MOST_ID)
            require("logit_bias", bias, float, "numbers from -10000 to 10000 by token id", -1e4, 1e4)

    @property
    def rule(self) -> Rule:
        """The acceptance rule for this request's drafts."""
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
    def wants_logprobs(self) -> bool:
        return self.logprobs or self.top_logprobs > 0


def limit_of(name: str) -> Limit:
    """Return the limit of a field of `SamplingParams`, for settings that fill it."""
    _, least, most, meaning = _RANGES[name]
    return Limit(lambda value: least <= value <= most, f"must be {meaning}; got {{}}")


def _error(name: str, meaning: str, value: object) -> ConfigError:
    return ConfigError(f"{name} must be {meaning}; got {value!r}", name)
