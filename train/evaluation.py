"""Evaluation of heads: acceptance when decoding held-out prompts, and a few sample texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from textwrap import indent
from typing import Any, TypedDict

from eagle_mlx.engine import Engine
from eagle_mlx.files import write_whole
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.paired import Decoded, Gain, gain_of, tau, tau_interval
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.request import Output, Prompt
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.text import is_loop

from .report import Row

FILE = "generations.md"
COUNT = 3
_ENOUGH, _FEWEST = 48, 8
"""Prompts of a measurement. With less than 48, the interval of τ is wider than the difference between checkpoints; 8
decode together."""
_LENGTHS = (512, 2048, 4096, 8192)  # the classes of prompts' lengths
TIMES = 10
"""Maximum number of measurements during a run, unless the user sets it."""
SHARE = 1 / 10


class Generation(TypedDict):
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
    rounds: int
    seconds: float
    interval: float = 0.0
    """Half-width of the 95 % confidence interval of τ over prompts; 0 for fewer than six."""
    by_context: dict[str, float] = field(default_factory=dict)
    """τ by length of the prompts, if it differs much."""
    by_prompt: list[Decoded] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Any]:
        """All figures without those of each prompt, for reports."""
        return {name: value for name, value in vars(self).items() if name != "by_prompt"}

    def gain_over(self, other: Acceptance) -> Gain | None:
        """Return the gain in τ over another measurement; None if it had other prompts, or none."""
        same = len(self.by_prompt) == len(other.by_prompt) > 0
        return gain_of(other.by_prompt, self.by_prompt) if same else None


class Evaluator:
    """Measures heads by chains of `depth` draft tokens, on the same prompts, without those whose greedy text loops."""

    def __init__(
        self, target: Target, prompts: Sequence[Prompt], depth: int = 4, max_tokens: int = 128, max_batch: int = 8
    ):
        self._target = target
        self._depth = depth
        self._max_batch = max_batch
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
        per_prompt = (time.monotonic() - begin) / max(1, len(some))
        enough = _ENOUGH * len(some) // max(1, usable)  # those that loop will be left out
        self._all, times = affordable(seconds, per_prompt, self._all, times, enough)
        del self._prompts[self._all :]
        return self._all, times

    def measure(self, head: DraftHead) -> Acceptance:
        begin = time.monotonic()
        outputs = self._decode(head, self._prompts)
        pairs = zip(self._prompts, outputs, strict=True)
        kept = [(prompt, output) for prompt, output in pairs if not is_loop(output.tokens)]
        self._prompts, outputs = [prompt for prompt, _ in kept], [output for _, output in kept]
        self.generations = generations_of(self._target, self._prompts, outputs)
        return summarize(outputs, self._depth, self._all - len(kept), time.monotonic() - begin)

    def _decode(self, head: DraftHead, prompts: list[Prompt]) -> list[Output]:
        engine = Engine(
            self._target, proposer=HeadProposer(head), policy=FixedPolicy(self._depth), max_batch=self._max_batch
        )
        return engine.generate(prompts, self._params)


def affordable(
    seconds: float, per_prompt: float, prompts: int, times: int = 0, enough: int = _ENOUGH
) -> tuple[int, int]:
    """Return how many of `prompts` to decode per measurement, and the number of measurements.

    `seconds`: for all measurements and `per_prompt`. `times`: measurements; 0 for as many as allow `enough` prompts.
    """
    total = int(seconds / max(per_prompt, 1e-9))
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
    by_prompt = [Decoded(len(output.tokens), output.rounds) for output in outputs]
    figures = (tau(by_prompt), by_position, depth, len(outputs), left_out, tokens, rounds, seconds)
    return Acceptance(*figures, tau_interval(by_prompt) or 0.0, by_length(outputs), by_prompt)


def by_length(outputs: Sequence[Output]) -> dict[str, float]:
    """Return τ by the prompts' length in tokens; empty if all are in one class."""
    classes: dict[str, list[Output]] = {}
    for output in sorted(outputs, key=lambda output: output.prompt_tokens):
        top = next((length for length in _LENGTHS if output.prompt_tokens <= length), None)
        classes.setdefault("more" if top is None else f"up to {top:,}", []).append(output)
    of_classes = {name: (sum(len(o.tokens) for o in of), sum(o.rounds for o in of)) for name, of in classes.items()}
    return {name: n / rounds for name, (n, rounds) in of_classes.items() if rounds} if len(classes) > 1 else {}


def generations_of(target: Target, prompts: Sequence[Prompt], outputs: Sequence[Output]) -> list[Generation]:
    """Return the first few prompts with their texts; none if the target has no tokenizer."""
    if target.tokenizer is None:
        return []
    generations: list[Generation] = []
    for prompt, output in zip(prompts[:COUNT], outputs[:COUNT], strict=True):
        ids = not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt)
        shown = str(target.tokenizer.decode(list(prompt)) if ids else prompt)[-600:]
        generations.append(Generation(prompt=shown, text=output.text, tokens=len(output.tokens), rounds=output.rounds))
    return generations


def write_generations(rows: Sequence[Row], folder: Path) -> None:
    """Write the latest evaluation's texts as Markdown, with tokens per round in each evaluation."""
    evals = [row for row in rows if row["kind"] == "eval" and row.get("generations")]
    if not evals:
        return
    lines = ["# Texts of the target, decoded with the head"]
    for number, newest in enumerate(evals[-1]["generations"], 1):
        prompt, text = (indent(newest[key], "    ", lambda _: True) for key in ("prompt", "text"))  # as Markdown code
        lines += ["", f"## {number}", "", prompt, "", "…", "", text, ""]
        lines += ["| step | tokens seen | tokens per round |", "|---|---|---|"]
        for row in evals:
            for g in row["generations"]:
                if (g["prompt"], g["text"]) == (newest["prompt"], newest["text"]):
                    lines.append(f"| {row['step']} | {row.get('tokens', 0):,} | {per_round(g):.2f} |")
    write_whole(folder / FILE, ("\n".join(lines) + "\n").encode())


def per_round(generation: Generation) -> float:
    """Return the tokens per target forward, including bonus tokens."""
    return generation["tokens"] / max(generation["rounds"], 1)
