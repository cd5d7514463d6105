"""Requests to the engine, their outputs, and the chunks of a stream."""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from numbers import Integral
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from eagle_mlx.errors import PromptError, require
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.vision.images import ImageLimits, take_images
from eagle_mlx.vision.spans import ImagePrompt, ImageSpan, placed

if TYPE_CHECKING:
    from eagle_mlx.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Raw text, token ids, or messages that go through the target's chat template, perhaps with images."""


@dataclass(frozen=True)
class Request:
    """A request as submitted. `RequestState` tracks its progress."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int  # maximum number of tokens to generate
    stop_ids: frozenset[int]
    boundaries: tuple[int, ...] = ()
    """Lengths of prompt prefixes that later prompts may share, in addition to the whole prompt."""
    client: str = ""
    """Clients take turns. All requests with an empty name belong to one client."""
    namespace: str = ""  # the request shares prefix cache entries only within this namespace
    conversation: str = ""
    """The same for all turns of a conversation, such as its first messages; if it is empty, the prompt takes its place.
    """
    images: tuple[ImageSpan, ...] = ()  # in order


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log probability of an emitted token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens at that position with their log probabilities, most likely first."""


@dataclass(frozen=True)
class Output:
    """The result of one request."""

    text: str
    tokens: list[int]  # includes the stop token, or the token that completed a stop string, if there is one
    finish_reason: str  # `stop`, `length`, `cancelled` or `error`; empty before the end
    prompt_tokens: int
    rounds: int  # target forwards that emitted tokens
    drafted: int
    accepted: int  # draft tokens that were accepted and emitted
    drafted_by_position: list[int]  # rounds that had a draft token at each position
    accepted_by_position: list[int]  # rounds in which the draft token at each position was accepted
    logprobs: list[TokenLogprob] | None = None  # one per token, if requested
    lossless: bool = True  # false if the request chose `threshold` acceptance, which lets drafts change the text
    forced: int = 0  # accepted tokens that the grammar forced, or guesses between; not among `drafted` and `accepted`
    draft_failures: int = 0
    """The number of drafts in which the proposer raised. After three in a row, the request decodes plainly."""
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None  # the error message, if the finish reason is `error`
    refused: bool = False  # whether the request itself caused the error, such as a grammar that is too complex
    cut_off: str | None = None  # what cut the text off early, such as `time`
    stop: str | None = None
    """The stop string that ended the text. The text does not include it."""

    @property
    def acceptance_length(self) -> float:
        """τ: tokens emitted per target forward, including bonus tokens; 0 if nothing was decoded."""
        return len(self.tokens) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Chunk:
    """The part of a streamed text that one round added."""

    text: str
    """Final text. Incomplete characters and possible beginnings of stop strings are held back."""
    tokens: list[int]
    from_draft: bytes  # A byte for each token: 1 if it is an accepted draft token
    output: Output | None  # the complete output; only in the last chunk


def draft_runs(from_draft: bytes | bytearray) -> list[tuple[slice, bool]]:
    """Return the runs of accepted draft tokens and of the target's own in a chunk, in order, and which are drafted.

    A chunk without tokens has one empty run.
    """
    runs = [list(run) for _, run in groupby(enumerate(from_draft), key=itemgetter(1))]
    return [(slice(run[0][0], run[-1][0] + 1), bool(run[0][1])) for run in runs] or [(slice(0, 0), False)]


def is_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return whether this is one prompt, and not a list of prompts."""
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    return not is_list or (len(prompts) > 0 and isinstance(prompts[0], Integral | Mapping))


def make_request(
    target: Target, prompt: Prompt | ImagePrompt, params: SamplingParams, boundaries: Sequence[int] = (), **names: str
) -> Request:
    """Encode and check a request. `names`: client, namespace and conversation (`Request`).

    Raises PromptError if the prompt is empty or does not fit the target's context, if a boundary is outside the prompt,
    or if the target does not support the params.
    """
    require("params", params, SamplingParams, "em.SamplingParams, such as em.SamplingParams(max_tokens=100)")
    for name, text in names.items():
        require(name, text, str, "text")
    prompt = prompt if isinstance(prompt, ImagePrompt) else read_prompt(target, prompt)
    tokens = prompt.tokens
    context = target.context_length
    if not tokens:
        raise PromptError("the prompt is empty; give at least one token")
    if len(tokens) >= context:
        raise PromptError(
            f"a prompt of {len(tokens)} tokens does not fit the target's context of {context}; shorten it"
        )
    if not (0 <= min(tokens) and max(tokens) < target.vocab_size):
        raise PromptError(f"the prompt has a token id outside the target's vocabulary of {target.vocab_size}")
    if max(params.logit_bias, default=0) >= target.vocab_size:
        problem = f"has a token id outside the target's vocabulary of {target.vocab_size}"
        raise PromptError(f"logit_bias {problem}", "logit_bias")
    if prompt.images and prompt.images[-1].end >= len(tokens):
        raise PromptError("a prompt cannot end with an image; let text follow it")
    require("boundaries", boundaries, Sequence, "lengths of beginnings of the prompt")
    if outside := [at for at in boundaries if not (isinstance(at, int) and 0 <= at <= len(tokens))]:
        raise PromptError(f"boundary {outside[0]} is outside the prompt of {len(tokens)} tokens")
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
        images=prompt.images,
        **names,
    )


def encode(target: Target, prompt: Prompt) -> list[int]:
    """Return the prompt's token ids. Raises PromptError as `read_prompt` does."""
    return read_prompt(target, prompt).tokens


def read_prompt(target: Target, prompt: Prompt) -> ImagePrompt:
    """Return the prompt's token ids and images.

    Raises PromptError if it is none of these kinds, for text if the target has no tokenizer, if the chat template
    refuses the messages, or if an image cannot be read.
    """
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    if is_list and all(isinstance(token, Integral) for token in prompt):
        return ImagePrompt(list(map(int, cast(Sequence[int], prompt))), ())
    is_chat = is_list and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    if not (is_chat or isinstance(prompt, str)):
        raise PromptError(
            'a prompt is text, a list of token ids, or a list of messages such as {"role": "user", "content": "Hi"}; '
            f"this one is {reprlib.repr(prompt)}"
        )
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise PromptError("this target has no tokenizer; give prompts as lists of token ids")
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as e:
            raise PromptError(f"a prompt is not valid Unicode: {e.reason} at character {e.start}") from e
        return ImagePrompt(list(tokenizer.encode(prompt)), ())
    messages, sources = take_images(cast(Sequence[Mapping[str, Any]], prompt), joins=target.vision is None)
    if sources and target.vision is None:
        raise PromptError(f"{target.name} reads only text; leave out the images, or load a model that sees")
    images = target.vision.read_all(sources, ImageLimits()) if sources and target.vision is not None else []
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=not images, add_generation_prompt=True)
    except Exception as e:  # a template is a program: what it raises depends on its author
        if isinstance(e, TypeError) and "TextEncodeInput" in str(e):  # the tokenizer's, for surrogates
            raise PromptError("a message is not valid Unicode; give text in UTF-8") from e
        raise PromptError(f"the chat template of {target.name} refuses these messages: {e}") from e
    if not images or target.vision is None:
        return ImagePrompt(list(rendered), ())
    tokens = target.vision.encode(rendered, images, partial(tokenizer.encode, add_special_tokens=False))
    return ImagePrompt(tokens, placed(rendered, tokens, images))
