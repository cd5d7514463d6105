"""Compare two ways to decode the same texts, conversation by conversation: the gain, its interval and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

Verdict = Literal["better", "worse", "not told apart"]
CONFIDENCE = 0.95
POWER = 0.8
"""The chance that a comparison of `Gain.needed` conversations tells the two apart: the convention of Cohen (1988)."""
LEAST_GAIN = 0.01
"""`Gain.needed` is for a gain of at least this size: smaller ones need more prompts than they are worth."""
FEWEST = 6
"""Conversations for a verdict. If fewer agree, even a sign test does not reach 2.5 % on one side (2^-5 is 3.1 %)."""


@dataclass(frozen=True)
class Decoded:
    """The tokens of a conversation, bonus tokens included, and the target forwards that they took."""

    tokens: int
    rounds: int


@dataclass(frozen=True)
class Gain:
    """The gain of the second of two over the first: 0.03 is 3 % more."""

    gain: float
    low: float | None
    high: float | None
    """The 95 % confidence interval over conversations; None if there are too few."""
    verdict: Verdict
    conversations: int
    needed: int | None
    """Conversations that tell a gain of this size, but at least 1 %, in 80 % of comparisons; None if unknown."""

    @property
    def advice(self) -> str:
        """Advice after a comparison that told nothing apart."""
        if self.needed is None:
            return f"give at least {FEWEST} prompts whose answers do not loop"
        more, size = self.needed - self.conversations, f"{max(abs(self.gain), LEAST_GAIN):.1%}"
        if more > 0:
            return f"about {more:,} prompt{'s' * (more > 1)} more would tell a difference of {size}"
        return f"a difference of {size} would probably have been told"

    @property
    def interval(self) -> str:
        """The gain in percent, with its interval if there is one."""
        if self.low is None or self.high is None:
            return f"{self.gain:+.1%}"
        return f"{self.gain:+.1%} ({self.low:+.1%} to {self.high:+.1%})"

    def __str__(self) -> str:
        return f"{self.interval}, {self.verdict}"


def tau(decoded: Sequence[Decoded]) -> float:
    """Return τ over all conversations: tokens per target forward; 0 without any."""
    return sum(part.tokens for part in decoded) / max(1, sum(part.rounds for part in decoded))


def tau_interval(decoded: Sequence[Decoded]) -> float | None:
    """Return the half-width of the 95 % confidence interval of τ over conversations; None for fewer than six.

    τ is a ratio of sums: conversations are independent, but the rounds of one are not (Cochran 1977, section 6.3).
    """
    number, rounds = len(decoded), sum(part.rounds for part in decoded)
    if number < FEWEST:
        return None
    spread = sum((part.tokens - tau(decoded) * part.rounds) ** 2 for part in decoded)
    deviation = math.sqrt(spread * number / (number - 1)) / max(1, rounds)
    return t_quantile((1 + CONFIDENCE) / 2, number - 1) * deviation


def gain_of(first: Sequence[Decoded], second: Sequence[Decoded], factor: float = 1.0) -> Gain:
    """Return the gain in τ of `second` over `first`, which decoded the same conversations in the same order.

    `factor` multiplies the ratio: the first's seconds per round over the second's give a gain in speed. Its own error
    is not in the interval. Conversations are independent, but the rounds of one are not. The statistic is the logarithm
    of the ratio of two ratios of sums; its standard error is linearized (Cochran 1977, section 6.3), and the interval
    uses Student's t. With few conversations, the percentiles of a bootstrap are too narrow.

    Raises ValueError if the numbers of conversations differ.
    """
    pairs = zip(first, second, strict=True)
    counts = np.array([(a.tokens, a.rounds, b.tokens, b.rounds) for a, b in pairs], np.float64).reshape(-1, 4)
    number, signs = len(counts), np.array([-1.0, 1.0, 1.0, -1.0])
    if not number:
        return Gain(0.0, None, None, "not told apart", 0, None)
    means = counts.mean(axis=0)
    # Sums of whole numbers: the gain of equal ratios is exactly 0, not the rounding of four logarithms.
    a_tokens, a_rounds, b_tokens, b_rounds = counts.sum(axis=0)
    gain = float(np.log(b_tokens * a_rounds / (a_tokens * b_rounds))) + math.log(factor)
    if number < FEWEST:
        return Gain(math.expm1(gain), None, None, "not told apart", number, None)
    deviation = float(np.std(counts / means @ signs, ddof=1))
    half = t_quantile((1 + CONFIDENCE) / 2, number - 1) * deviation / math.sqrt(number)
    low, high = gain - half, gain + half
    verdict: Verdict = "better" if low > 0 else "worse" if high < 0 else "not told apart"
    needed = conversations_for(math.expm1(abs(gain)), deviation)
    return Gain(math.expm1(gain), math.expm1(low), math.expm1(high), verdict, number, needed)


def conversations_for(gain: float, deviation: float) -> int:
    """Return the number of conversations that tell a gain, but at least `LEAST_GAIN`, from none.

    deviation: the standard deviation of one conversation's logarithm of the ratio. The usual size of a paired
    comparison: ((z_0.975 + z_0.8) deviation / difference)² (Lachin 1981, Controlled Clinical Trials 2, page 93).
    """
    quantiles = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) + NormalDist().inv_cdf(POWER)
    return max(FEWEST, math.ceil((quantiles * deviation / math.log1p(max(gain, LEAST_GAIN))) ** 2))


def t_quantile(p: float, degrees: int) -> float:
    """Return a quantile of Student's t with at least five degrees of freedom, to 0.001.

    Source: the expansion in 1 / degrees of Abramowitz and Stegun (1964), 26.7.5.
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / degrees**power for power, term in enumerate(terms)))
