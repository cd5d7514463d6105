"""Batches through mlx-data: packed rows in the order of (seed, epoch), read ahead in background threads."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.data as dx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.shards import Sample

from .packing import Piece, order_of, pack
from .samples import Samples

_AHEAD = 4
_THREADS = 2


@dataclass(frozen=True)
class Rows:
    """A batch of B rows of L tokens on the host. Places behind a row's last token belong to segment 0."""

    tokens: NDArray[np.int32]
    """[B, L]"""
    loss_mask: NDArray[np.uint8]
    """[B, L], 1 on the tokens to learn."""
    segments: NDArray[np.int32]
    """[B, L]: 1, 2, … for a row's first, second, … conversation."""
    states: NDArray[np.float16] | None
    """[B, L, (n + 1) * H]: the n aux layers' outputs and the last layer's, side by side; None before capture."""

    def split(self, parts: int) -> list[Rows]:
        """The rows dealt out to at most `parts` smaller batches, none of them empty."""
        cuts = [index for index in np.array_split(np.arange(len(self.tokens)), parts) if len(index)]
        return [
            Rows(self.tokens[i], self.loss_mask[i], self.segments[i], None if self.states is None else self.states[i])
            for i in cuts
        ]


class Batches:
    """The batches of an epoch, the same for the same seed, epoch and samples."""

    def __init__(self, samples: Samples, rows: int, length: int, seed: int):
        self._samples, self._rows, self._length, self._seed = samples, rows, length, seed

    def steps_per_epoch(self) -> int:
        return math.ceil(len(self._pack(0)) / self._rows)

    def epoch(self, epoch: int, skip: int = 0) -> Generator[Rows, None, None]:
        """Yield the epoch's batches from the `skip`-th on. Close the generator when leaving early: it stops threads.

        Raises whatever reading a sample raises, such as ShardError.
        """
        packed = self._pack(epoch)
        order = order_of(self._seed + 1, epoch, len(packed))[skip * self._rows :]
        if not len(order):
            return
        stream = (
            dx.buffer_from_vector([{"row": i} for i in range(len(packed))])
            .perm(order.tolist())
            .sample_transform(lambda sample: self._read(packed[int(sample["row"])]))
        )
        for key in self._keys():
            stream = stream.pad_to_size(key, 0, self._length, 0)
        stream = stream.batch(self._rows).ordered_prefetch(_AHEAD, _THREADS)
        try:
            for batch in stream:
                states = batch["states"].view(np.float16) if self._samples.has_states else None
                yield Rows(batch["tokens"], batch["loss_mask"], batch["segments"], states)
        finally:
            del stream  # joins the threads, which must not outlive the interpreter

    def _pack(self, epoch: int) -> list[tuple[Piece, ...]]:
        lengths = self._samples.lengths
        return pack(lengths, order_of(self._seed, epoch, len(lengths)), self._length)

    def _keys(self) -> Sequence[str]:
        return ("tokens", "loss_mask", "segments", *(("states",) if self._samples.has_states else ()))

    def _read(self, pieces: tuple[Piece, ...]) -> dict[str, NDArray[Any]]:
        """One row, as mlx-data takes it: it knows no float16, so the states travel as bytes."""
        samples = [(self._samples[piece.sample], slice(piece.start, piece.stop)) for piece in pieces]
        row: dict[str, NDArray[Any]] = {
            "tokens": np.concatenate([sample.tokens[at] for sample, at in samples]),
            "loss_mask": np.concatenate([sample.loss_mask[at] for sample, at in samples]),
            "segments": np.repeat(np.arange(1, len(pieces) + 1, dtype=np.int32), [len(piece) for piece in pieces]),
        }
        if self._samples.has_states:
            parts = [(s.aux[at], s.last[at]) for s, at in samples if isinstance(s, Sample)]
            states = np.concatenate([np.concatenate(part, axis=1) for part in parts])
            row["states"] = np.ascontiguousarray(states, np.float16).view(np.uint8)
        return row
