"""A loaded model: its engine, its tokenizer, and the sampling parameters of requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_mlx import Engine, HybridProposer, Memory, NgramProposer, SamplingParams, hub
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.errors import ConfigError
from eagle_mlx.proposers.memory_file import MemoryFile
from eagle_mlx.sampling_params import Drafter, Grammar, StopWatcher
from eagle_mlx.vision.images import ImageLimits

from .. import log
from ..chat import ChatFormat, Grammars
from ..learning.learner import Learner
from ..speculation import PolicyName, Speculation
from .errors import TOO_LONG, ApiError
from .limits import Limits
from .logprobs import TokenTexts
from .schema import ChoicesRequest

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters for which a model may advise a value in `generation_config.json`."""
_LAST_WRITES = 5.0
"""Seconds to write the memory, and prefix cache files, at shutdown; with the drain, less than the 45 of a container."""


_DRAFTERS: Mapping[str, Drafter] = {"none": "none", "ngram": "ngrams"}
"""By mode of speculation; the other modes are models."""


@dataclass(eq=False)
class Loaded:
    engine: Engine
    mode: str = "none"  # the loaded mode of speculation
    most_drafts: int = 0  # maximum draft tokens per round
    defaults: Mapping[str, float] = field(default_factory=dict)  # default sampling parameters
    speculation: Speculation = field(default_factory=Speculation)  # the present settings
    memory_file: MemoryFile | None = None
    learner: Learner | None = None
    thinking_budget: int | None = None  # the limit on thoughts of requests that set none
    image_limits: ImageLimits = field(default_factory=ImageLimits)

    def __post_init__(self) -> None:
        self._started, self._chosen = self.speculation, "auto"
        self.target = self.engine.target
        self.chat = ChatFormat.of(self.target)
        self.tokenizer = self.chat.tokenizer
        self.grammars = Grammars.of(self.target, self.chat)
        self.texts = TokenTexts(self.tokenizer)

    @property
    def context(self) -> int:
        """The most tokens of a request: the model's context, or what the memory for keys and values holds of it."""
        return min(self.target.context_length, self.engine.kv_budget.longest)

    @property
    def modes(self) -> tuple[str, ...]:
        """The values of `spec_decode` that a request may use."""
        proposer = self.engine.proposer
        ngrams = ("ngram",) if isinstance(proposer, HybridProposer | NgramProposer) else ()
        is_new = isinstance(proposer, HybridProposer) and not proposer.model_drafts
        model = () if self.mode == "none" or is_new else (self.mode,)
        return (*dict.fromkeys((*model, *ngrams)), "none")

    @property
    def drafters(self) -> tuple[str, ...]:
        """The modes that draft for requests that do not choose."""
        loaded = self.modes[:-1]
        chosen: dict[Drafter | None, tuple[str, ...]] = {"none": (), "ngrams": ("ngram",), "model": loaded[:1]}
        return chosen.get(self.engine.drafter, loaded)

    def check_mode(self, mode: str | None) -> None:
        """Raise ApiError 400 for a mode that is not loaded."""
        if mode not in (None, *self.modes):
            *others, last = map(repr, self.modes)
            here = f"{', '.join(others)} and {last} are" if others else f"only {last} is"
            raise ApiError(400, f"spec_decode {mode!r} is not loaded; {here}", "spec_decode")

    def change_speculation(self, mode: str | None, most: int | None, policy: PolicyName | None) -> None:
        """Change what drafts, how much, and the policy. Run this between steps. Raises ApiError 400."""
        self.check_mode(None if mode == "auto" else mode)
        if self.modes == ("none",) and (most or policy):
            name = "num_speculative_tokens" if most else "spec_policy"
            raise ApiError(400, f"{name} is {most or policy}, but this server drafts nothing", name)
        try:
            now = self._started.with_policy(policy or self.speculation.policy, most or self.speculation.num_tokens)
        except ConfigError as e:
            raise ApiError(400, str(e), "spec_policy") from e
        self._chosen = mode or self._chosen
        if now != self.speculation:
            engine = self.engine
            measured = engine.target if engine.proposer is not None else None
            engine.use_policy(now.make_policy(measured, engine.kv_bits, engine.exact))
            self.speculation, self.most_drafts = now, now.max_depth
        default = "none" if self.mode == "none" else self.speculation.drafter
        self.engine.drafter = default if self._chosen == "auto" else _DRAFTERS.get(self._chosen, "model")

    @property
    def memory(self) -> Memory | None:
        return self.engine.proposer.memory if self.engine.proposer is not None else None

    @property
    def disk(self) -> DiskTier | None:
        return self.engine.prefixes.disk if self.engine.prefixes is not None else None

    def close(self) -> None:
        """End the target's other ranks; write the texts to learn from, the memory and pending prefix cache files."""
        try:
            self.target.close()
            if self.learner is not None:
                self.learner.close()
        finally:  # threads that go on would keep the model in memory
            if self.memory_file is not None and not self.memory_file.close(_LAST_WRITES):
                log.warning("the newest texts of the memory were not written to disk in time; a restart forgets them")
            if self.disk is not None and not self.disk.close(_LAST_WRITES):
                log.warning("the newest prompts were not written to disk in time; a restart reads them again")


