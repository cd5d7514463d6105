"""Prompts and what is asked of their answers, made into rows or refused before anything is decoded."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from eagle_mlx.errors import PromptError
from eagle_mlx.params import SamplingParams
from eagle_mlx.row import Row, StopStrings
from eagle_mlx.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Raw text, token ids, or messages that go through the target's chat template."""


def make_row(target: Target, prompt: Prompt, params: SamplingParams) -> Row:
    """A row that has not been decoded yet.

    Raises PromptError for a prompt that is empty or longer than the target's context, or params that the target cannot
    serve.
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
    goes_on = params.ignore_eos and params.grammar is None
    return Row(
        prompt=tokens,
        params=params,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        limit=min(params.max_tokens, context - len(tokens)),
        stop_ids=frozenset(params.stop_token_ids) | (frozenset() if goes_on else target.eos_token_ids),
        stops=_stops(target, params),
        grammar=params.grammar() if params.grammar else None,
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
    return list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True))


def _stops(target: Target, params: SamplingParams) -> StopStrings | None:
    if not params.stop:
        return None
    if target.tokenizer is None:
        raise PromptError("this target has no tokenizer; give stop_token_ids instead of stop")
    return StopStrings(params.stop, target.tokenizer)
