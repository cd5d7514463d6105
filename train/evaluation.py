"""Evaluation of heads: acceptance when decoding held-out prompts, and a few sample texts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import indent
from typing import TypedDict

from eagle_mlx.engine import Engine
from eagle_mlx.files import write_whole
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.request import Output, Prompt
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.text import is_loop

from .report import Row

FILE = "generations.md"
COUNT = 3
"""Sample texts per evaluation."""
_ENOUGH, _FEWEST = 48, 8
"""Prompts of a measurement. With less than 48, the interval of τ is wider than the difference between checkpoints; 8
decode together."""
TIMES = 10
"""Maximum number of measurements during a run, unless the user sets it."""
SHARE = 1 / 10
"""Share of a run's time for measurements."""


class Generation(TypedDict):
    """The end of a prompt, and its decoded text."""

    prompt: str
    text: str
    tokens: int
    rounds: int


@dataclass(frozen=True)
class Acceptance:
    acceptance_length: float
    """τ: tokens emitted per target forward, including bonus tokens."""
    acceptance_by_position: list[float]
    """Share of draft tokens accepted at each position."""
    depth: int
    prompts: int
    left_out: int
    """Prompts left out because the target's text loops."""
    emitted: int
    """Tokens decoded for the measured prompts."""
    rounds: int
    seconds: float
    interval: float = 0.0
    """Half-width of the 95 % confidence interval of τ over prompts; 0 for fewer than two."""


class Evaluator:
    """Measures heads on the same prompts with greedy decoding and chains of `depth` draft tokens.

    Greedy text does not depend on the head, so prompts that end in loops are found once.
    """

    def __init__(
        self, target: Target, prompts: Sequence[Prompt], depth: int = 4, max_tokens: int = 128, max_batch: int = 8
    ):
        self._target, self._depth, self._max_batch = target, depth, max_batch
        self._prompts = list(prompts)
        self._all = len(self._prompts)
        self._params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.generations: list[Generation] = []
        """Some texts of the last measurement, if the target has a tokenizer."""

    def fit(self, head: DraftHead, seconds: float, times: int = 0) -> tuple[int, int]:
        """Keep as many prompts as `affordable` says, after a batch is measured; return its result."""
        begin = time.monotonic()
        some = self._prompts[: self._max_batch]
        usable = sum(not is_loop(output.tokens) for output in self._decode(head, some))
        each = (time.monotonic() - begin) / max(1, len(some))
        enough = _ENOUGH * len(some) // max(1, usable)  # those that loop will be left out
        found = affordable(seconds, each, self._all, times, enough)
        self._all = found[0]
        del self._prompts[self._all :]
        return found

    def measure(self, head: DraftHead) -> Acceptance:
        """Decode every prompt with the head and return its acceptance."""
        begin = time.monotonic()
        outputs = self._decode(head, self._prompts)
        kept = [i for i, output in enumerate(outputs) if not is_loop(output.tokens)]
        self._prompts = [self._prompts[i] for i in kept]
        left_out = self._all - len(kept)
        outputs = [outputs[i] for i in kept]
        self.generations = generations_of(self._target, self._prompts, outputs)
        return summarize(outputs, self._depth, left_out, time.monotonic() - begin)

    def _decode(self, head: DraftHead, prompts: list[Prompt]) -> list[Output]:
        engine = Engine(
            self._target, proposer=HeadProposer(head), policy=FixedPolicy(self._depth), max_batch=self._max_batch
        )
        return engine.generate(prompts, self._params)


def affordable(seconds: float, each: float, prompts: int, times: int = 0, enough: int = _ENOUGH) -> tuple[int, int]:
    """Return how many of `prompts` to decode per measurement, and the number of measurements.

    `seconds`: for all measurements. `each`: seconds per prompt. `times`: number of measurements; 0 for as many as allow
    `enough` prompts each.
    """
    total = int(seconds / max(each, 1e-9))
    times = times or max(1, min(TIMES, total // max(1, min(enough, prompts))))
    return min(prompts, max(_FEWEST, total // times)), times


def summarize(outputs: Sequence[Output], depth: int, left_out: int = 0, seconds: float = 0.0) -> Acceptance:
    """Return the acceptance over all outputs, with τ 0 if there are none."""
    rounds, tokens = sum(output.rounds for output in outputs), sum(len(output.tokens) for output in outputs)
    drafted, accepted = (
        [sum(at) for at in zip_longest([0] * depth, *counts, fillvalue=0)]
        for counts in ((o.drafted_by_position for o in outputs), (o.accepted_by_position for o in outputs))
    )
    by_position = [a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)]
    length = tokens / rounds if rounds else 0.0
    interval = _interval([(len(output.tokens), output.rounds) for output in outputs])
    return Acceptance(length, by_position, depth, len(outputs), left_out, tokens, rounds, seconds, interval)


def _interval(counts: Sequence[tuple[int, int]]) -> float:
    """Return the half-width of the 95 % confidence interval of τ, from the tokens and rounds of each prompt.

    τ is a ratio of sums: prompts are independent, but the tokens of one are not (Cochran 1977, Sampling Techniques,
    section 6.3).
    """
    count, rounds = len(counts), sum(each for _, each in counts)
    if count < 2 or not rounds:
        return 0.0
    ratio = sum(tokens for tokens, _ in counts) / rounds
    spread = sum((tokens - ratio * each) ** 2 for tokens, each in counts)
    return 1.96 * math.sqrt(spread * count / (count - 1)) / rounds


def generations_of(target: Target, prompts: Sequence[Prompt], outputs: Sequence[Output]) -> list[Generation]:
    """Return the first few prompts with their texts; none if the target has no tokenizer."""
    if target.tokenizer is None:
        return []
    found: list[Generation] = []
    for prompt, output in list(zip(prompts, outputs, strict=True))[:COUNT]:
        ids = not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt)
        shown = str(target.tokenizer.decode(list(prompt)) if ids else prompt)[-600:]
        found.append(Generation(prompt=shown, text=output.text, tokens=len(output.tokens), rounds=output.rounds))
    return found


def write_generations(rows: Sequence[Row], folder: Path) -> None:
    """Write the latest evaluation's texts as Markdown, with tokens per round in each evaluation that decoded them."""
    evals = [row for row in rows if row["kind"] == "eval" and row.get("generations")]
    if not evals:
        return
    lines = ["# Texts of the target, decoded with the head"]
    for number, newest in enumerate(evals[-1]["generations"], 1):
        prompt, text = (indent(newest[key], "    ", lambda _: True) for key in ("prompt", "text"))  # as Markdown code
        lines += ["", f"## {number}", "", prompt, "", "…", "", text, ""]
        lines += ["| step | tokens seen | tokens per round |", "|---|---|---|"]
        for row in evals:
            match = [g for g in row["generations"] if (g["prompt"], g["text"]) == (newest["prompt"], newest["text"])]
            if match:
                lines.append(f"| {row['step']} | {row.get('tokens', 0):,} | {per_round(match[0]):.2f} |")
    write_whole(folder / FILE, ("\n".join(lines) + "\n").encode())


def per_round(generation: Generation) -> float:
    """Return the tokens per target forward, including bonus tokens."""
    return generation["tokens"] / max(generation["rounds"], 1)
