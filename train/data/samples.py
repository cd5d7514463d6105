"""Where training samples come from: memory, shards on the disk, or tokens whose states are captured batch by batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from eagle_mlx.shards import Sample, ShardReader


@dataclass(frozen=True)
class Tokens:
    """A rendered conversation of T tokens, not seen by the target yet."""

    tokens: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T], 1 on the tokens to learn."""


class Samples(Protocol):
    """Samples by index. Those of one source either all carry hidden states or none does."""

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def has_states(self) -> bool: ...

    def __getitem__(self, index: int) -> Sample | Tokens: ...

    def where(self, index: int) -> str:
        """What a user would look for to see the sample."""
        ...


class InMemory:
    """A list of samples."""

    def __init__(self, samples: Sequence[Sample] | Sequence[Tokens]):
        self._samples = samples
        self.lengths = [len(sample.tokens) for sample in samples]
        self.has_states = bool(samples) and isinstance(samples[0], Sample)

    def __getitem__(self, index: int) -> Sample | Tokens:
        return self._samples[index]

    @property
    def loss_tokens(self) -> int:
        """Tokens to learn."""
        return sum(int(sample.loss_mask.sum()) for sample in self._samples)

    def where(self, index: int) -> str:
        return f"conversation {index + 1} of {len(self._samples)}, as they are read"


class OnDisk:
    """The samples of a folder of shards, all checked at once and read when they are needed.

    `read` are the places of the layers that are passed on as the aux ones: among those that the shards hold, and behind
    them the last layer. None for all but the last, in their order. Samples are cut after `most` tokens, where that is
    given. Raises ShardError for a shard that is damaged or missing.
    """

    has_states = True

    def __init__(self, reader: ShardReader, read: Sequence[int] | None = None, most: int | None = None):
        reader.verify()
        held = range(len(reader.meta.aux_layers))
        self._reader, self._most = reader, most
        self._read = None if read is None or [*read] == [*held] else tuple(read)
        self.folder = reader.folder
        whole = [length for entry in reader.files for length in self._array(entry.name, "lengths").tolist()]
        self.lengths: list[int] = [min(length, most or length) for length in whole]

    def __getitem__(self, index: int) -> Sample:
        sample = self._reader[index]
        at = slice(self._most)
        return Sample(sample.tokens[at], sample.loss_mask[at], self._aux(sample)[at], sample.last[at])

    def _aux(self, sample: Sample) -> NDArray[np.float16]:
        if self._read is None:
            return sample.aux
        size, count = sample.last.shape[1], len(self._reader.meta.aux_layers)
        layers = [
            sample.last if place == count else sample.aux[:, place * size : (place + 1) * size] for place in self._read
        ]
        return np.concatenate(layers, axis=1) if layers else sample.aux[:, :0]

    def where(self, index: int) -> str:
        return self._reader.where(index)

    def count_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token id is to be learnt: counts [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for entry in self._reader.files:
            learnt = self._array(entry.name, "loss_mask") == 1
            if self._most is not None:
                lengths = self._array(entry.name, "lengths")
                learnt &= np.concatenate([np.arange(length) < self._most for length in lengths])
            counts += np.bincount(self._array(entry.name, "tokens")[learnt], minlength=vocab_size)
        return counts

    @property
    def loss_tokens(self) -> int:
        """Tokens to learn, in samples that are not cut."""
        return self._reader.loss_tokens

    def _array(self, shard: str, name: str) -> NDArray[Any]:
        with safe_open(str(self.folder / shard), "numpy") as file:
            found: NDArray[Any] = file.get_tensor(name)
        return found


class Joined:
    """The samples of several sources, one after the other. They all carry states, or none does."""

    def __init__(self, parts: Sequence[Samples]):
        self._parts = list(parts)
        self._ends = list(accumulate(len(part.lengths) for part in parts))
        self.lengths = [length for part in parts for length in part.lengths]
        self.has_states = all(part.has_states for part in parts)

    def __getitem__(self, index: int) -> Sample | Tokens:
        part, row = self._place(index)
        return part[row]

    def where(self, index: int) -> str:
        part, row = self._place(index)
        return part.where(row)

    def _place(self, index: int) -> tuple[Samples, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)
