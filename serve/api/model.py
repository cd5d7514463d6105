"""A loaded model: its engine, the encoder of its texts, and the sampling that requests may ask of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Event, Lock
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from eagle_mlx import hub
from eagle_mlx.engine import Engine
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.proposers.hybrid import HybridProposer
from eagle_mlx.sampling_params import Grammar, SamplingParams, StopWatcher
from eagle_mlx.target import Target

from ..chat import ChatFormat, Grammars, Volatile
from ..chat.process_work import EncoderProcess
from ..processes import Process, ProcessEnded
from .errors import ApiError, ContextExceeded, bad_request
from .limits import Limits, TokenSize, token_size
from .logprobs import TokenTexts
from .schema import Request

_LOOK_SECONDS = 0.05
"""Between looks whether a request has been cancelled."""
_TOKENIZER_SECONDS = 60.0
"""As for grammars; it takes under a second."""
_OWN_WAYS = ("__call__", "encode", "_encode_plus", "_convert_encoding", "set_truncation_and_padding")
"""Methods with which a tokenizer's class may do more to a text than its backend does."""

Encode = Callable[[str, bool], list[int]]
"""A text, and whether the special tokens that begin or end one are added -> its token ids."""


class Encoder:
    """Encodes short texts here, and long ones in a process, which is killed when its request is cancelled.

    The process holds the tokenizer's backend (the `tokenizers` library) and nothing else. A tokenizer without one, or
    whose class does more than its backend, encodes long texts here too, and then nothing stops it. A text takes some
    200 bytes of memory for each of its own, so the limit of bodies bounds that too. Any thread may use this.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer = tokenizer
        self._starting = Lock()
        self.process: Process | None = None
        """The first one, forked for each text; started at the first need."""

    def encode(self, text: str, add_special_tokens: bool, is_long: bool, cancelled: Event) -> list[int]:
        """The tokenizer's ids of a text. Raises ApiError, 499 once this is cancelled, 503 if the process is killed."""
        if cancelled.is_set():
            raise _gone()
        if not is_long or self._opening is None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        try:
            answer = _asked(self._start().fork(), text, add_special_tokens, cancelled)
        except ProcessEnded as e:
            message = "the process that encodes long texts has been killed; there may be too little memory"
            raise ApiError(503, message, headers={"Retry-After": "5"}) from e
        tokens, reason = answer
        if reason:
            raise ApiError(400, f"the text cannot be encoded: {reason}")
        return tokens  # type: ignore[no-any-return]  # of `EncoderProcess.encode`

    @cached_property
    def _opening(self) -> tuple[str, str, bool] | None:
        """What the first process is told; None where long texts are encoded here."""
        tokenizer: Any = self._tokenizer._tokenizer  # transformers' own; mlx-lm's wrapper adds nothing to its `encode`
        backend = getattr(tokenizer, "backend_tokenizer", None)
        own = any(getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name) for name in _OWN_WAYS)
        if own or not isinstance(backend, Tokenizer):
            return None
        try:
            return "open", backend.to_str(), tokenizer.split_special_tokens
        except Exception:  # of no other kind, where a part of the backend is written in Python
            return None

    def _start(self) -> Process:
        """The first process, in place of one that somebody has killed. Raises ProcessEnded."""
        with self._starting:
            if self.process is None or not self.process.alive:
                process = Process.start(EncoderProcess)
                process.ask(*(self._opening or ()))
                if process.answer(_TOKENIZER_SECONDS) is None:
                    raise ProcessEnded
                self.process = process
            return self.process

    def end(self) -> None:
        """Kill all processes, whatever they are doing."""
        with self._starting:
            if self.process is not None:
                self.process.end()
                self.process = None


def _asked(process: Process, text: str, add_special_tokens: bool, cancelled: Event) -> tuple[Any, str]:
    """What a process answers, which ends with this. Raises ProcessEnded, and ApiError once this is cancelled."""
    try:
        process.ask("encode", text, add_special_tokens)
        while (answer := process.answer(_LOOK_SECONDS)) is None:
            if cancelled.is_set():
                raise _gone()
        return answer
    finally:
        process.end()


def _gone() -> ApiError:
    return ApiError(499, "the client has closed the connection")


log = logging.getLogger("eagle_mlx.serve")
_LAST_WRITES = 5.0
"""Seconds that files of past prompts have at the end: with the drain less than the 45 that a container is given."""


@dataclass(frozen=True)
class Loaded:
    engine: Engine
    mode: str = "none"
    """How it speculates."""
    most_drafts: int = 0
    """Draft tokens a round at most."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters for requests that do not give them."""
    volatile: Volatile = field(default_factory=Volatile)
    """What is left out of system prompts."""

    @property
    def modes(self) -> tuple[str, ...]:
        """What a request may name in `spec_decode`: what is loaded, and none."""
        also = ("ngram",) if isinstance(self.engine.proposer, HybridProposer) else ()
        return tuple(dict.fromkeys((self.mode, *also, "none")))

    @property
    def target(self) -> Target:
        return self.engine.target

    @property
    def disk(self) -> DiskTier | None:
        """Where past prompts are kept in files."""
        return self.engine.prefixes.disk if self.engine.prefixes is not None else None

    @property
    def tokenizer(self) -> TokenizerWrapper:
        """The target's, without which nothing is served."""
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        return tokenizer

    @cached_property
    def chat(self) -> ChatFormat:
        return ChatFormat.of(self.target, self.volatile)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars.of(self.target, self.chat)

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer)

    @cached_property
    def token_size(self) -> TokenSize | None:
        """What a token stands for at most; None where that is not known."""
        return token_size(self.tokenizer)

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def close(self) -> None:
        """End the processes alongside the engine, and write the past prompts that wait for it."""
        self.target.close()
        self.grammars.end()
        self.encoder.end()
        if self.disk is not None and not self.disk.close(_LAST_WRITES):
            log.warning("the newest past prompts were not written in time; their texts will be read anew")


def sampling_defaults(name: str | Path) -> dict[str, float]:
    """What the model's authors advise in `generation_config.json`, as far as it can be read and used."""
    try:
        advice: dict[str, Any] = json.loads((hub.resolve(name) / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(advice, dict) or advice.get("do_sample") is False:
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: advice[name] for name in names if name in advice and _usable(name, advice[name])}


def _usable(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except ConfigError:
        return False
    return True


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
