"""How much time drafting and exploring may lose."""

from __future__ import annotations

import math


class RegretBudget:
    """The regret that is allowed against something better: a share of all time. Gains pay it back."""

    def __init__(self, share: float):
        self._share = share
        self._spent = self._lost = 0.0

    def allows(self, loss: float = 0.0, free: float = 0.0) -> bool:
        """Whether so many seconds more may be lost, where `free` of all are not counted."""
        return self._lost + max(0.0, loss) <= self._share * self._spent + free

    def record(self, seconds: float, better: float | None = None, most: float = math.inf) -> None:
        """A round took so long; where it is known to be worse, what would have taken `better` for as many tokens.

        `most`: of what it loses only so much counts, with all that was lost before.
        """
        self._spent += seconds
        if better is not None:
            lost = self._lost + seconds - better
            self._lost = max(0.0, min(lost, max(most, self._lost)))
