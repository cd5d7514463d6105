"""How the time is divided between making data and learning from them: pure functions of what was measured."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 1 / 40
"""Share of the time after which the first portion is enough: the second has a head to draft it after a twentieth of
the night, and five portions that double the data make up all of it."""
HELD_OUT = 1 / 100
"""Share of the time for making the prompts that heads are judged on."""
EVALUATION = 1 / 100
"""Share of the time for one measurement of acceptance, of which there are about six."""
_JUDGED = 1 / 4
"""Speed of a measurement beside that of making plainly. On two cores a forward of SmolLM2 takes 88 ms for 8 tokens and
138 for 32: 8 rows in place of 32 give 0.39 of the tokens. A draft of 4 that is no good leaves 0.6 of these."""
FEWEST_PROMPTS = 8
"""Prompts that a measurement has in any case."""
WRITING = 1 / 500
"""Share of the time for the last files, report and pictures."""
LONGEST = 1 / 4
"""Share of the time that is left that a phase may learn before the last one: a head that learns slowly still gets new
data."""
_WORTH = 0.1
"""A portion below this share of the data that are there is not worth its making: the time goes to learning."""
_COOLDOWN = 1 / 2
"""Share of all earlier learning that the last phase takes at least. The rate falls over 0.4 of that phase, thus over a
fifth of the earlier learning, as Haegele et al. (2024, arXiv 2405.18392) have it."""
_RATHER_LAST = 0.8
"""Where learning needs this share of the time that is left no other portion follows."""


@dataclass(frozen=True)
class Rates:
    """Tokens a second, as this run has measured them."""

    made: float
    learnt: float


@dataclass(frozen=True)
class Deadline:
    """The time by which the making of a portion must end, so that all its tokens can still be learned from."""

    end: float
    """Second of the run by which learning is over."""
    made: int
    """Tokens of the portions before."""
    learnt: int
    passes: int
    rate: float
    """Tokens learned a second."""
    cooldown: float = 0.0
    """Seconds that the last phase of learning takes at least."""
    fresh: int = 0
    """Tokens of earlier portions that were not all learned: they come first again, together with the new ones."""

    def left(self, now: float, tokens: int) -> float:
        """Seconds left for making at second `now`, if the portion has so many tokens. Each is learned at least once."""
        passes = seconds_to_learn(self.made + tokens, self.learnt, self.passes, self.rate)
        return self.end - now - max(passes, (self.fresh + tokens) / self.rate, self.cooldown)


@dataclass(frozen=True)
class Next:
    """The portion that comes next."""

    tokens: int
    """To be made; 0 for none."""
    last: bool


def seconds_to_learn(made: int, learnt: int, passes: int, rate: float) -> float:
    """What is left of so many passes over the tokens that are made, at so many tokens a second."""
    return max(0.0, passes * made - learnt) / rate


def seconds_to_cool(learnt: float) -> float:
    """What the last phase takes at least after so many seconds of learning."""
    return _COOLDOWN * learnt


def seconds_to_end(coming: int, rate: float) -> float:
    """What conversations under way take, of whose tokens half are written, at so many tokens a second."""
    return coming / 2 / rate


def next_portion(
    left: float, made: int, learnt: int, passes: int, rates: Rates, fewest: int = 0, cooldown: float = 0.0
) -> Next:
    """As much again as is there, unless less than that would remain for yet another portion: then all that can be.

    All that can be is the number x of tokens for which x / rates.made, and what `seconds_to_learn` says of made + x,
    are the `left` seconds. A portion has at least the `fewest` tokens: those of one batch of conversations, since
    fewer do not come sooner. The learning after the last one takes at least the `cooldown` seconds.
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
    """Whether learning what is there takes the rest of the time, so that nothing is made behind it."""
    return to_learn >= _RATHER_LAST * left


def prompts_to_judge(asked: int, total: float, made: float, tokens: int) -> int:
    """How many prompts of so many tokens each can be decoded in a measurement's share of the time, judged by how many
    tokens a second were made."""
    return max(FEWEST_PROMPTS, min(asked, int(EVALUATION * total * made * _JUDGED / tokens)))
