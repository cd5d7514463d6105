"""A race: one prompt decoded by several modes, shown side by side."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from time import perf_counter, sleep
from typing import Any
from unicodedata import combining, east_asian_width

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx import Output, SamplingParams, Target
from eagle_mlx.progress import progress_bar

from .measure import acceptance_length, compare, first_difference, tolerance_for
from .modes import Mode
from .options import BASELINES

WARMUP_TOKENS = 16
"""Some rounds of every mode, so that its functions are compiled before the race."""
FEWEST_TOKENS = 32
"""Speeds of shorter texts are not compared: one slow step decides them."""
FRAMES_PER_SECOND = 20
"""Enough for text to appear to flow; a frame costs a terminal a few kilobytes."""
GAP = "  "
"""Between two columns."""


def name_of(mode: Mode) -> str:
    return f"{mode.name} {mode.policy}/{mode.depth}" if mode.depth else mode.name


@dataclass
class Lap:
    """One mode's decoding of the prompt."""

    mode: Mode
    output: Output
    steps: list[tuple[float, int]]
    """For each step, the seconds since the start and the tokens so far."""
    verdict: str = "reference"
    is_different: bool = False
    """Whether the text differs from the first mode's by more than rounding."""

    @property
    def seconds(self) -> float:
        return self.steps[-1][0]

    @property
    def rate(self) -> float:
        return len(self.output.tokens) / self.seconds

    def at(self, seconds: float, tokenizer: TokenizerWrapper) -> tuple[str, str, str]:
        """Return the speed, the verdict and the text at a time of the race."""
        if seconds >= self.seconds:
            return f"{self.rate:.1f} tokens/s", self.verdict, self.output.text
        at, count = next((step for step in reversed(self.steps) if step[0] <= seconds), (0.0, 0))
        text = self.output.text[: len(tokenizer.decode(self.output.tokens[:count]).rstrip("\ufffd"))]
        return f"{count / at:.1f} tokens/s" if count else "reads the prompt", "", text

    def summary(self, first: Lap, width: int) -> str:
        """Return the result in one line."""
        count, speed = len(self.output.tokens), "too few to time"
        if min(count, len(first.output.tokens)) >= FEWEST_TOKENS:
            speed = f"{self.rate:.1f} tokens/s, {self.rate / first.rate:.2f}x {first.mode.name}"
        figures = f"{count} tokens in {self.seconds:.2f} s, {speed}, τ {acceptance_length([self.output]):.2f}"
        return f"{name_of(self.mode).ljust(width)}  {figures}, {self.verdict}"


def race(target: Target, modes: Sequence[Mode], prompt: list[int], params: SamplingParams, progress: bool) -> bool:
    """Print each mode's text and speed; replay them at a terminal. Return whether texts differ only by rounding."""
    laps = []
    for mode in modes:
        _run(mode, prompt, replace(params, max_tokens=min(WARMUP_TOKENS, params.max_tokens)), progress)
        laps.append(_run(mode, prompt, params, progress))
    for lap in laps[1:]:
        _judge(lap, laps[0], target, prompt, params)
    if sys.stdout.isatty() and target.tokenizer is not None:
        _replay(laps, target.tokenizer)
    width = max(len(name_of(lap.mode)) for lap in laps)
    print("\n".join(lap.summary(laps[0], width) for lap in laps))
    return not any(lap.is_different for lap in laps)


def _run(mode: Mode, prompt: list[int], params: SamplingParams, progress: bool) -> Lap:
    steps = list[tuple[float, int]]()
    mx.clear_cache()  # start without another mode's buffers
    total, start, decoding = 0, perf_counter(), mode.decode([prompt], [params])
    shown: dict[str, Any] = {"unit": "token", "disable": None if progress else True, "leave": False}
    with progress_bar(total=params.max_tokens, desc=name_of(mode), **shown) as bar:
        try:
            while True:
                total += (new := next(decoding))
                steps.append((perf_counter() - start, total))
                bar.update(new)
        except StopIteration as end:
            steps.append((perf_counter() - start, total))
            [output] = end.value
    mode.sync()
    return Lap(mode, output, steps)


def _judge(lap: Lap, first: Lap, target: Target, prompt: list[int], params: SamplingParams) -> None:
    if params.rule != "greedy" and lap.mode.name in BASELINES:
        lap.verdict = "draws its own numbers"
        return
    expected, actual = first.output.tokens, lap.output.tokens
    tolerance = max(tolerance_for(target), tolerance_for(lap.mode))
    identity = compare(target, [prompt], [expected], [actual], [params], tolerance)
    at = first_difference(expected, actual)
    rounding = " by rounding" if identity.excused else ""
    lap.verdict = "identical" if at is None else f"differs{rounding} from token {at + 1}"
    lap.is_different = identity.different > 0 and lap.mode.dtype == target.dtype


def _replay(laps: Sequence[Lap], tokenizer: TokenizerWrapper) -> None:
    """Draw all laps at their speeds, in columns. Ctrl-C goes to the end."""
    end, start, height = max(lap.seconds for lap in laps), perf_counter(), 0
    with suppress(KeyboardInterrupt):
        while (now := perf_counter() - start) < end:
            height = _draw(laps, tokenizer, now, height)
            sleep(1 / FRAMES_PER_SECOND)
    _draw(laps, tokenizer, end, height)
    print("\n")


def _draw(laps: Sequence[Lap], tokenizer: TokenizerWrapper, seconds: float, drawn: int) -> int:
    """Draw a frame over the one before, of `drawn` lines. Return its height."""
    screen = shutil.get_terminal_size()
    width = max(8, (screen.columns - len(GAP) * (len(laps) - 1)) // len(laps))
    columns = []
    for lap in laps:
        *status, text = lap.at(seconds, tokenizer)
        head = [line for part in (name_of(lap.mode), *status) for line in wrapped(part, width)]
        columns.append(head + wrapped(text, width)[-max(1, screen.lines - len(laps) - 3 - len(head)) :])
    rows = [GAP.join(cells).rstrip() for cells in zip_longest(*columns, fillvalue=" " * width)]
    rows += [""] * (drawn - len(rows))
    up = f"\x1b[{drawn - 1}A\r" if drawn > 1 else "\r"
    print(up + "\n".join(f"{row}\x1b[K" for row in rows), end="", flush=True)
    return len(rows)


def wrapped(text: str, width: int) -> list[str]:
    """Return text in lines of exactly `width` cells of a terminal. Control characters become spaces."""
    lines = []
    for line in text.expandtabs(4).split("\n"):
        row, used = "", 0
        for char in line:
            cells = 0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1
            if used + cells > width:
                lines.append(row + " " * (width - used))
                row, used = "", 0
            row, used = row + (char if char.isprintable() else " "), used + cells
        lines.append(row + " " * (width - used))
    return lines
