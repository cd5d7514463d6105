"""What is asked of an engine, and what it gives back: a request, its output, the pieces of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from eagle_mlx.errors import PromptError
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Raw text, token ids, or messages that go through the target's chat template."""


@dataclass(frozen=True)
class Request:
    """A request as it was given; its progress is in a `RequestState`."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int
    """Tokens that it may emit."""
    stop_ids: frozenset[int]
    boundaries: tuple[int, ...] = ()
    """Lengths of beginnings of the prompt that later prompts may share, apart from the whole prompt."""
    client: str = ""
    """Waiting clients take turns. All requests with the empty name belong to one client."""
    namespace: str = ""
    """It reuses, and leaves, texts in the prefix cache of this namespace alone."""


@dataclass(frozen=True)
class TokenLogprob:
    """What the target itself thought of an emitted token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens at that position and their log probabilities, the likeliest first."""


@dataclass(frozen=True)
class Output:
    """What became of one request."""

    text: str
    tokens: list[int]
    """With the stop token, or the one that completed a stop string, where one was emitted."""
    finish_reason: str
    """`stop`, `length`, `cancelled` or `error`."""
    prompt_tokens: int
    rounds: int
    """Target forwards that emitted tokens."""
    drafted: int
    accepted: int
    """Draft tokens that were accepted and emitted."""
    drafted_by_position: list[int]
    """Rounds in which a draft token stood at each position."""
    accepted_by_position: list[int]
    """Rounds in which the draft token at each position was accepted."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of the tokens, where the request asked."""
    lossless: bool = True
    """False where the request chose `threshold` acceptance, by which drafts change the text."""
    cached_tokens: int = 0
    """Prompt tokens that were not read again, because an earlier request began with them."""
    error: str | None = None
    """What went wrong with this request alone, where the finish reason is `error`."""
    refused: bool = False
    """Whether that is about what the request asked for, such as a grammar too complex to follow."""
    cut_off: str | None = None
    """What ended it though there was more to say, such as `time`."""
    stop: str | None = None
    """The stop string that ended the text, which does not hold it."""

    @property
    def acceptance_length(self) -> float:
        """τ: tokens emitted per target forward, bonus tokens included; 0 where nothing was decoded."""
        return len(self.tokens) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Chunk:
    """What one round added to a streamed text."""

    text: str
    """Text that is certain: half a character waits for the rest, and so does what may become a stop string."""
    tokens: list[int]
    output: Output | None
    """The whole, with the last chunk."""


def make_request(
    target: Target,
    prompt: Prompt,
    params: SamplingParams,
    boundaries: Sequence[int] = (),
    client: str = "",
    namespace: str = "",
) -> Request:
    """Encode and check a request; the other arguments are as in `Request`.

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
    if params.stop and target.tokenizer is None:
        raise PromptError("this target has no tokenizer; give stop_token_ids instead of stop")
    ignores_eos = params.ignore_eos and params.grammar is None
    return Request(
        prompt=tokens,
        params=params,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        limit=min(params.max_tokens, context - len(tokens)),
        stop_ids=frozenset(params.stop_token_ids) | (frozenset() if ignores_eos else target.eos_token_ids),
        boundaries=tuple(boundaries),
        client=client,
        namespace=namespace,
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
