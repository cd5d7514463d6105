"""What a request waits for, in words for who waits with it."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_mlx.engine import Engine
from eagle_mlx.request import Request


def waits_for(engine: Engine, requests: Sequence[Request], with_counts: bool = True) -> str | None:
    """What requests wait for that have no token yet: their turn, or their prompts to be read.

    None where there is nothing to tell of either, and where the prompts are short: those are read in one step. Called
    beside the engine's thread, which may be a step farther by then; it is asked nothing, and waits for nothing.

    with_counts: whether to tell how many tokens have been read, those from the prefix cache among them.
    """
    begun = [request for request in requests if request.read_tokens]
    if begun:
        read, prompts = sum(each.read_tokens for each in begun), sum(len(each.prompt) for each in begun)
        is_long = any(len(each.prompt) - 1 > engine.prefill_chunk for each in begun)
        counts = f", {read} of {prompts} tokens" if with_counts else ""
        return f"reading the prompt{counts}" if is_long else None
    places = [place for place in map(engine.before, requests) if place is not None]
    if not places:
        return None
    return f"waiting, {min(places)} request{'' if min(places) == 1 else 's'} before this one"
