"""Acceptance by real decoding: held-out prompts through the engine, as a user would decode them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_mlx.engine import Engine
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.request import Output, Prompt
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.text import is_loop

from .generations import Generation, generations_of


@dataclass(frozen=True)
class Acceptance:
    acceptance_length: float
    """τ: tokens emitted per target forward, bonus tokens included."""
    acceptance_by_position: list[float]
    """Share of rounds in which the draft token at each position was accepted."""
    depth: int
    prompts: int
    """Prompts that were measured."""
    left_out: int
    """Prompts left out, since the target's own continuation loops."""
    emitted: int
    """Tokens decoded for them."""
    rounds: int
    seconds: float


class Evaluator:
    """Measures heads on the same prompts: greedy, chains of `depth` draft tokens.

    Greedy text is the target's own whatever the head, so which prompts end in loops is found once.
    """

    def __init__(
        self, target: Target, prompts: Sequence[Prompt], depth: int = 4, max_tokens: int = 128, max_batch: int = 8
    ):
        self._target, self._depth, self._max_batch = target, depth, max_batch
        self._prompts = list(prompts)
        self._all = len(self._prompts)
        self._params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.generations: list[Generation] = []
        """Some texts of the last measurement, where the target has a tokenizer."""

    def measure(self, head: DraftHead) -> Acceptance:
        """Decode every prompt with the head."""
        begin = time.monotonic()
        engine = Engine(
            self._target, proposer=HeadProposer(head), policy=FixedPolicy(self._depth), max_batch=self._max_batch
        )
        outputs = engine.generate(self._prompts, self._params)
        kept = [i for i, output in enumerate(outputs) if not is_loop(output.tokens)]
        self._prompts = [self._prompts[i] for i in kept]
        left_out = self._all - len(kept)
        outputs = [outputs[i] for i in kept]
        self.generations = generations_of(self._target, self._prompts, outputs)
        return summarize(outputs, self._depth, left_out, time.monotonic() - begin)


def summarize(outputs: Sequence[Output], depth: int, left_out: int = 0, seconds: float = 0.0) -> Acceptance:
    """Acceptance over outputs taken together; a τ of 0 where there are none."""
    rounds, tokens = sum(output.rounds for output in outputs), sum(len(output.tokens) for output in outputs)
    drafted, accepted = [0] * depth, [0] * depth
    for output in outputs:
        for position, (d, a) in enumerate(zip(output.drafted_by_position, output.accepted_by_position, strict=True)):
            drafted[position] += d
            accepted[position] += a
    by_position = [a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)]
    length = tokens / rounds if rounds else 0.0
    return Acceptance(length, by_position, depth, len(outputs), left_out, tokens, rounds, seconds)
