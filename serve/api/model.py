"""What the worker loads: the engine, and what requests need to know of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx import hub
from eagle_mlx.engine import Engine
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.engine.prior import Prior
from eagle_mlx.errors import ConfigError
from eagle_mlx.proposers.hybrid import HybridProposer
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target

from ..chat import ChatFormat, Grammars, Volatile
from .encoder import Encoder
from .limits import TokenSize, token_size
from .logprobs import TokenTexts

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
    prior: Prior | None = None
    """Where what the policy learns is kept."""
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
        """Keep what was learnt, end the processes beside the engine, and write the past prompts that wait for it."""
        if self.prior is not None:
            self.prior.save()
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
