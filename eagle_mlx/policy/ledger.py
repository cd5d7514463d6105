"""What one way to draft has lost against another, so that what is tried costs no more than a share of the time."""

from __future__ import annotations


class Ledger:
    """Losses against a rival, beside all the time there was. Gains pay losses back, but are no licence for new ones."""

    def __init__(self, share: float):
        """`share`: of all time, what trying may lose."""
        self._share = share
        self._elapsed = self._lost = 0.0

    @property
    def allows(self) -> bool:
        """Whether what was lost is paid for."""
        return self._lost <= self._share * self._elapsed

    def pass_time(self, seconds: float) -> None:
        self._elapsed += seconds

    def enter(self, seconds: float, rival: float) -> None:
        """A round of what is tried took so long; its rival takes `rival` seconds for as many tokens."""
        self._lost = max(0.0, self._lost + seconds - rival)
