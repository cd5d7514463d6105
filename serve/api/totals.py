"""What the server has done so far, counted where it happens and read by the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from eagle_mlx.plan import RoundResult

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histograms' buckets."""
_ALPHA = 0.1
"""Weight of a round in the moving average of the acceptance rate."""


@dataclass
class Histogram:
    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    """By the bounds above; the last one takes what is beyond them."""
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


@dataclass
class Totals:
    """Numbers that only grow, but for the last round's.

    The engine's thread counts rounds, the event loop's counts requests; no number has two writers.
    """

    rounds: int = 0
    plain_rounds: int = 0
    """In which nothing was drafted for anybody."""
    row_rounds: int = 0
    """Rounds of single requests: target forwards as a request sees them."""
    drafts: int = 0
    """Rounds of single requests in which something was drafted."""
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    emitted: int = 0
    """Tokens that requests were given."""
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    depth: int = 0
    """Of the last round."""
    rounds_by_depth: Counter[int] = field(default_factory=Counter)
    """Rounds by the depth that the policy chose; of early exits, that at which they came."""
    acceptance_ema: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """By how they ended."""
    first_token: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)

    def observe(self, result: RoundResult) -> None:
        """A round has ended."""
        drafted, accepted, draft_seconds = sum(result.drafted), result.kept, result.draft_seconds or 0.0
        self.rounds += 1
        self.plain_rounds += drafted == 0
        self.row_rounds += sum(map(bool, result.taken))
        self.emitted += result.emitted
        self.verify_seconds += max(0.0, result.seconds - draft_seconds)
        self.draft_seconds += draft_seconds
        self.depth = result.plan.depth if result.plan.stop_below is None else result.depth
        self.rounds_by_depth[self.depth] += 1
        if not drafted:
            return
        rate = sum(accepted) / drafted
        self.acceptance_ema += (rate - self.acceptance_ema) * (_ALPHA if self.drafts else 1)
        self.drafts += sum(count > 0 for count in result.drafted)
        self.drafted += drafted
        self.accepted += sum(accepted)
        new = result.depth - len(self.accepted_by_position)
        self.accepted_by_position += [0] * max(0, new)
        for count in accepted:
            for position in range(count):
                self.accepted_by_position[position] += 1

    def ended(self, how: str, seconds: float) -> None:
        """A request has come to its end."""
        self.requests[how] += 1
        self.whole.add(seconds)
