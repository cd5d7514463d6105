"""What a run of so many hours comes to: tokens made and learnt by formula, and τ by a curve that was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle_mlx.data_pipelines import FIRST_ROWS
from eagle_mlx.errors import ConfigError
from eagle_mlx.progress import counted, tokens_per_second

from ..config import TrainConfig
from . import estimate
from .division import EVALUATION, FIRST, HELD_OUT, LONGEST, WRITING, Rates, is_last, next_portion, seconds_to_learn
from .shapes import HeadShape, TargetShape

CURVES = Path(__file__).parent / "curves.yaml"
_TOKENS = 1_000_000
"""For which work is asked, so that what is counted once for a run is nothing."""


@dataclass(frozen=True)
class Outlook:
    """What a run comes to."""

    portions: tuple[int, ...]
    """Tokens made in each."""
    learnt: int
    """Tokens learnt from, as often as they are."""

    @property
    def made(self) -> int:
        return sum(self.portions)


@dataclass(frozen=True)
class Curve:
    """tau = a + b * log10(tokens), as it was measured."""

    a: float
    b: float
    tokens: tuple[float, float]
    """From the fewest to the most that it was measured at."""
    model: str
    source: str

    def tau(self, tokens: int) -> float:
        """By the line alone, which falls below any possible τ if there are too few tokens."""
        return self.a + self.b * math.log10(max(1, tokens))


def rates_of(target: TargetShape, head: HeadShape, config: TrainConfig, work: float, read: float) -> Rates:
    """Tokens a second made and learnt, without a head that drafts.

    `work` are operations a second in products of matrices, `read` bytes a second that a product with one vector reads.
    A forward reads all weights once for all that decode at once, or computes as long as that takes. It is that of the
    first rows; where more pay, the run finds out.
    """
    computed = estimate.hours(2 * FIRST_ROWS * (target.used + target.hidden_size * target.vocab_size), work) * 3600
    forward = max(target.weights / read, computed)
    captured = 2 * target.used * _TOKENS
    learning = estimate.work_of(target, head, config, _TOKENS, online=False) - captured
    a_token = estimate.hours(learning, work) * 3600 / (_TOKENS * config.optimization.epochs)
    return Rates(FIRST_ROWS / forward, 1 / a_token)


def outlook(total: float, passes: int, rates: Rates) -> Outlook:
    """The phases of a run of so many seconds, one after the other, as the run itself divides its time."""
    left = total * (1 - HELD_OUT - EVALUATION - WRITING)
    portions: list[int] = []
    learnt = 0.0
    last, tokens = False, round(FIRST * total * rates.made)
    while True:
        if tokens:
            portions.append(tokens)
        left -= tokens / rates.made + EVALUATION * total
        needed = seconds_to_learn(sum(portions), round(learnt), passes, rates.learnt)
        last = last or (len(portions) > 1 and is_last(left, needed))
        seconds = min(needed, LONGEST * max(0.0, left))
        then, after = learnt + seconds * rates.learnt, left - seconds
        following = next_portion(after - EVALUATION * total, sum(portions), round(then), passes, rates)
        if last or not following.tokens:
            return Outlook(tuple(portions), round(learnt + max(0.0, left) * rates.learnt))
        learnt, left = then, after
        last, tokens = following.last, following.tokens


def curve_of(kind: str, file: Path = CURVES) -> Curve | None:
    """What was measured for a kind of head, None where nothing was. Raises ConfigError for a file that is damaged."""
    try:
        found: Any = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get(kind)
        return Curve(**{**found, "tokens": tuple(found["tokens"])}) if found else None
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as e:
        raise ConfigError(f"{file} cannot be read: {e}; each kind has a, b, tokens, model and source") from e


def rows_of(config: TrainConfig, rates: Rates, found: Outlook, curve: Curve | None) -> list[tuple[str, str]]:
    """The lines of a plan: what is made, what is learnt, what τ to expect."""
    count = len(found.portions)
    return [
        (
            "made",
            f"about {counted(found.made, 'token')} in {counted(count, 'portion')}, at {tokens_per_second(rates.made)} "
            "while nothing drafts: sooner with the head, by as much as it turns out to be worth",
        ),
        ("learnt", f"about {counted(found.learnt, 'token')}, at {tokens_per_second(rates.learnt)}"),
        ("τ", _expected(config.head.kind, found.made, curve)),
    ]


def _expected(kind: str, tokens: int, curve: Curve | None) -> str:
    if curve is None:
        return f"not foretold: no curve was measured for --head {kind} ({CURVES.name})"
    least, most = curve.tokens
    if curve.tau(tokens) <= 1:  # each forward of the target emits a token, whatever the head drafts
        return f"not predicted: {counted(tokens, 'token')} are too few, the curve was measured from {least:,.0f} on"
    beyond = "" if least <= tokens <= most else f", beyond the {least:,.0f} to {most:,.0f} tokens that were measured"
    return (
        f"about {curve.tau(tokens):.2f} after {tokens:,} tokens, as {curve.model} had it{beyond} ({curve.source}); "
        "other models differ"
    )
