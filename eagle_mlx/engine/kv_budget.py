"""Memory budget of the KV caches: which requests fit together, and which can never fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.memory import gb
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request import Request
from eagle_mlx.request_state import RequestState
from eagle_mlx.target import Target

GROUPS = 2
"""Maximum number of groups. A third would read the weights once more, but save less padding than the second."""
_OPEN_END = 2048
"""Most answers are shorter. Reserving the whole context would let few such requests decode together."""

Places = tuple[int, ...]
"""The group of each row, 0 or 1."""


def by_reach(reaches: Sequence[int], size: CacheSize, allowed: int) -> Places:
    """Return one group if it fits at the rows' reserved lengths, else the two groups with the least padding."""
    together = size.nbytes(len(reaches), max(reaches, default=0))
    return (0,) * len(reaches) if together <= allowed else split(reaches)


def split(lengths: Sequence[int]) -> Places:
    """Return the two groups with the least padding, the longest rows in group 1; one if a second saves nothing."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    longest = max(lengths, default=0)
    most, count = 0, 0
    for rows, (_, following) in enumerate(pairwise(order), 1):
        saved = (len(order) - rows) * (longest - lengths[following])
        if saved > most:
            most, count = saved, rows
    long = set(order[:count])
    return tuple(int(row in long) for row in range(len(lengths)))


def size_of(target: Target, proposer: Proposer | None, kv_bits: int | None) -> CacheSize:
    """Return the cache size of a target and its proposer. Nothing is evaluated: only shapes matter."""
    cache = RaggedCache.of(target.model, 1, kv_bits)
    target.forward(mx.zeros((1, 1), mx.int32), cache)
    own = CacheSize.of(cache)
    return own + proposer.cache_size() if proposer is not None else own


class KVBudget:
    """Limit of bytes for the KV caches of rows and of the prefix cache.

    All rows of a group take as much memory as the longest, so long and short rows may fit only in separate groups.
    """

    def __init__(self, nbytes: int, size: CacheSize, context: int, groups: int = 1):
        self.nbytes, self.size, self.groups = nbytes, size, groups
        self.open_end = _OPEN_END
        """Tokens reserved beyond the current length of a request without a token limit."""
        self.longest = bisect_right(range(1, context + 1), nbytes, key=lambda length: size.nbytes(1, length))
        """Maximum positions of a single row."""

    def limited(self, request: Request) -> Request:
        """Return the request with a limit that fits. Raises PromptError if it does not fit even alone.

        A request without a token limit gets as many tokens as fit, and then ends with `length`.
        """
        prompt = len(request.prompt)
        if prompt + (1 if _is_open(request) else request.limit) > self.longest:
            wanted = prompt if _is_open(request) else prompt + request.limit
            more = "" if _is_open(request) else f" and {request.limit} to generate"
            raise PromptError(
                f"a prompt of {prompt} tokens{more} needs a KV cache of {gb(self.size.nbytes(1, wanted))}, but the "
                f"limit is {gb(self.nbytes)}, enough for {self.longest} tokens; shorten the request, or raise the "
                "limit with kv_bytes (--kv-gb)"
            )
        return replace(request, limit=min(request.limit, self.longest - prompt))

    def reach(self, request: RequestState) -> int:
        """Return the positions reserved for a request."""
        most = len(request.prompt) + request.limit
        return min(most, request.length + self.open_end) if _is_open(request) else most

    def set_aside(self, requests: Sequence[RequestState]) -> int:
        """Return the bytes reserved for these requests together."""
        grouped = self._grouped(requests)
        return sum(self.size.nbytes(len(group), max(map(self.reach, group))) for group in grouped)

    def fits(self, requests: Sequence[RequestState]) -> bool:
        """Return whether these requests may decode together. A single request always may."""
        return len(requests) <= 1 or self.set_aside(requests) <= self.nbytes

    def are_together(self, some: Sequence[RequestState], others: Sequence[RequestState]) -> bool:
        """Return whether the requests in `some` share a group if memory decides."""
        return any(set(some) <= set(group) for group in self._grouped([*some, *others]))

    def used(self, groups: Sequence[Sequence[RequestState]], size: CacheSize | None = None) -> int:
        """Return an upper bound of the bytes that these groups take now; `size`: of a part of the caches only."""
        lengths, size = [[request.length for request in group] for group in groups], size or self.size
        return sum(size.nbytes(len(group), max(group, default=0)) for group in lengths)

    def _grouped(self, requests: Sequence[RequestState]) -> list[list[RequestState]]:
        """Return the groups that memory requires, without empty ones."""
        if self.groups == 1:
            return [list(requests)] if requests else []
        places = by_reach([self.reach(request) for request in requests], self.size, self.nbytes)
        split = [[each for each, place in zip(requests, places, strict=True) if place == at] for at in range(GROUPS)]
        return [group for group in split if group]


def check_settings(sizes: Mapping[str, int], prefill_ms: float, kv_bits: int | None, groups: int) -> None:
    """Raise ConfigError if a setting of the engine is invalid. `sizes`: values that must be at least 1, by name."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} must be at least 1; got {size}")
    if not prefill_ms > 0:
        raise ConfigError(f"prefill_ms must be above 0; got {prefill_ms}")
    if not 1 <= groups <= GROUPS:
        raise ConfigError(f"groups must be 1 or {GROUPS}; got {groups!r}")
    if kv_bits not in (None, 4, 8):
        raise ConfigError(f"kv_bits must be 4, 8 or None; got {kv_bits!r}")


def _is_open(request: Request | RequestState) -> bool:
    """Return whether context or memory limits the request, not its own `max_tokens`."""
    return request.limit < request.params.max_tokens
