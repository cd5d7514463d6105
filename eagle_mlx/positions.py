"""Learned positions: a table that nobody may read behind its end, where other memory lies."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

_TABLE = "wpe"
"""What mlx-lm's models with learned positions (gpt2, gpt_bigcode) call their table."""


def bound_positions(backbone: nn.Module) -> int | None:
    """Let the table of learned positions give its last entry for those behind it; how many it has, None without one.

    Rows near their context share forwards with rows that have more to draft. What is read behind a context is never
    kept, but has to be numbers: even what a mask hides is multiplied by nothing.
    """
    table = getattr(backbone, _TABLE, None)
    if not isinstance(table, nn.Embedding | nn.QuantizedEmbedding):
        return None
    if not isinstance(table, _Bounded):
        base = type(table)
        table.__class__ = type(base.__name__, (_Bounded, base), {"__module__": base.__module__})
    return int(table.weight.shape[0])


class _Bounded:
    """An embedding that is asked for no more than it holds."""

    def __call__(self, positions: mx.array) -> Any:
        return super().__call__(mx.minimum(positions, self.weight.shape[0] - 1))  # type: ignore[misc, attr-defined]
