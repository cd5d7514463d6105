"""Examples by index, in memory or on disk, with or without hidden states; the draft vocabulary from their tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.hidden_states import Example
from eagle_mlx.shards import ShardReader
from eagle_mlx.target import Target

from ..config import TrainSettings


class InMemory:
    def __init__(self, examples: Sequence[Example]):
        self._examples = examples
        self.lengths = [len(example) for example in examples]
        self.has_states = bool(examples) and examples[0].states is not None
        self.keys = frozenset(example.key for example in examples)
        """The keys of the conversations' prompts, with 0 if one is unknown, as in the other classes."""
        self.loss_tokens = sum(int(example.loss_mask.sum()) for example in examples)
        """The number of tokens to learn."""

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def count_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        """Return how often each token id occurs in the learned tokens, [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for example in self._examples:
            counts += np.bincount(example.tokens[example.loss_mask == 1], minlength=vocab_size)
        return counts

    def where(self, index: int) -> str:
        """Return where a user can find the example."""
        return f"conversation {index + 1} of {len(self._examples)}, as they are read"


class OnDisk:
    """The examples of folders of shards, one after the other. All are verified at once and read when needed.

    The features come from `layers`, which must be in the shards or be the target's `last_layer`; None means all in the
    shards' order. Raises ShardError if a shard is damaged or missing.
    """

    has_states = True

    def __init__(self, *readers: ShardReader, layers: Sequence[int] | None = None, last_layer: int = -1):
        for reader in readers:
            reader.verify()
        self._readers, self._ends = readers, list(accumulate(map(len, readers)))
        self._layers, self._last_layer = readers[0].meta.aux_layers if layers is None else tuple(layers), last_layer
        self.about = f"shards {', '.join(reader.folder.name for reader in readers)}"
        self.loss_tokens = sum(reader.loss_tokens for reader in readers)
        self.lengths: list[int] = [length for array in self._arrays("lengths") for length in array.tolist()]
        self.keys: frozenset[int] = frozenset(key for array in self._arrays("keys") for key in array.tolist())

    def __getitem__(self, index: int) -> Example:
        reader, row = self._place(index)
        example = reader[row]
        assert example.states is not None
        return replace(example, states=example.states.of_layers(self._layers, self._last_layer))

    def where(self, index: int) -> str:
        reader, row = self._place(index)
        return reader.where(row)

    def count_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        counts = np.zeros(vocab_size, np.int64)
        for tokens, mask in zip(self._arrays("tokens"), self._arrays("loss_mask"), strict=True):
            counts += np.bincount(tokens[mask == 1], minlength=vocab_size)
        return counts

    def _place(self, index: int) -> tuple[ShardReader, int]:
        number = bisect_right(self._ends, index)
        return self._readers[number], index - (self._ends[number - 1] if number else 0)

    def _arrays(self, name: str) -> Iterator[NDArray[Any]]:
        for reader in self._readers:
            for entry in reader.files:
                with safe_open(str(reader.folder / entry.name), "numpy") as file:
                    yield file.get_tensor(name)


Examples = InMemory | OnDisk  # examples by index. Either all or none have hidden states


def choose_draft_vocab(
    counts: NDArray[np.int64], size: int, always: Collection[int] = (), had: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return the `size` most frequent token ids of counts [V], ascending, including `always` (special tokens).

    Of equally frequent ones, those that a head `had` come first, then lower ids. Raises ConfigError if `size` is larger
    than the vocabulary or smaller than `always`.
    """
    vocab_size = len(counts)
    if not 0 < size <= vocab_size:
        raise ConfigError(f"draft vocabulary of {size}: it must be between 1 and the target's {vocab_size}")
    kept = np.array(sorted({i for i in always if 0 <= i < vocab_size}), np.int64)
    if len(kept) > size:
        raise ConfigError(f"draft vocabulary of {size}: the target's {len(kept)} special tokens alone need more")
    kept_first = 2 * counts + np.isin(np.arange(vocab_size), [] if had is None else had)
    order = np.argsort(-kept_first, kind="stable")
    rest = order[~np.isin(order, kept)][: size - len(kept)]
    return np.sort(np.concatenate([kept, rest]))


def draft_vocabulary(
    target: Target, config: TrainSettings, counts: NDArray[np.int64], head: DraftHead | None
) -> tuple[NDArray[np.int64] | None, dict[str, Any]]:
    """Return the kept ids, None for all, and facts for the report. A `head` keeps its own, unless a number is given."""
    kept: NDArray[np.int64] | None = None
    had = None if head is None or head.token_ids is None else np.array(head.token_ids, np.int64)
    if head is not None and (config.head.lora_rank or not config.head.draft_vocab):
        kept = had
    elif config.head.draft_vocab and config.head.draft_vocab < target.vocab_size:
        tokenizer: Any = target.tokenizer
        always = {*tokenizer.eos_token_ids, *tokenizer.all_special_ids} if tokenizer is not None else ()
        kept = choose_draft_vocab(counts, config.head.draft_vocab, always, had)
    if kept is None:
        return None, {"draft_vocab": target.vocab_size, "draft_vocab_coverage": 1.0}
    total = int(counts.sum())
    coverage = float(counts[kept].sum() / total) if total else 1.0
    return kept, {"draft_vocab": len(kept), "draft_vocab_coverage": coverage}
