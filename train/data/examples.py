"""Examples by index: in memory, in shards on disk, or without hidden states, which are then captured per batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from eagle_mlx.hidden_states import Example
from eagle_mlx.shards import ShardReader


class InMemory:
    """A list of examples."""

    def __init__(self, examples: Sequence[Example]):
        self._examples = examples
        self.lengths = [len(example) for example in examples]
        self.has_states = bool(examples) and examples[0].states is not None

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    @property
    def loss_tokens(self) -> int:
        """The number of tokens to learn."""
        return sum(int(example.loss_mask.sum()) for example in self._examples)

    def where(self, index: int) -> str:
        """Return where a user can find the example."""
        return f"conversation {index + 1} of {len(self._examples)}, as they are read"


class OnDisk:
    """The examples of a folder of shards. All shards are verified at once and read when needed.

    The features come from `layers`, which must be in the shards or be the target's `last_layer`; None means all in the
    shards' order. Examples are cut to `most` tokens if given. Raises ShardError if a shard is damaged or missing.
    """

    has_states = True

    def __init__(
        self, reader: ShardReader, layers: Sequence[int] | None = None, last_layer: int = -1, most: int | None = None
    ):
        reader.verify()
        self._reader, self._most, self._last_layer = reader, most, last_layer
        self._layers = reader.meta.aux_layers if layers is None else tuple(layers)
        self.folder = reader.folder
        whole = [length for entry in reader.files for length in self._array(entry.name, "lengths").tolist()]
        self.lengths: list[int] = [min(length, most or length) for length in whole]

    def __getitem__(self, index: int) -> Example:
        example = self._reader[index]
        assert example.states is not None
        states = example.states.of_layers(self._layers, self._last_layer)
        return replace(example, states=states)[: self._most]

    def where(self, index: int) -> str:
        return self._reader.where(index)

    def count_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        """Return how often each token id occurs in the learned tokens, [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for entry in self._reader.files:
            learned = self._array(entry.name, "loss_mask") == 1
            if self._most is not None:
                lengths = self._array(entry.name, "lengths")
                learned &= np.concatenate([np.arange(length) < self._most for length in lengths])
            counts += np.bincount(self._array(entry.name, "tokens")[learned], minlength=vocab_size)
        return counts

    @property
    def loss_tokens(self) -> int:
        """The number of tokens to learn, before cutting."""
        return self._reader.loss_tokens

    def _array(self, shard: str, name: str) -> NDArray[Any]:
        with safe_open(str(self.folder / shard), "numpy") as file:
            found: NDArray[Any] = file.get_tensor(name)
        return found


class Joined:
    """The examples of several sources, concatenated. Either all or none have hidden states."""

    def __init__(self, parts: Sequence[Examples]):
        self._parts = list(parts)
        self._ends = list(accumulate(len(part.lengths) for part in parts))
        self.lengths: list[int] = [length for part in parts for length in part.lengths]
        self.has_states: bool = all(part.has_states for part in parts)

    def __getitem__(self, index: int) -> Example:
        part, row = self._place(index)
        return part[row]

    def where(self, index: int) -> str:
        part, row = self._place(index)
        return part.where(row)

    def _place(self, index: int) -> tuple[Examples, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


Examples = InMemory | OnDisk | Joined
"""Examples by index. In one source, either all or none have hidden states."""
