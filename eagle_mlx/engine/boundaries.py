"""Where in a prompt a snapshot is worth its place: other prompts may begin as this one does up to there."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_mlx.engine.prefix import LEAST


def stops(boundaries: Sequence[int], prompt: int, known: int = 0) -> list[int]:
    """Positions after which snapshots are to be taken, in order.

    boundaries: tokens that other prompts are expected to have in common with this one; all `prompt` tokens of it are
    always one. known: positions that need not be read. The last token of each is left out, as are a prompt's last two:
    what is kept of a position depends on the token after it (`PrefixCache.find`). Of two that are closer than `LEAST`
    the first is taken, which serves more prompts.
    """
    found = list[int]()
    for boundary in sorted({*boundaries, prompt}):
        stop = min(boundary - 1, prompt - 2)
        if stop >= (found[-1] if found else known) + LEAST:
            found.append(stop)
    return found
