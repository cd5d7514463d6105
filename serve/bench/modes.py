"""The ways of decoding that are compared, each behind the same call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, Protocol, get_args

import mlx.core as mx
import mlx_lm

from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.params import SamplingParams
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.proposers.ngram import NgramProposer
from eagle_mlx.target import Target

ModeName = Literal["mlx-lm", "plain", "ngram", "eagle"]
MODE_NAMES: tuple[ModeName, ...] = get_args(ModeName)


@dataclass(frozen=True)
class Continuation:
    """What one prompt got, with the end-of-turn token where one was emitted."""

    tokens: tuple[int, ...]
    text: str
    rounds: int
    """Target forwards that emitted tokens."""
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()


class Mode(Protocol):
    @property
    def name(self) -> ModeName: ...

    @property
    def batch(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Continuation]:
        """Decode token-id prompts to their ends, in order."""

    def settle(self) -> None:
        """Wait for work that was launched and is not wanted, so that it does not burden what is timed next."""


class MlxLmMode:
    """`mlx_lm.stream_generate`, one prompt after the other, over the target's own model object."""

    name: ModeName = "mlx-lm"
    batch = 1
    depth = 0

    def __init__(self, target: Target):
        if target.tokenizer is None:
            raise ConfigError("mode mlx-lm needs a target with a tokenizer")
        self._model, self._tokenizer = target.model, target.tokenizer
        self._stream = mx.new_stream(mx.default_device())

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Continuation]:
        return [self._one(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def settle(self) -> None:
        mx.synchronize(self._stream)

    def _one(self, prompt: list[int], params: SamplingParams) -> Continuation:
        temperature = params.temperature
        sampler = (lambda logprobs: mx.random.categorical(logprobs / temperature)) if temperature else None
        if params.seed is not None:
            mx.random.seed(params.seed)
        tokens, pieces = [], []
        for step in mlx_lm.stream_generate(
            self._model,
            self._tokenizer,
            prompt,
            max_tokens=params.max_tokens,
            sampler=sampler,
            stream=self._stream,
        ):
            tokens.append(int(step.token))
            pieces.append(step.text)
        return Continuation(tuple(tokens), "".join(pieces), rounds=len(tokens))


class EngineMode:
    """The engine, plain or with a proposer that drafts `depth` tokens a round."""

    def __init__(self, name: ModeName, target: Target, batch: int, depth: int = 0, proposer: Proposer | None = None):
        self.name, self.batch, self.depth = name, batch, depth
        self._engine = Engine(target, proposer, FixedPolicy(depth), max_batch=batch)

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Continuation]:
        return [
            Continuation(
                tokens=tuple(out.tokens),
                text=out.text,
                rounds=out.rounds,
                drafted_by_position=tuple(out.drafted_by_position),
                accepted_by_position=tuple(out.accepted_by_position),
            )
            for out in self._engine.generate(prompts, params)
        ]

    def settle(self) -> None:
        mx.synchronize()


def build_modes(
    target: Target, head: Eagle3Head | None, names: Sequence[ModeName], batches: Sequence[int], depths: Sequence[int]
) -> list[Mode]:
    """Every mode asked for, at every batch size and, where it drafts, at every depth.

    Raises ConfigError where eagle is asked for without a head, HeadError where the head does not fit the target.
    """
    modes: list[Mode] = [MlxLmMode(target)] if "mlx-lm" in names else []
    for batch in batches:
        if "plain" in names:
            modes.append(EngineMode("plain", target, batch))
        for depth in depths:
            if "ngram" in names:
                modes.append(EngineMode("ngram", target, batch, depth, NgramProposer()))
            if "eagle" in names:
                if head is None:
                    raise ConfigError("mode eagle needs a head: give --head, or leave eagle out of --modes")
                modes.append(EngineMode("eagle", target, batch, depth, HeadProposer(head)))
    return modes


def acceptance_length(continuations: Sequence[Continuation]) -> float:
    """τ over all of them: tokens emitted per target forward, bonus tokens included."""
    return sum(len(one.tokens) for one in continuations) / max(1, sum(one.rounds for one in continuations))


def acceptance_by_position(continuations: Sequence[Continuation]) -> list[float]:
    """For each draft position, the share of the rounds that drafted it in which it was accepted."""
    drafted = [sum(column) for column in zip_longest(*(c.drafted_by_position for c in continuations), fillvalue=0)]
    accepted = [sum(column) for column in zip_longest(*(c.accepted_by_position for c in continuations), fillvalue=0)]
    return [hits / tries for hits, tries in zip_longest(accepted, drafted, fillvalue=0) if tries]
