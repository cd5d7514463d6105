"""Choose the batch size and the number of passes from the amount of data.

A head needs updates more than large batches. Below the critical batch size, twice the batch saves no tokens, only
updates (McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162). So a step is as large as
leaves a run 1,000 to 2,000 updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import TrainConfig, TrainSettings, flag
from ..kinds import LARGEST_STEP
from .memory import Probe

UPDATES = 1000  # minimum updates of a run, if it has enough data for steps of `SMALLEST_STEP`
SMALLEST_STEP = 256  # tokens. Smaller steps were not tried (docs/decisions.md)
LONGEST_ROW = 1024  # tokens. The memory of attention grows with the square of a row
PASSES = 4
"""Repeated data is almost as good as new data for up to four passes (Muennighoff et al. 2023, Scaling Data-Constrained
Language Models, arXiv 2305.16264)."""
_REPEATS = 15.4  # number of repetitions after which repeating the data is worth little; R* in that paper's equation 5


@dataclass(frozen=True)
class BatchSizePlan:
    config: TrainSettings
    tokens: int  # tokens of training data, measured or planned
    updates: int
    seen: int  # tokens that the run learns from, counting repetitions
    about: str  # the chosen settings and the reason, in one line; empty if the user set all


def batches_for(
    config: TrainSettings,
    given: TrainConfig,
    tokens: int,
    long: int = LONGEST_ROW,
    speed: Probe | None = None,
    processes: int = 1,
) -> BatchSizePlan:
    """Return the settings with rows, length and passes for this much data, unless they are `given` by the user.

    `tokens`: of training data; for a run with `hours`, they are planned from `speed` instead. `long`: a length that
    nine of ten conversations do not exceed. A time limit without a known `speed` counts as no limit.
    """
    own = given.optimization
    passes = own.epochs or min(PASSES, max(1, math.ceil(2 * UPDATES * LARGEST_STEP / tokens)))
    seen = passes * tokens
    if speed is not None and own.hours:
        passes = own.epochs or best_passes(speed.written, speed.learned)
        tokens = round(3600 * own.hours / (1 / speed.written + passes / speed.learned))
        seen = passes * tokens
    elif speed is not None and own.minutes:
        seen = round(60 * own.minutes * speed.learned)
    room = seen // (own.max_steps or UPDATES) // processes
    if given.head.adapt:  # no larger than a probe has measured
        room = min(room, config.optimization.rows * config.optimization.length)
    rows, length = shape(room, long, own.rows, own.length)
    step = rows * length * processes
    chosen = {"rows": rows, "length": length, "epochs": passes}
    updates = own.max_steps or max(1, round(seen / step))
    limited = {"epochs"} if own.max_steps or own.minutes else set()  # passes do not limit such a run
    opened = [f"{flag(name)} {n}" for name, n in chosen.items() if given.value(name) is None and name not in limited]
    wanted = f"; {UPDATES:,} to {2 * UPDATES:,} are best" if not own.max_steps else ""
    about = f"{' '.join(opened)}: about {updates:,} updates from {tokens:,} tokens{wanted}"
    return BatchSizePlan(config.changed(**chosen), tokens, updates, updates * step, about if opened else "")


def typical(lengths: Sequence[int]) -> int:
    """Return a length that nine of ten conversations do not exceed."""
    return math.ceil(np.quantile(lengths, 0.9))


def shape(room: int, long: int, rows: int | None = None, length: int | None = None) -> tuple[int, int]:
    """Return rows and length of a step of at most `room` tokens, with those that are given.

    Both are powers of two. A row is as long as most conversations (`long`), but a step has at least two rows, which are
    computed in parallel, unless it is the smallest one.
    """
    room = _power(min(max(room, SMALLEST_STEP), LARGEST_STEP))
    if not length:
        most = min(_power(2 * long - 1), LONGEST_ROW, room // (rows or 2))
        length = _power(max(most, SMALLEST_STEP))
    return rows or max(1, _power(room // length)), length


def best_passes(written: float, learned: float) -> int:
    """Return the number of passes, 1 to 4, that makes most of a given time.

    `written`, `learned`: tokens per second made and learned. A token learned n + 1 times is worth
    1 + R* (1 - exp(-n / R*)) tokens learned once (Muennighoff et al. 2023, equation 5). Slow learning favors new data.
    """

    def worth(passes: int) -> float:
        return (1 + _REPEATS * (1 - math.exp(-(passes - 1) / _REPEATS))) / (1 / written + passes / learned)

    return max(range(1, PASSES + 1), key=worth)


def _power(number: int) -> int:
    """Return the largest power of two up to a number; 0 for 0."""
    return 1 << number.bit_length() - 1 if number else 0
