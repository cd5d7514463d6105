"""How fast the machine is just now: what rounds take is compared as if it were always the same."""

from __future__ import annotations


class Swings:
    """The machine's speed, from rounds of which it is known what they take.

    Other work, heat and clocks change it by tens of percent within seconds, while rounds of some shapes are seen once
    in a minute. What was measured at different times is made comparable by this common factor, followed from round to
    round whatever their shapes.
    """

    _FOLLOWS = 0.15
    """How much of a difference each round makes up for."""
    _MOST = 1.3
    """A round that is off by more than this factor may have been an accident, and counts as if it were off by that."""
    _FORGETS = 0.005
    """How much of the factor each round takes back: what shapes that are not seen any more took was found long ago, and
    would else be compared with a speed that has wandered off.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        """Seconds that a round takes now, those that it takes at the usual speed = 1."""

    def steadied(self, seconds: float, usual: float | None) -> float:
        """What a round would have taken at the usual speed.

        usual: what such rounds were found to take at it; None where that is not known.
        """
        if usual:
            off = seconds / (usual * self.factor)
            self.factor *= min(max(off, 1 / self._MOST), self._MOST) ** self._FOLLOWS
        self.factor **= 1 - self._FORGETS
        return seconds / self.factor
