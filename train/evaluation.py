"""What a head is worth: acceptance by real decoding of held-out prompts, and a few of their texts for people."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
"""Texts that are kept of an evaluation."""
_PROMPT_CHARACTERS = 600


class Generation(TypedDict):
    """A prompt's end, and the text that was decoded after it."""

    prompt: str
    text: str
    tokens: int
    rounds: int


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
    interval: float = 0.0
    """Half the width of the 95 % interval of τ over prompts; 0 for fewer than two."""


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
    interval = _interval([(len(output.tokens), output.rounds) for output in outputs])
    return Acceptance(length, by_position, depth, len(outputs), left_out, tokens, rounds, seconds, interval)


def _interval(counts: Sequence[tuple[int, int]]) -> float:
    """Half the width of the 95 % interval of a ratio of sums, from the tokens and rounds of each prompt.

    The prompts are independent, and the tokens of one are not (Cochran 1977, Sampling Techniques, section 6.3).
    """
    count, rounds = len(counts), sum(each for _, each in counts)
    if count < 2 or not rounds:
        return 0.0
    ratio = sum(tokens for tokens, _ in counts) / rounds
    spread = sum((tokens - ratio * each) ** 2 for tokens, each in counts)
    return 1.96 * math.sqrt(spread * count / (count - 1)) / rounds


def generations_of(target: Target, prompts: Sequence[Prompt], outputs: Sequence[Output]) -> list[Generation]:
    """The first few prompts with their texts; none for a target without a tokenizer."""
    if target.tokenizer is None:
        return []
    found: list[Generation] = []
    for prompt, output in list(zip(prompts, outputs, strict=True))[:COUNT]:
        ids = not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt)
        shown = str(target.tokenizer.decode(list(prompt)) if ids else prompt)[-_PROMPT_CHARACTERS:]
        found.append(Generation(prompt=shown, text=output.text, tokens=len(output.tokens), rounds=output.rounds))
    return found


def write_generations(rows: Sequence[Row], folder: Path) -> Path | None:
    """Write the texts of the newest evaluation, each with the tokens per round of all that decoded it, as Markdown.

    Greedy text is the target's own whatever the head, so what training changes is in how many rounds it comes.
    """
    evals = [row for row in rows if row["kind"] == "eval" and row.get("generations")]
    if not evals:
        return None
    lines = ["# Texts of the target, decoded with the head"]
    for number, newest in enumerate(evals[-1]["generations"], 1):
        lines += ["", f"## {number}", "", *_fenced(newest["prompt"]), "", *_fenced(newest["text"]), ""]
        lines += ["| step | tokens seen | tokens per round |", "|---|---|---|"]
        for row in evals:
            match = [g for g in row["generations"] if (g["prompt"], g["text"]) == (newest["prompt"], newest["text"])]
            if match:
                lines.append(f"| {row['step']} | {row.get('tokens', 0):,} | {per_round(match[0]):.2f} |")
    file = folder / FILE
    write_whole(file, ("\n".join(lines) + "\n").encode())
    return file


def per_round(generation: Generation) -> float:
    """Tokens per target forward, the bonus token included."""
    return generation["tokens"] / max(generation["rounds"], 1)


def _fenced(text: str) -> list[str]:
    """The text as a block that nothing in it ends."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence]
