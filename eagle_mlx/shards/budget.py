"""Where hidden states go: kept in memory, kept on the disk, or made anew for every batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .format import ShardMeta, bytes_per_token

Place = Literal["memory", "disk", "online"]


@dataclass(frozen=True)
class CacheChoice:
    place: Place
    """`memory` and `disk` are captured once; `online` is captured for each batch and keeps nothing."""
    size: int
    """Bytes that the states would take at `place`; for `online`, those that they would have taken on the disk."""
    text: str
    """The estimate and the choice in one line."""


def states_bytes(tokens: int, meta: ShardMeta) -> int:
    """Bytes of so many tokens with their states, in `meta.bits`."""
    return tokens * bytes_per_token(meta)


def choose_cache(tokens: int, meta: ShardMeta, cache: float, memory: float, disk: float) -> CacheChoice:
    """Memory where the states in float16 fit into it, else the disk where `meta.bits` fit, else online.

    `cache` is the most that a cache may take anywhere, `memory` what of the memory is left for it, `disk` what is free
    where it would stand; all in bytes.
    """
    in_memory = states_bytes(tokens, ShardMeta(meta.target, meta.hidden_size, meta.vocab_size, meta.aux_layers))
    on_disk = states_bytes(tokens, meta)
    layers = len(meta.aux_layers) + 1
    what = f"hidden states of {tokens:,} tokens, {layers} layer{'s' * (layers > 1)} of {meta.hidden_size:,} values"
    if in_memory <= min(cache, memory):
        return CacheChoice("memory", in_memory, f"{what}: {gb(in_memory)} in 16 bits, captured once, kept in memory")
    if on_disk <= min(cache, disk):
        text = f"{what}: {gb(on_disk)} in {meta.bits} bits, captured once, kept on the disk"
        return CacheChoice("disk", on_disk, text)
    limit = f"the cache of {gb(cache)}" if cache <= disk else f"the {gb(disk)} that are free on the disk"
    text = f"{what}: {gb(on_disk)} in {meta.bits} bits, more than {limit}, so captured anew for each batch"
    return CacheChoice("online", on_disk, text)


def gb(size: float) -> str:
    """Bytes in words."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
