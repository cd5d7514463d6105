"""Training of a head on texts that arrive while it is in use, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads.base import DRAFT_WINDOW
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.hidden_states import Example
from eagle_mlx.hub import public_name
from eagle_mlx.target import Target

from .config import TrainConfig, file_type
from .data import InMemory, Rows, TrainData
from .data.examples import draft_vocabulary
from .kinds import LARGEST_STEP, Head, aux_layers_of, kind_of, merged, resolve
from .run.start import new_head, to_train
from .step import Stepper

ROWS, LENGTH = 4, 256
"""Rows of a step, and tokens of a row: a step is as long as a few rounds, since a request may wait for it."""
_SHARE = math.sqrt(ROWS * LENGTH / LARGEST_STEP)
"""Share of a whole run's peak learning rate: Adam's rate goes with the square root of the batch (Malladi et al. 2022,
arXiv 2205.10287)."""
_WARMUP = 10
"""Steps in which the rate rises, because AdamW's first updates are as large as if the gradients were certain."""


def first_head(target: Target, examples: Sequence[Example] = ()) -> Head:
    """Return a new head of the default kind: the best linear guess for some examples, or random without any.

    Its draft vocabulary has the examples' most frequent tokens.
    """
    config, texts = resolve(TrainConfig(), target.hidden_size), InMemory(examples)
    kept, _ = draft_vocabulary(target, config, texts.count_tokens(target.vocab_size), None)
    data = TrainData(texts, aux_layers_of(target, config), kept, {}, "memory")
    return new_head(target, data, config, begin=bool(examples))


class OnlineTrainer:
    """A head in training, and its optimizer."""

    def __init__(self, head: Head, target: Target, seed: int = 0, is_new: bool = False):
        """Train `head`, which nothing else may use, with the defaults of its kind; at a third of the usual rate unless
        it is new, or else it forgets. Raises ConfigError if it cannot be trained."""
        unroll = head.config.drafts if isinstance(head, BlockHead) else None
        batches = {"rows": ROWS, "length": LENGTH, "unroll": unroll, "lanes": 1, "seed": seed}
        named = {"init_from": "the serving head", "adapt": "" if is_new else "the serving head"}
        given = TrainConfig.of(head=kind_of(head).name, **named, **batches)
        self._config = resolve(given, target.hidden_size)
        kind_of(head).mismatches(head, self._config)  # refuses heads that cannot be trained
        self._target, self._head = target, to_train(head, target, self._config)
        self._before = None if is_new else weights_of(merged(self._head))
        self._stepper = Stepper(self._head, target, self._config)
        self._rng = np.random.default_rng(seed)
        self.steps = self.tokens = 0

    def step(self, examples: Sequence[Example], factor: float = 1.0) -> float | None:
        """Learn from a piece of each of at most `ROWS` examples, at `factor` times the usual rate. Return the loss;
        None if no piece has any.

        Raises NotFiniteError, before weights change, if the loss is not finite.
        """
        result = self._stepper(self._rows(examples), _SHARE * factor * min(1.0, (self.steps + 1) / _WARMUP))
        if result is None:
            return None
        self.steps, self.tokens = self.steps + 1, self.tokens + result.tokens
        return result.loss

    def _rows(self, examples: Sequence[Example]) -> Rows:
        pieces = [example[self._piece(example)] for example in examples[:ROWS]]
        states = [piece.states.whole for piece in pieces if piece.states is not None]
        width = max(map(len, pieces))
        width = min(LENGTH, -(-width // 64) * 64)  # few widths, since each is compiled on a GPU

        def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
            return np.stack([np.pad(x, [(0, width - len(x))] + [(0, 0)] * (x.ndim - 1)) for x in parts])

        return Rows(
            stacked([piece.tokens for piece in pieces]),
            stacked([piece.loss_mask for piece in pieces]),
            stacked([np.ones(len(piece), np.int32) for piece in pieces]),
            stacked(states),
        )

    def _piece(self, example: Example) -> slice:
        """Return a random piece of an example that has tokens to learn."""
        learned = np.flatnonzero(example.loss_mask)
        first = max(0, int(learned[0]) - LENGTH // 2) if len(learned) else 0
        start = first + int(self._rng.integers(max(1, len(example) - LENGTH - first + 1)))
        return slice(start, start + LENGTH)

    def took_over(self) -> None:
        """Take later means with the head that was just saved, because it serves now."""
        if self._before is not None:
            self._before = weights_of(merged(self._head, self._before))

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write the head over `folder`: unless it was new, the mean of the learned weights and those that serve, which
        forgets less (`merged`). Raises OutputError."""
        head = merged(self._head, self._before)
        about = {**extra, "step": self.steps, "tokens": self.tokens}
        if head.draft_window is not None:
            about[DRAFT_WINDOW] = head.draft_window
        kind_of(head).save(head, folder, public_name(self._target.name), about, file_type(self._config))
