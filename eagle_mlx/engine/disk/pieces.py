"""Pieces of texts in the host's memory, cut into blocks to be written and put together when they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.cache.pieces import KVPiece
from eagle_mlx.cache.ragged import RaggedCache
from eagle_mlx.engine.disk.file import Tensor, joined, on_host
from eagle_mlx.engine.prefix_piece import PrefixPiece
from eagle_mlx.proposers.head_piece import Gap, HeadPiece, gaps_between, slots_before

_Layers = list[list[Tensor]]
"""Layer by layer [1, heads, L, D], as in `KVPiece`."""


@dataclass(frozen=True)
class HostPiece:
    """What target and head have of the positions `start` to `end` of a text."""

    start: int
    end: int
    target: _Layers
    head: _Layers | None = None
    """None where the proposer keeps nothing of the target's hidden states."""
    gaps: tuple[Gap, ...] = ()
    """What the head leaves out."""

    @classmethod
    def of(cls, start: int, end: int, piece: PrefixPiece) -> HostPiece:
        """Without a copy where the arrays have been computed."""
        tensors = iter(on_host(piece.arrays))
        target = [list(islice(tensors, len(layer))) for layer in piece.target.layers]
        if piece.state is None:
            return cls(start, end, target)
        assert isinstance(piece.state, HeadPiece)
        head = [list(islice(tensors, len(layer))) for layer in piece.state.entries.layers]
        return cls(start, end, target, head, tuple(piece.state.gaps))

    @classmethod
    def cut(cls, pieces: Sequence[HostPiece], start: int, end: int) -> HostPiece:
        """The positions `start` to `end`, of pieces one behind the other that hold these and maybe others."""
        ours = [piece for piece in pieces if piece.start < end and piece.end > start]
        ranges = [(max(start, piece.start) - piece.start, min(end, piece.end) - piece.start) for piece in ours]
        target = _cut([piece.target for piece in ours], ranges)
        heads = [piece.head for piece in ours if piece.head is not None]
        if not heads:
            return cls(start, end, target)
        slots, gaps, before = list[tuple[int, int]](), list[Gap](), 0
        for piece, (first, last) in zip(ours, ranges, strict=True):
            slots.append((slots_before(piece.gaps, first), slots_before(piece.gaps, last)))
            gaps += [Gap(before + gap.slot, gap.count) for gap in gaps_between(piece.gaps, first, last)]
            before += slots[-1][1] - slots[-1][0]
        return cls(start, end, target, _cut(heads, slots), tuple(gaps))

    def on_device(self) -> PrefixPiece:
        target = KVPiece([[x.on_device() for x in layer] for layer in self.target])
        if self.head is None:
            return PrefixPiece(target, None)
        entries = KVPiece([[x.on_device() for x in layer] for layer in self.head])
        return PrefixPiece(target, HeadPiece(entries, list(self.gaps), self.end - self.start))

    @property
    def tensors(self) -> dict[str, Tensor]:
        parts = {"target": self.target} | ({} if self.head is None else {"head": self.head})
        return {
            f"{part}.{i}.{j}": x
            for part, layers in parts.items()
            for i, of in enumerate(layers)
            for j, x in enumerate(of)
        }

    @property
    def about(self) -> str:
        """All but the tensors, as JSON."""
        head = None if self.head is None else list(map(len, self.head))
        gaps = [[gap.slot, gap.count] for gap in self.gaps]
        shape = {"start": self.start, "end": self.end, "target": list(map(len, self.target)), "head": head}
        return json.dumps({**shape, "gaps": gaps}, separators=(",", ":"))

    @classmethod
    def read(cls, about: str, tensors: Mapping[str, Tensor]) -> HostPiece:
        """What `about` and `tensors` gave."""
        found = json.loads(about)
        head = None if found["head"] is None else _layers("head", found["head"], tensors)
        gaps = tuple(Gap(slot, count) for slot, count in found["gaps"])
        return cls(found["start"], found["end"], _layers("target", found["target"], tensors), head, gaps)


def _layers(part: str, counts: Sequence[int], tensors: Mapping[str, Tensor]) -> _Layers:
    return [[tensors[f"{part}.{i}.{j}"] for j in range(count)] for i, count in enumerate(counts)]


def _cut(pieces: Sequence[_Layers], ranges: Sequence[tuple[int, int]]) -> _Layers:
    """Of each piece the entries of a range, one behind the other, layer by layer."""
    found = _Layers()
    for layers in zip(*pieces, strict=True):
        written = [(layer, span) for layer, span in zip(layers, ranges, strict=True) if layer]
        count = len(written[0][0]) if written else 0
        found.append([joined([layer[j].cut(*span) for layer, span in written]) for j in range(count)])
    return found


def arrays_of(outline: RaggedCache) -> dict[str, mx.array]:
    """The windows and states of an outline (`RaggedCache.outline`), by names that `outline_from` knows."""
    windows = {f"window.{i}.{j}": x for i, window in enumerate(outline.windows) for j, x in enumerate(window.state)}
    states = {
        f"state.{i}.{j}": x
        for i, state in enumerate(outline.recurrent)
        for j, x in enumerate(state.cache)
        if x is not None
    }
    return windows | states


def numbers_of(outline: RaggedCache) -> dict[str, Any]:
    """What else belongs to an outline, as plain values."""
    return {"length": outline.lengths.upper, "displaced": [window._displaced[0] for window in outline.windows]}


def outline_from(
    model: nn.Module, kv_bits: int | None, arrays: Mapping[str, mx.array], numbers: Mapping[str, Any]
) -> RaggedCache:
    """The outline that these came from, of the same model."""
    cache = RaggedCache.of(model, 1, kv_bits)
    cache.lengths.sync([numbers["length"]])
    for i, (window, displaced) in enumerate(zip(cache.windows, numbers["displaced"], strict=True)):
        window.keys, window.values = arrays.get(f"window.{i}.0"), arrays.get(f"window.{i}.1")
        window._displaced = [displaced]
    for i, state in enumerate(cache.recurrent):
        state.cache = [arrays.get(f"state.{i}.{j}") for j in range(len(state.cache))]
    return cache
