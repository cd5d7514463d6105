"""The shortcuts of a CPU, turned off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from eagle_mlx import cpu


@contextmanager
def without_shortcuts() -> Iterator[None]:
    """Compute as on a GPU within the block, in all threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "switched_on", False)
        yield