def sampling_defaults(name: str | Path) -> dict[str, float]:
    """Return the valid sampling defaults from the model's `generation_config.json`, if there is one."""
    try:
        advice: dict[str, Any] = json.loads((hub.resolve(name) / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(advice, dict) or advice.get("do_sample") is False:
        return {}
    defaults: dict[str, Any] = {}
    for name in _DEFAULTED:
        with suppress(KeyError, ConfigError):
            SamplingParams(**{name: advice[name]})
            defaults[name] = advice[name]
    return defaults


def check(request: ChoicesRequest, limits: Limits) -> None:
    """Raise ApiError 400 if a request exceeds the limits or contradicts itself."""
    if request.answers > limits.n:
        raise ApiError(400, f"n is {request.n}; ask for at most {limits.n} answers", "n")
    if len(request.stops) > limits.stops:
        raise ApiError(400, f"stop has {len(request.stops)} strings; give at most {limits.stops}", "stop")
    if any(len(text) > limits.stop_length for text in request.stops):
        raise ApiError(400, f"a stop string is longer than {limits.stop_length} characters", "stop")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream to be true", "stream_options")


def sampling(
    request: ChoicesRequest,
    loaded: Loaded,
    max_tokens: int | None,
    top_logprobs: int | None,
    grammar: Callable[[], Grammar] | None = None,
    stop_watcher: Callable[[], StopWatcher] | None = None,
) -> list[SamplingParams]:
    """Return parameters for each of the `n` answers, whose seeds count up. Raises ConfigError or ApiError 400.

    max_tokens: None for what the context leaves. top_logprobs: None for no log probabilities.
    """
    given = {name: value for name in _DEFAULTED if (value := getattr(request, name)) is not None}
    advised: dict[str, float] = {"temperature": 1.0, **loaded.defaults, **given}
    if advised.get("top_k") == -1:  # other servers' value for "all"
        advised["top_k"] = 0
    params = SamplingParams(
        **advised,  # type: ignore[arg-type]  # each by its own name; __post_init__ checks the types
        seed=request.seed,
        max_tokens=max_tokens or loaded.context,
        stop=tuple(request.stops),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        num_speculative_tokens=request.num_speculative_tokens,
        drafter=_drafter(request, loaded),
        memory=request.memory is not False,
        learn=(request.memory if request.learn is None else request.learn) is not False,
        **_rule(request, loaded),
        grammar=grammar,
        stop_watcher=stop_watcher,
    )
    return [params if params.seed is None else replace(params, seed=params.seed + i) for i in range(request.answers)]


def _rule(request: ChoicesRequest, loaded: Loaded) -> dict[str, Any]:
    """Return the fields that say how drafts are accepted. Raises ApiError 400 for a threshold without effect."""
    given = {"acceptance": request.acceptance, "threshold": request.acceptance_threshold}
    rule: dict[str, Any] = loaded.speculation.rule | {name: value for name, value in given.items() if value is not None}
    if request.acceptance_threshold is not None and rule["acceptance"] != "threshold":
        raise ApiError(400, "acceptance_threshold needs acceptance to be threshold", "acceptance_threshold")
    return rule


def _drafter(request: ChoicesRequest, loaded: Loaded) -> Drafter | None:
    """Return the request's drafter. Raises ApiError 400 for a mode that is not loaded."""
    mode, most = request.spec_decode, request.num_speculative_tokens
    loaded.check_mode(mode)
    if most and (mode or loaded.mode) == "none":
        where = "this request" if mode == "none" else "this server"
        raise ApiError(400, f"num_speculative_tokens is {most}, but {where} drafts nothing", "num_speculative_tokens")
    return None if mode is None else _DRAFTERS.get(mode, "model")


def check_context(prompt: int, loaded: Loaded, param: str) -> None:
    """Raise ApiError 400 if a prompt of this many tokens leaves no room for an answer in the context."""
    context = loaded.context
    if prompt >= context:
        # Both APIs' words, which tell agents to shorten the conversation. Copilot CLI knows only `prompt is too long`.
        here = f"this model's maximum context length is {context} tokens, and the prompt is too long: it has {prompt}"
        remedy = "shorten it" if context == loaded.target.context_length else "shorten it, or raise --kv-gb"
        error = ApiError(400, f"{here}; {remedy}", param, TOO_LONG)
        error.to_anthropic = f"prompt is too long: {prompt} tokens > {context} maximum"
        raise error
