"""What drafts yield here and now: tokens expected of a chain by its depth, of a tree by its size."""

from __future__ import annotations

from collections.abc import Sequence


class AcceptanceByPosition:
    """The chance that the draft token at each position is kept, given that those before it were.

    Older rounds fade by 2 % with each new one, whatever its rows: in a batch there is the more to go by, and drafting
    that hardly pays must not be taken for noise. A position that no draft has reached yet has a guess.
    """

    _GUESS, _WEIGHT, _FADE = 0.7, 2.0, 0.98

    def __init__(self) -> None:
        self._tries: list[float] = []
        self._hits: list[float] = []

    def add(self, depth: int, accepted: Sequence[int]) -> None:
        """A round of `depth` draft tokens kept accepted[i] of them in row i; a row without drafts counts as refused."""
        new = max(0, depth - len(self._tries))
        self._tries += [self._WEIGHT] * new
        self._hits += [self._WEIGHT * self._GUESS] * new
        for position in range(depth):
            tries = sum(kept >= position for kept in accepted)
            hits = sum(kept > position for kept in accepted)
            if tries:
                self._tries[position] = self._tries[position] * self._FADE + tries
                self._hits[position] = self._hits[position] * self._FADE + hits

    def rate(self, position: int) -> float:
        return self._hits[position] / self._tries[position] if position < len(self._tries) else self._GUESS

    def expected_tokens(self, depth: int) -> float:
        """Tokens that a row emits in a round of this depth, the target's own included."""
        reached, tokens = 1.0, 1.0
        for position in range(depth):
            reached *= self.rate(position)
            tokens += reached
        return tokens


class AcceptanceByRank:
    """The chance that the node of each rank is kept, the likeliest first; older rounds fade by 2 % with each new one.

    Nodes are drafted in the order of what the proposer takes to be their chance. So the first n of a larger tree are
    the tree of n, and what each adds is seen whenever it is drafted.
    """

    _WEIGHT, _FADE = 2.0, 0.98

    def __init__(self) -> None:
        self._tries: list[float] = []
        self._hits: list[float] = []

    def add(self, nodes: int, kept: Sequence[Sequence[int]]) -> None:
        """Rows of `nodes` draft tokens kept those of the ranks kept[i]."""
        for rank in range(len(self._tries), nodes):
            self._tries.append(self._WEIGHT)
            self._hits.append(self._WEIGHT * self._guess(rank))
        for rank in range(nodes):
            self._tries[rank] = self._tries[rank] * self._FADE + len(kept)
            self._hits[rank] = self._hits[rank] * self._FADE + sum(rank in row for row in kept)

    def expected_tokens(self, nodes: int) -> float:
        """Tokens that a row emits in a round with so many draft tokens, the target's own included."""
        known = min(nodes, len(self._tries))
        seen = sum(hits / tries for hits, tries in zip(self._hits[:known], self._tries[:known], strict=True))
        return 1.0 + seen + sum(map(self._guess, range(known, nodes)))

    @staticmethod
    def _guess(rank: int) -> float:
        return 0.6 / (1 + rank)
