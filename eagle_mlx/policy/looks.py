"""When to look at what does not lead, and which of those rounds tell what it takes."""

from __future__ import annotations

from eagle_mlx.policy.base import Shape

_EVERY = 32
"""Rounds from one look to the next."""
_CLOSE, _SELDOM = 0.85, 64
"""Where plain decoding has less than that share of the best speed, rounds from one look at it to the next."""
_FAR = 0.6
"""Where it has more than that, there are looks soon after drafting took the lead: plain rounds may have been measured
while the machine was busy, and drafts while it was not.
"""
_LOOK, _STEADY = 4, 3
"""Rounds of a look at plain decoding where it is nearly as fast, and the first of them that counts: in a run of plain
rounds each is launched before the one in front of it is read, so they take less than a single one behind a draft.
"""


class PlainLooks:
    """Counts rounds. `share` below is the speed of plain decoding, that of the best way to draft = 1."""

    def __init__(self) -> None:
        self.ahead = 0
        """Rounds for which drafting has led."""
        self._run = 0
        """Plain rounds since the last draft."""
        self._since = 0
        """Rounds since the last plain one."""

    def due(self, share: float) -> bool:
        """Whether the next round is to be plain: a few where that is nearly as fast, else one."""
        if share > _CLOSE and 0 < self._run < _LOOK:
            return True
        wait = _EVERY if share > _CLOSE else _SELDOM
        if share > _FAR:
            wait = min(wait, max(2, self.ahead // 2))
        return self._since >= wait

    def tells(self, share: float) -> bool:
        """Whether what the plain round that ends now took counts: where the race is close, only in a run of them."""
        return self._run + 1 >= _STEADY or share <= _CLOSE

    def count(self, plain: bool, drafting_leads: bool) -> None:
        """A round has ended."""
        self._run = self._run + 1 if plain else 0
        self._since = 0 if plain else self._since + 1
        self.ahead = self.ahead + 1 if drafting_leads else 0


class Visits:
    """Rounds of one shape in a row: the first of them takes what the shape before it left to do, and cold caches."""

    LENGTH = 3
    """Of a look at another shape."""

    def __init__(self) -> None:
        self.shape: Shape | None = None
        """Of the newest round."""
        self._rounds = 0
        self._asked = False

    @property
    def unfinished(self) -> bool:
        """Whether a look at this shape is to go on."""
        return self._asked and self._rounds < self.LENGTH

    def tells(self, shape: Shape) -> bool:
        """Whether what a round of `shape` took that ends now counts."""
        return shape == self.shape

    def count(self, shape: Shape, asked: bool) -> None:
        """A round has ended. asked: whether that was its shape from the beginning, and no row cut it."""
        self._rounds = self._rounds + 1 if shape == self.shape else 1
        self.shape, self._asked = shape, asked
