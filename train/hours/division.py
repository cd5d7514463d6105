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
_JUDGED = 1 / 4
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
_COOLDOWN = 1 / 2
"""Minimum length of the last phase, as a share of all earlier learning. The learning rate falls over 0.4 of that phase,
which is a fifth of the earlier learning, as in Haegele et al. (2024, arXiv 2405.18392)."""
_RATHER_LAST = 0.8
"""If learning needs this share of the remaining time, no other portion follows."""


@dataclass(frozen=True)
class Rates:
    """Tokens per second made and learned, as measured in this run."""

    made: float
    learnt: float


@dataclass(frozen=True)
class Deadline:
    """The time by which making a portion must end, so that all its tokens can still be learned."""

    end: float
    """Second of the run at which learning must be over."""
    made: int
    """Tokens of earlier portions."""
    learnt: int
    passes: int
    rate: float
    """Tokens learned per second."""
    cooldown: float = 0.0
    """Minimum seconds of the last learning phase."""
    fresh: int = 0
    """Tokens of earlier portions that were not completely learned. They come first again, with the new ones."""

    def left(self, now: float, tokens: int) -> float:
        """Return the seconds left for making data at second `now`, if each of the portion's `tokens` is learned."""
        passes = seconds_to_learn(self.made + tokens, self.learnt, self.passes, self.rate)
        return self.end - now - max(passes, (self.fresh + tokens) / self.rate, self.cooldown)


@dataclass(frozen=True)
class Next:
    tokens: int
    """Tokens to make; 0 for none."""
    last: bool


def seconds_to_learn(made: int, learnt: int, passes: int, rate: float) -> float:
    """Return the seconds left to complete `passes` over the `made` tokens at `rate` tokens per second."""
    return max(0.0, passes * made - learnt) / rate


def seconds_to_cool(learnt: float) -> float:
    """Return the minimum seconds of the last phase after this many seconds of learning."""
    return _COOLDOWN * learnt


def seconds_to_end(coming: int, rate: float) -> float:
    """Return the seconds to finish current conversations, assuming that half of their tokens are written."""
    return coming / 2 / rate


def next_portion(
    left: float, made: int, learnt: int, passes: int, rates: Rates, fewest: int = 0, cooldown: float = 0.0
) -> Next:
    """Return a portion that doubles the data, or one that fills the remaining time if another would not fit after it.

    The latter has x tokens so that x / rates.made plus `seconds_to_learn` for made + x tokens equals the `left`
    seconds. A portion has at least `fewest` tokens: one batch of conversations, since fewer take as long. The last
    learning phase takes at least `cooldown` seconds.
    """
    room = left - seconds_to_learn(made, learnt, passes, rates.learnt)
    most = room / (1 / rates.made + passes / rates.learnt)
    if passes * (made + most) - learnt < cooldown * rates.learnt:
        most = (left - cooldown) * rates.made
    as_much = max(made, fewest)
    if most < max(_WORTH * made, fewest):
        return Next(0, last=True)
    if most < 2 * as_much:
        return Next(max(1, round(most)), last=True)
    return Next(as_much, last=False)


def is_last(left: float, to_learn: float) -> bool:
    """Return whether learning the existing data takes the rest of the time, so that no more is made."""
    return to_learn >= _RATHER_LAST * left


def prompts_to_judge(asked: int, total: float, made: float, tokens: int) -> int:
    """Return how many prompts with `tokens` each fit into a measurement's time, if `made` tokens per second were made.

    At least `FEWEST_PROMPTS`, and otherwise at most `asked`.
    """
    return max(FEWEST_PROMPTS, min(asked, int(EVALUATION * total * made * _JUDGED / tokens)))
