"""How many tokens to draft in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eagle_mlx.errors import ConfigError


class Policy(Protocol):
    """Asked before each round, told after it."""

    def depth(self, rows: int) -> int:
        """Tokens to draft for each of `rows` rows now; 0 decodes plainly."""
        ...

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """A round drafted `drafted` tokens per row, of which row i accepted `accepted[i]`."""
        ...


@dataclass(frozen=True)
class FixedPolicy:
    """Always k draft tokens. Raises ConfigError where k is not a whole number of at least 0."""

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 0:
            raise ConfigError(f"k, the number of draft tokens, must be an integer of at least 0; got {self.k!r}")

    def depth(self, rows: int) -> int:
        return self.k

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Nothing to learn."""
