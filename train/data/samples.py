"""Where training samples come from: memory, shards on the disk, or tokens whose states are captured batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

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

    def where(self, index: int) -> str:
        return f"conversation {index + 1} of {len(self._samples)}, as they are read"


class OnDisk:
    """The samples of a folder of shards, all checked at once and read when they are needed.

    Without `aux` only the last layer's states are passed on. Raises ShardError for a shard that is damaged or missing.
    """

    has_states = True

    def __init__(self, reader: ShardReader, aux: bool = True):
        reader.verify()
        self._reader, self._aux = reader, aux
        self.lengths: list[int] = []
        for entry in reader.files:
            with safe_open(str(reader.folder / entry.name), "numpy") as file:
                self.lengths.extend(file.get_tensor("lengths").tolist())

    def __getitem__(self, index: int) -> Sample | Tokens:
        sample = self._reader[index]
        return sample if self._aux else replace(sample, aux=sample.aux[:, :0])

    def where(self, index: int) -> str:
        return self._reader.where(index)

    def count_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token id is to be learnt: counts [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for entry in self._reader.files:
            with safe_open(str(self._reader.folder / entry.name), "numpy") as file:
                learnt = file.get_tensor("tokens")[file.get_tensor("loss_mask") == 1]
            counts += np.bincount(learnt, minlength=vocab_size)
        return counts
