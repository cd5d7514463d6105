"""Division of a run's time between making data and learning, as pure functions of measurements."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 1 / 40
"""Share of the time for making the first portion. A head then drafts the second one after 1/20 of the time, and five
portions, each doubling the data, fill all of it."""
HELD_OUT = 1 / 100
"""Share of the time for making the held-out prompts."""
EVALUATION = 1 / 100
"""Share of the time for one measurement of acceptance. There are about six."""
_MEASURED = 1 / 4
"""Speed of a measurement relative to making data without drafts. On two cores a forward of SmolLM2 takes 88 ms for 8
tokens and 138 ms for 32, so 8 rows instead of 32 give 0.39 of the tokens. Useless drafts of 4 leave 0.6 of these."""
FEWEST_PROMPTS = 8
"""Minimum prompts of a measurement."""
WRITING = 1 / 500
"""Share of the time for writing the last files, report and plots."""
LONGEST = 1 / 4
"""Maximum share of the remaining time for a phase before the last, so that slow learning leaves time for new data."""
_WORTH = 0.1
"""A portion smaller than this share of the existing data is not worth making. The time goes to learning instead."""
COOLDOWN = 1 / 2
"""Minimum length of the last phase, as a share of all earlier learning. The learning rate falls over 0.4 of that phase,
which is a fifth of the earlier learning, as in Haegele et al. (2024, arXiv 2405.18392)."""
RATHER_LAST = 0.8
"""If learning needs this share of the remaining time, no other portion follows."""


@dataclass(frozen=True)
class Rates:
    """Tokens per second made and learned, as measured in this run."""

    made: float
    learned: float


@dataclass(frozen=True)
class Next:
    tokens: int
    """Tokens to make; 0 for none."""
    last: bool


def seconds_to_learn(made: int, learned: int, passes: int, rate: float) -> float:
    """Return the seconds left to complete `passes` over the `made` tokens at `rate` tokens per second."""
    return max(0.0, passes * made - learned) / rate


def next_portion(
    left: float, made: int, learned: int, passes: int, rates: Rates, fewest: int = 0, cooldown: float = 0.0
) -> Next:
    """Return a portion that doubles the data, or one that fills the remaining time if another would not fit after it.

    The latter has x tokens so that x / rates.made plus `seconds_to_learn` for made + x tokens equals the `left`
    seconds. A portion has at least `fewest` tokens: one batch of conversations, since fewer take as long. The last
    learning phase takes at least `cooldown` seconds.
    """
    room = left - seconds_to_learn(made, learned, passes, rates.learned)
    most = room / (1 / rates.made + passes / rates.learned)
    if passes * (made + most) - learned < cooldown * rates.learned:
        most = (left - cooldown) * rates.made
    as_much = max(made, fewest)
    if most < max(_WORTH * made, fewest):
        return Next(0, last=True)
    if most < 2 * as_much:
        return Next(max(1, round(most)), last=True)
    return Next(as_much, last=False)


def prompts_to_judge(asked: int, total: float, made: float, tokens: int) -> int:
    """Return how many prompts with `tokens` each fit into a measurement's time, if `made` tokens per second were made.

    At least `FEWEST_PROMPTS`, and otherwise at most `asked`.
    """
    return max(FEWEST_PROMPTS, min(asked, int(EVALUATION * total * made * _MEASURED / tokens)))
