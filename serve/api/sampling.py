"""From a request's fields to what the engine is asked for each of its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from eagle_mlx.errors import EagleError
from eagle_mlx.sampling_params import Grammar, SamplingParams, StopWatcher

from .errors import ApiError, ContextExceeded, bad_request
from .limits import Limits
from .model import Loaded
from .schema import Request


def check(request: Request, limits: Limits) -> None:
    """Raise ApiError 400 for what is too much, or contradicts itself."""
    limits.check_n(request.answers)
    limits.check_stops(request.stops)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream to be true", "stream_options")


def sampling(
    request: Request,
    loaded: Loaded,
    max_tokens: int | None,
    top_logprobs: int | None,
    grammar: Callable[[], Grammar] | None = None,
    stop_watcher: Callable[[], StopWatcher] | None = None,
) -> list[SamplingParams]:
    """One for each of the `n` answers, whose seeds count up from the request's.

    max_tokens: None for what the context leaves. top_logprobs: None for no log probabilities. Raises ApiError 400.
    """
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if (value := getattr(request, name)) is not None
    }
    advised: dict[str, float] = {"temperature": 1.0, **loaded.defaults, **given}
    if advised.get("top_k") == -1:  # as other servers write "all"
        advised["top_k"] = 0
    try:
        params = SamplingParams(
            **advised,  # type: ignore[arg-type]  # each by its own name; __post_init__ checks the types
            seed=request.seed,
            max_tokens=max_tokens or loaded.target.context_length,
            stop=tuple(request.stops),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
            logprobs=top_logprobs is not None,
            top_logprobs=top_logprobs or 0,
            num_speculative_tokens=_drafts(request, loaded),
            ngrams_only=request.spec_decode == "ngram" != loaded.mode,
            grammar=grammar,
            stop_watcher=stop_watcher,
        )
    except EagleError as e:
        raise bad_request(e) from e
    if request.seed is None:
        return [params] * request.answers
    return [replace(params, seed=request.seed + i) for i in range(request.answers)]


def _drafts(request: Request, loaded: Loaded) -> int | None:
    """The most draft tokens a round that the request wants. Raises ApiError 400 for a way to draft that is not here."""
    mode, most = request.spec_decode, request.num_speculative_tokens
    if mode not in (None, *loaded.modes):
        *others, last = map(repr, loaded.modes)
        here = f"{', '.join(others)} and {last} are" if others else f"only {last} is"
        raise ApiError(400, f"spec_decode {mode!r} is not loaded; {here}", "spec_decode")
    if most and (mode == "none" or loaded.mode == "none"):
        where = "this request" if loaded.mode != "none" else "this server"
        raise ApiError(400, f"num_speculative_tokens is {most}, but {where} drafts nothing", "num_speculative_tokens")
    return 0 if mode == "none" else most


def check_text(text: str, max_tokens: int | None, loaded: Loaded, param: str) -> None:
    """Raise ContextExceeded where a text is so long that it need not be encoded to know that it does not fit."""
    if loaded.token_size is not None:
        check_context(loaded.token_size.least_tokens(text), max_tokens, loaded, param, "at least ")


def check_context(prompt: int, max_tokens: int | None, loaded: Loaded, param: str, about: str = "") -> None:
    """Raise ContextExceeded where a prompt of so many tokens, and its answer, do not fit."""
    context = loaded.target.context_length
    if prompt + (max_tokens or 1) > context:
        wanted = f" and {max_tokens} to generate" if max_tokens else ""
        # The first words are OpenAI's: by them agents know that they must shorten the conversation.
        here = f"this model's maximum context length is {context} tokens"
        raise ContextExceeded(f"{here}, but the prompt has {about}{prompt}{wanted}; shorten it", param, prompt, context)
